"""Layers in slices are the whole ones: results, initial values, ties, links; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, pipelining, precision
from lingvo_gpipe.layers import slices as slicing
from lingvo_gpipe.network import traffic
from lingvo_gpipe.run import export
from lingvo_gpipe.tasks.lm import transformer as lm
from lingvo_gpipe.tasks.mt.model import transformer as mt
from tests.cases import layer_cases

V, D, ROWS = 11, 6, (4, 5)
SLICES = (2, 3, V, (4, 1, 6), (1, 10))
HEADS: tuple[dict[str, Any], ...] = (
    {"logit_clip": 0.7},
    {"label_smoothing": 0.1, "top_k": 3},
    {"use_bias": False, "top_k": V + 2},
)


def normal(*shape: int, seed: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 5], dtype=tf.float64)


def labels() -> tuple[tf.Tensor, tf.Tensor]:
    """Return labels and their weights; a label of weight 0 is out of range."""
    label = tf.random.stateless_uniform(ROWS, [3, 1], 0, V, tf.int32)
    weights = tf.cast(tf.sequence_mask([5, 1, 3, 2], 5), tf.float64) * 0.5
    return tf.where(weights > 0, label, 99), weights


def divided(params: Any, theta: dict[str, tf.Tensor]) -> dict[str, dict[str, tf.Tensor]]:
    """Return the theta of a layer's slices: rows of the whole layer's weights."""
    parts = {name: tf.split(value, params.slice_sizes()) for name, value in theta.items()}
    return {
        f"{params.name}_{n}": {name: values[n] for name, values in parts.items()}
        for n in range(len(params.slice_sizes()))
    }


def joined(theta: Any, name: str) -> tf.Tensor:
    """Return a weight of all slices."""
    return tf.concat([tf.convert_to_tensor(part[name]) for part in theta.values()], 0)


def run(params: Any, theta: Any, fields: dict[str, Any], *, training: bool = True) -> Any:
    """Run the layers of `params` one after the other, with weights by layer and name.

    Returns:
        The last output, what was collected, and the gradients of a scalar by theta and x.
    """
    ctx = layer_cases.context(training=training)
    stream = dict(fields)
    watched = [theta, [x for x in fields.values() if x.dtype.is_floating]]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        for part in params.consecutive():
            inputs = tuple(stream[name] for name in part.reads)
            layer_theta = theta.get(part.name, {})
            output = part.instantiate().run(layer_theta, layer_cases.as_read(inputs), ctx)
            stream[part.writes[0]] = output
        shares = tf.cast(tf.range(output.shape[-1]), output.dtype)
        target = tf.add_n(list(ctx.collected.losses.values()) or [tf.reduce_sum(output * shares)])
    gradients = tape.gradient(target, watched)
    return output, ctx.collected.as_nest(), gradients


def close(found: Any, wanted: Any, tolerance: float = 1e-14) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fields", HEADS, ids=str)
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_a_softmax_in_slices_is_the_whole_one(slices: Any, fields: dict[str, Any]) -> None:
    """Loss, every gradient and metric; of equal logits in two slices, the lower id is the best."""
    reads = ("x", "label", "weights")
    whole = layers.SequenceSoftmax.Params(
        name="s", vocabulary=V, reads=reads, dtype="float64", **fields
    )
    sliced = whole.copy().set(slices=slices)
    theta = {"kernel": normal(V, D, seed=1), "bias": normal(V, seed=2)}
    theta = {name: tf.tensor_scatter_nd_update(w, [[9]], w[1:2]) for name, w in theta.items()}
    if not whole.use_bias:
        del theta["bias"]
    label, weights = labels()
    inputs = {"x": normal(*ROWS, D, seed=3), "label": label, "weights": weights}
    for training in (True, False):
        logits, collected, gradients = run(whole, {"s": theta}, inputs, training=training)
        log_p, found, of_slices = run(sliced, divided(sliced, theta), inputs, training=training)
        tf.nest.map_structure(lambda a, b: close(a, b, 4e-16 * 32), found, collected)
        close(of_slices[1][0], gradients[1][0])
        for name in theta:
            close(joined(of_slices[0], name), gradients[0]["s"][name])
        wanted = tf.gather(tf.nn.log_softmax(logits), label % V, batch_dims=2)
        close(log_p[weights > 0], wanted[weights > 0])
    assert len(np.unique(tf.argmax(logits, -1))) > 2
    assert np.any(tf.argmax(logits, -1) == 1)  # and that of id 9 is equal


def test_clipped_logits_have_no_gradient_and_evaluation_clips_none() -> None:
    head = layers.SequenceSoftmax.Params(
        name="s", vocabulary=V, logit_clip=0.7, reads=("x", "label"), dtype="float64"
    )
    theta = {"kernel": normal(V, D, seed=1), "bias": normal(V, seed=2)}
    x, label = normal(*ROWS, D, seed=3), labels()[0] % V
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, theta])
        logits = tf.einsum("btd,vd->btv", x, theta["kernel"]) + theta["bias"]
        clipped = tf.clip_by_value(logits, -0.7, 0.7)
        losses = {
            training: tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(label, each))
            for training, each in ((True, clipped), (False, logits))
        }
    for training, loss in losses.items():
        found = run(head, {"s": theta}, {"x": x, "label": label}, training=training)
        close(found[1]["losses"]["loss"], loss)
        close(found[2][1][0], tape.gradient(loss, x))
        close(found[2][0]["s"]["kernel"], tape.gradient(loss, theta["kernel"]))


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int32, tf.int64], ids=str)
@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16"])
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_an_embedding_in_slices_is_the_whole_one_bit_for_bit(
    slices: Any, policy: str, dtype: tf.DType
) -> None:
    whole = layers.Embedding.Params(
        name="e", vocabulary=V, units=D, scale=True, dtype=policy, reads=("ids",)
    )
    sliced = whole.copy().set(slices=slices)
    table = {"table": tf.cast(normal(V, D, seed=4), precision.policy(policy).variable)}
    numbers = labels()[0] % V
    wanted = run(whole, {"e": table}, {"ids": numbers})
    for params, theta in ((whole, {"e": table}), (sliced, divided(sliced, table))):
        found = run(params, theta, {"ids": tf.cast(numbers, dtype)})
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(joined(found[2][0], "table"), joined(wanted[2][0], "table"))


def test_ids_beyond_a_label_s_dtype_are_no_hits() -> None:
    params = layers.SequenceSoftmax.Params(name="s", vocabulary=300, slices=2, reads=("x", "label"))
    bias = tf.split(tf.one_hot(299, 300), 2)
    theta = {f"s_{n}": {"kernel": tf.zeros([150, 2]), "bias": bias[n]} for n in range(2)}
    fields = {"x": tf.ones([1, 2]), "label": tf.constant([299 - 256], tf.uint8)}
    _, collected, _ = run(params, theta, fields)
    assert float(collected["sums"]["accuracy"]["total"]) == 0.0


def test_half_precision_computes_the_sums_in_the_master_dtype() -> None:
    params = layers.SequenceSoftmax.Params(
        name="s", vocabulary=V, slices=2, dtype="mixed_bfloat16", label_smoothing=0.1
    )
    x = tf.TensorSpec((*ROWS, D), tf.bfloat16)
    for part in params.consecutive()[:2]:
        meta = part.fprop_meta(x, tf.TensorSpec(ROWS, tf.int32))
        floats = [s.dtype for s in tf.nest.flatten(meta.outputs) if s.dtype.is_floating]
        assert set(floats) == {tf.float32}


# --- in a network ---------------------------------------------------------------------------------


def language_net(slices: Any = 4, *, tie: bool = True, **fields: Any) -> list[Any]:
    """Return a small language model in slices."""
    return [
        layers.Embedding.Params(
            name="embedding", vocabulary=256, units=D, slices=slices, reads=("ids",)
        ),
        layers.Dense.Params(name="middle", units=D),
        layers.SequenceSoftmax.Params(
            name="softmax",
            vocabulary=256,
            slices=slices,
            reads=("x", "label", "weights"),
            tie={"kernel": "embedding/table"} if tie else {},
            **fields,
        ),
    ]


TOKENS = {
    "ids": tf.TensorSpec(ROWS, tf.int32),
    "label": tf.TensorSpec(ROWS, tf.int32),
    "weights": tf.TensorSpec(ROWS),
}


def analyze(flat: list[Any], **settings: Any) -> network.Analysis:
    params = pipelining.PipeliningLayer.Params(layers=flat, **settings)
    return network.analyze(params, TOKENS)


def test_slices_are_layers_of_the_network() -> None:
    analysis = analyze(language_net((100, 150, 6)))
    names = ["embedding_0", "embedding_1", "embedding_2", "middle"]
    names += ["softmax_0", "softmax_1", "softmax_2", "softmax"]
    assert [layer.name for layer in analysis.layers] == names
    assert {path: spec.shape for path, spec in analysis.variables.items()} == {
        "embedding_0/table": (100, D),
        "embedding_1/table": (150, D),
        "embedding_2/table": (6, D),
        "middle/kernel": (D, D),
        "middle/bias": (D,),
        "softmax_0/bias": (100,),
        "softmax_1/bias": (150,),
        "softmax_2/bias": (6,),
    }
    assert [layer.paths.get("kernel") for layer in analysis.layers[4:]] == [
        "embedding_0/table",
        "embedding_1/table",
        "embedding_2/table",
        None,
    ]


def test_the_first_slices_have_one_row_more() -> None:
    params = layers.Embedding.Params(name="e", vocabulary=11, units=2, slices=4)
    parts: Any = params.consecutive()
    assert [(part.first, part.rows) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 2)]


def test_no_tensor_of_the_vocabulary_s_size_crosses_a_cut() -> None:
    """Four numbers per label, or 16 bytes, where logits would be 1,024."""
    analysis = analyze(language_net(tie=False), num_partitions=10, cuts=(1,) * 10)
    for cell in analysis.cells:
        for version in cell.exports:
            for spec in tf.nest.flatten(analysis.specs[version]):
                assert 256 not in spec.shape
                assert 64 not in spec.shape
    count = ROWS[0] * ROWS[1]
    sent = {
        (link.source, link.target): (link.forward_bytes, link.backward_bytes)
        for link in traffic.links(analysis)
        if "softmax_sums" in link.names and link.source > 4
    }
    assert sent == {(n, n + 1): (count * 16, count * 12) for n in (5, 6, 7, 8)}


def test_a_cost_in_params_is_divided() -> None:
    flat = language_net((64, 192))
    flat[0].cost = 8.0
    flat[2].cost = 4.0
    costs = analyze(flat).cells[0].costs
    assert costs[:2] == (2.0, 6.0)
    assert costs[3:] == (1.0, 3.0, 0.0)


def test_a_language_model_without_labels_returns_all_logits() -> None:
    """Where its head reads no label, and where it is served: probabilities of the whole model."""
    flat = language_net(3)
    fields = {
        "ids": tf.constant([[3, 200, 77, 5, 255]] * 2),
        "label": tf.zeros([2, 5], tf.int32),
        "weights": tf.ones([2, 5]),
    }
    pipe = pipelining.PipeliningLayer.Params(layers=flat).instantiate()
    assert pipe(fields, training=False).shape == (2, 5)
    weights = {path: variable.numpy() for path, variable in pipe.by_path.items()}
    table = np.concatenate([weights[f"embedding_{n}/table"] for n in range(3)])
    x = table[fields["ids"]] @ weights["middle/kernel"] + weights["middle/bias"]
    logits = x @ table.T + np.concatenate([weights[f"softmax_{n}/bias"] for n in range(3)])
    flat[2].reads = ("x",)
    bare = pipelining.PipeliningLayer.Params(layers=flat).instantiate()
    bare.build({"ids": fields["ids"]})
    for path, variable in bare.by_path.items():
        variable.assign(weights[path])
    close(bare({"ids": fields["ids"]}, training=False), logits, 1e-5)
    served = export.InferenceNetwork(pipe.params, {"ids": TOKENS["ids"]})
    for path, variable in served.by_path.items():
        variable.assign(weights[path])
    found = served({"ids": fields["ids"]})
    assert set(found) == {"probabilities"}
    close(found["probabilities"], tf.nn.softmax(logits), 1e-5)


def test_ids_and_labels_out_of_range_are_refused_once() -> None:
    analysis = analyze(language_net())
    fields = {"ids": np.zeros(ROWS, np.int32), "label": np.zeros(ROWS, np.int32)}
    fields["weights"] = np.ones(ROWS, np.float32)
    analysis.check_values(fields)
    text = r"field 'ids', row 0, position \[0\]: 256 .* layer embedding_0 takes 0 to 255 \(its"
    with pytest.raises(errors.InputError, match=text):
        analysis.check_values(fields | {"ids": np.full(ROWS, 256)})
    with pytest.raises(errors.InputError, match=r"layer softmax takes 0 to 255 \(its vocabulary"):
        analysis.check_values(fields | {"label": np.full(ROWS, -1)})


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("VarianceScaling", {"mode": "fan_out", "scale": 2.0}),
        ("VarianceScaling", {"mode": "fan_in", "distribution": "uniform"}),
        ("glorot_uniform", {}),
        ("he_normal", {}),
        ("RandomNormal", {"stddev": 0.3}),
    ],
    ids=str,
)
def test_initial_values_are_distributed_as_in_the_whole(kind: str, arguments: Any) -> None:
    whole = layers.Embedding.Params(
        name="e", vocabulary=6000, units=40, table_init=kind, table_init_args=arguments
    )
    of_whole = layer_cases.create_flat(whole.fprop_meta(TOKENS["ids"]))["table"]
    sliced = whole.copy().set(slices=(1000, 5000))
    metas = [
        parts.fprop_meta(*inputs)
        for parts, inputs in zip(
            sliced.consecutive(),
            ((TOKENS["ids"],), (TOKENS["ids"], tf.TensorSpec((*ROWS, 40)))),
            strict=True,
        )
    ]
    for n, meta in enumerate(metas):
        part = layer_cases.create_flat(meta, n)["table"]
        assert abs(np.std(part) / np.std(of_whole) - 1.0) < 0.02
        assert abs(np.max(np.abs(part)) / np.max(np.abs(of_whole)) - 1.0) < 0.3


def test_initial_kernels_of_a_feed_forward_part_use_the_whole_fans() -> None:
    params = layers.TransformerLayer.Params(
        name="t", units=300, heads=1, hidden=900, slices=(100, 800)
    )
    limit = (6 / 1200) ** 0.5
    x = tf.TensorSpec((2, 3, 300))
    _, first, second, _ = params.consecutive()
    for n, meta in enumerate((first.fprop_meta(x), second.fprop_meta(x, x))):
        values = layer_cases.create_flat(meta, n)
        for path in ("dense/kernel", "dense_1/kernel"):
            assert abs(np.max(np.abs(values[f"feed_forward/{path}"])) / limit - 1.0) < 0.01


# --- what is refused ------------------------------------------------------------------------------


def _with_tie(owner: Any, borrower: Any) -> list[Any]:
    flat = language_net()
    return [owner or flat[0], flat[1], borrower or flat[2]]


def transformer(name: str, slices: Any, **fields: Any) -> Any:
    return layers.TransformerLayer.Params(
        name=name, units=4, heads=1, hidden=3, slices=slices, **fields
    )


WHOLE = layers.Embedding.Params(name="embedding", vocabulary=256, units=D, reads=("ids",))
WHOLE_SOFTMAX = layers.SequenceSoftmax.Params(
    name="softmax",
    vocabulary=256,
    reads=("x", "label", "weights"),
    tie={"kernel": "embedding/table"},
)


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        (
            lambda: language_net(257),
            "embedding (Embedding): slices=257, but vocabulary=256. Use 1 to 256",
        ),
        (
            lambda: language_net((100, 155)),
            "embedding (Embedding): slices (100, 155) add up to 255, but vocabulary=256. "
            "Change a size, or set slices=2 for equal ones",
        ),
        (
            lambda: language_net((256, 0)),
            "embedding (Embedding): field slices is (256, 0), expected at least 1",
        ),
        (
            lambda: language_net(0),
            "embedding (Embedding): field slices is 0, expected at least 1",
        ),
        (
            lambda: _with_tie(language_net(2)[0], None),
            "softmax (SequenceSoftmax): slices of [64, 64, 64, 64], but tied to 'embedding/table', "
            "and embedding has slices of [128, 128]. Set their fields slices alike",
        ),
        (
            lambda: _with_tie(WHOLE, language_net(8)[2]),
            "softmax (SequenceSoftmax): slices of [32, 32, 32, 32, 32, 32, 32, 32], but tied to "
            "'embedding/table', and embedding is not sliced. Set their fields slices alike",
        ),
        (
            lambda: _with_tie(None, WHOLE_SOFTMAX),
            "softmax/kernel is whole, but tied to 'embedding/table', which is in slices "
            "(embedding_0/table, …). Divide both into equal slices, or neither",
        ),
        (
            lambda: [*language_net(), layers.Dense.Params(name="softmax_1", units=2)],
            "two layers are named 'softmax_1'. Rename one of them",
        ),
        (
            lambda: [transformer("t", 4)],
            "t (TransformerLayer): slices=4, but hidden=3. Use 1 to 3",
        ),
        (
            lambda: [transformer("t", (1, 1))],
            "t (TransformerLayer): slices (1, 1) add up to 2, but hidden=3. Change a "
            "size, or set slices=2 for equal ones",
        ),
        (
            lambda: [
                transformer("t", 2),
                transformer(
                    "u", 3, tie={"feed_forward/dense/kernel": "t/feed_forward/dense/kernel"}
                ),
            ],
            "u (TransformerLayer): slices of [1, 1, 1], but tied to 't/feed_forward/dense/kernel', "
            "and t has slices of [2, 1]. Set their fields slices alike",
        ),
        (
            lambda: [
                layers.TransformerLayer.Params(
                    name="t", units=4, heads=1, hidden=3, slices=2, cost=1.0
                )
            ],
            "t (TransformerLayer): cost=1.0, but it is several layers. Leave the field empty",
        ),
        (
            lambda: language_net(kernel_init="Orthogonal", kernel_init_args={}),
            "softmax_0 (SoftmaxSlice): initializer 'Orthogonal' {} depends on the whole matrix. "
            "Use one that draws each value alone, such as VarianceScaling",
        ),
    ],
)
def test_what_cannot_be_sliced_is_refused(flat: Any, text: str) -> None:
    with pytest.raises(errors.LayerError) as caught:
        analyze(flat())
    assert str(caught.value) == text


def test_what_a_slice_cannot_read_is_named() -> None:
    loss = layers.SlicedLoss.Params(name="s", vocabulary=9, logits=("a",))
    x = tf.TensorSpec((*ROWS, D))
    with pytest.raises(errors.LayerError, match=r"'sums' holds no sums. Read what the last"):
        loss.fprop_meta(x, TOKENS["label"])
    logits = layers.JoinedLogits.Params(name="s", reads=("a", "b"))
    with pytest.raises(errors.LayerError, match=r"\[\[4, 5, 6\], \[4, 6\]\] cannot be joined"):
        logits.fprop_meta(x, tf.TensorSpec((4, 6)))


def test_a_transformer_layer_in_slices_is_several_layers() -> None:
    """The keys of its first layer are those of the whole one; those of slices are alike."""
    whole = layers.TransformerLayer.Params(name="t", units=8, heads=2, hidden=7, dropout=0.1)
    sliced = whole.copy().set(slices=(3, 4))
    last = layers.MeanSquaredError.Params(name="error")
    x = tf.TensorSpec((3, 5, 8))
    found = []
    for flat in ([whole, last], [sliced, last]):
        params = pipelining.PipeliningLayer.Params(layers=flat)
        found.append(network.analyze(params, {"x": x, "target": x}))
    one, other = found
    assert [info.name for info in other.layers] == ["t", "t_0", "t_1", "t_end", "error"]
    inner = {path for path in one.variables if path.startswith("t/feed_forward/")}
    assert len(inner) == 4
    assert one.variables.keys() - inner == {p for p in other.variables if p.startswith("t/")}
    for path in inner:
        parts = [
            other.variables[f"t_{n}/{path[2:]}"].size
            for n in range(2)
            if f"t_{n}/{path[2:]}" in other.variables
        ]
        assert sum(parts) == one.variables[path].size
    flops = [sum(info.meta.flops_forward for info in each.layers) for each in found]
    assert flops[0] == flops[1]


@pytest.mark.parametrize("slices", [1, 2, (1, 1, 1)], ids=str)
def test_a_feed_forward_part_may_be_tied_as_a_whole(slices: Any) -> None:
    paths = [f"feed_forward/{name}" for name in ("dense/kernel", "dense/bias")]
    paths += [path.replace("dense", "dense_1") for path in paths]
    tied = transformer("u", slices, tie={path: f"t/{path}" for path in paths})
    last = layers.MeanSquaredError.Params(name="error")
    params = pipelining.PipeliningLayer.Params(layers=[transformer("t", slices), tied, last])
    x = tf.TensorSpec((3, 5, 4))
    analysis = network.analyze(params, {"x": x, "target": x})
    assert not [path for path in analysis.variables if path[0] == "u" and "/feed_forward/" in path]
    sums = {"u": 0, "t": 0}
    for layer in analysis.layers[:-1]:
        for path, owner in layer.paths.items():
            if path.startswith("feed_forward/"):
                sums[layer.name[0]] += analysis.variables[owner].size
    assert sums["u"] == sums["t"] == 2 * 4 * 3 + 3 + 4


def test_an_activation_over_all_hidden_units_has_no_slices() -> None:
    params = layers.TransformerLayer.Params(
        name="t", units=4, heads=2, hidden=6, activation="softmax", slices=2
    )
    with pytest.raises(errors.LayerError, match="one of all hidden units together"):
        params.consecutive()


def test_slices_inside_another_layer_are_refused() -> None:
    inner = layers.TransformerLayer.Params(units=8, heads=2, hidden=7, slices=2)
    around = layers.Sequential.Params(name="s", layers=[inner])
    with pytest.raises(errors.LayerError, match=r"slices=2 inside another layer"):
        around.fprop_meta(tf.TensorSpec((3, 5, 8)))


# --- the network's field `slices` -----------------------------------------------------------------

SIZES = {"units": 8, "heads": 2, "hidden": 12, "vocabulary": 11}


def language(slices: Any) -> Any:
    return pipelining.PipeliningLayer.Params(layers=lm.language_model(2, **SIZES), slices=slices)


def translation() -> list[Any]:
    sizes = mt.TranslationTransformer(
        num_layers=2, hidden=12, heads=2, vocabulary=11, units=8, tie="softmax"
    )
    return mt.translation_transformer(sizes)


@pytest.mark.parametrize(
    ("slices", "by_layer"),
    [
        ({"embedding": 3, "softmax": (4, 7)}, {"embedding": 3, "softmax": (4, 7)}),
        ({"layer_1": 3, "layer_*": 2}, {"layer_0": 2, "layer_1": 3}),
        ({"layer_1": 1, "layer_*": 1, "embedding": 1}, {}),
    ],
    ids=str,
)
def test_a_network_divides_layers_by_name(slices: Any, by_layer: Any) -> None:
    """The first pattern that matches counts."""
    wanted = language({})
    for layer in wanted.layers:
        layer.set(**{"slices": by_layer[layer.name]} if layer.name in by_layer else {})
    assert network.layer_params(language(slices)) == network.layer_params(wanted)


def test_the_field_goes_to_text_and_back() -> None:
    params = language({})
    params.override("slices={'softmax': 3, 'embedding': (4, 7)}")
    assert hyperparams.from_text(params.to_text()) == params
    assert len(network.layer_params(params)) == 2 + 1 + 2 + 4


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (
            pipelining.PipeliningLayer.Params(layers=translation(), slices={"softmax": 3}),
            r"and target_embedding is not sliced\. Set their",
        ),
        (
            language({"sofmax": 2}),
            "slices: pattern 'sofmax' matches no layer; of those that can be divided, nearest "
            "'softmax'",
        ),
        (
            language({"position": 2}),
            r"^position \(PositionalEncoding\): it cannot be divided into slices\. Embeddings, ",
        ),
    ],
)
def test_slices_of_a_network_that_do_not_fit_are_refused(params: Any, text: str) -> None:
    with pytest.raises(errors.LayerError, match=text):
        network.layer_params(params)


def test_params_as_a_whole_do_not_depend_on_slices() -> None:
    for layer in (*lm.language_model(2, **SIZES), *translation(), layers.Dropout.Params()):
        other = layer.copy()
        if isinstance(layer, slicing.SlicedParams):
            other.set(slices=3)
            assert other != layer
        assert slicing.whole(other) == slicing.whole(layer) == layer
