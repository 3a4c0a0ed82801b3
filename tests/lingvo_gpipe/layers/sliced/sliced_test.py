"""Sliced layers are the whole ones: results, initial values, ties, links; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, pipelining, precision
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import traffic
from lingvo_gpipe.run import inference
from tests.cases import layer_cases

V, D, ROWS = 11, 6, (4, 5)
SLICES = (1, 2, 3, V, (4, 1, 6), (1, 10))
HEADS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1, "top_k": 3, "confusion": True},
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
    """Return the theta of a sliced layer: rows of the whole layer's weights."""
    parts = {name: tf.split(value, params.slice_sizes()) for name, value in theta.items()}
    count = len(params.slice_sizes())
    return {
        f"{params.name}_{n}": {name: values[n] for name, values in parts.items()}
        for n in range(count)
    }


def joined(params: Any, theta: Any, name: str) -> tf.Tensor:
    """Return a weight of all slices."""
    parts = [theta[f"{params.name}_{n}"][name] for n in range(len(params.slice_sizes()))]
    return tf.concat([tf.convert_to_tensor(part) for part in parts], 0)


def run(params: Any, theta: Any, inputs: tuple[Any, ...], *, training: bool = True) -> Any:
    """Return outputs, what was collected, and the loss's gradients by theta and the first input."""
    ctx = layer_cases.context(training=training)
    sources = [theta, inputs[0]]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = params.instantiate().run(theta, layer_cases.as_read(inputs), ctx)
        loss = tf.add_n(list(ctx.collected.losses.values()))
    return outputs, ctx.collected.as_nest(), tape.gradient(loss, sources)


def close(found: Any, wanted: Any, tolerance: float = 1e-14) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fields", HEADS, ids=str)
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_a_softmax_in_slices_is_the_whole_one(slices: Any, fields: dict[str, Any]) -> None:
    """Loss, every gradient and metric; of equal logits in two slices, the lower id is the best."""
    reads = ("x", "label", "weights")
    common: dict[str, Any] = {"name": "s", "vocabulary": V, "reads": reads, "dtype": "float64"}
    whole = layers.SequenceSoftmax.Params(**common, **fields)
    sliced = layers.SlicedSoftmax.Params(**common, **fields, slices=slices)
    theta = {"kernel": normal(V, D, seed=1), "bias": normal(V, seed=2)}
    theta = {name: tf.tensor_scatter_nd_update(w, [[9]], w[1:2]) for name, w in theta.items()}
    if not whole.use_bias:
        del theta["bias"]
    inputs = (normal(*ROWS, D, seed=3), *labels())
    for training in (True, False):
        logits, collected, gradients = run(whole, theta, inputs, training=training)
        log_p, found, of_slices = run(sliced, divided(sliced, theta), inputs, training=training)
        tf.nest.map_structure(lambda a, b: close(a, b, 4e-16 * 32), found, collected)
        close(of_slices[1], gradients[1])
        for name in theta:
            close(joined(sliced, of_slices[0], name), gradients[0][name])
        wanted = tf.gather(tf.nn.log_softmax(logits), inputs[1] % V, batch_dims=2)
        close(log_p[inputs[2] > 0], wanted[inputs[2] > 0])
    assert len(np.unique(tf.argmax(logits, -1))) > 2
    assert np.any(tf.argmax(logits, -1) == 1)  # and that of id 9 is equal


def test_clipped_logits_have_no_gradient_and_evaluation_clips_none() -> None:
    sliced = layers.SlicedSoftmax.Params(
        name="s", vocabulary=V, slices=3, logit_clip=0.7, reads=("x", "label"), dtype="float64"
    )
    theta = {"kernel": normal(V, D, seed=1), "bias": normal(V, seed=2)}
    x, label = normal(*ROWS, D, seed=3), labels()[0] % V
    kernel = theta["kernel"]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, kernel])
        logits = tf.einsum("btd,vd->btv", x, kernel) + theta["bias"]
        clipped = tf.clip_by_value(logits, -0.7, 0.7)
        losses = {
            training: tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(label, each))
            for training, each in ((True, clipped), (False, logits))
        }
    for training, loss in losses.items():
        found = run(sliced, divided(sliced, theta), (x, label), training=training)
        close(found[1]["losses"]["loss"], loss)
        close(found[2][1], tape.gradient(loss, x))
        close(joined(sliced, found[2][0], "kernel"), tape.gradient(loss, kernel))


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int32, tf.int64], ids=str)
@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16"])
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_an_embedding_in_slices_is_the_whole_one_bit_for_bit(
    slices: Any, policy: str, dtype: tf.DType
) -> None:
    common: dict[str, Any] = {"name": "e", "vocabulary": V, "units": D, "scale": True}
    whole = layers.Embedding.Params(**common, dtype=policy)
    sliced = layers.SlicedEmbedding.Params(**common, dtype=policy, slices=slices)
    table = tf.cast(normal(V, D, seed=4), precision.policy(policy).variable)
    numbers = labels()[0] % V
    outputs, gradients = [], []
    for params, theta, ids in (
        (whole, {"table": table}, tf.cast(numbers, dtype)),
        (whole, {"table": table}, numbers),
        (sliced, divided(sliced, {"table": table}), tf.cast(numbers, dtype)),
    ):
        with tf.GradientTape() as tape:
            tape.watch(theta)
            outputs.append(params.instantiate().run(theta, ids, layer_cases.context()))
            shares = tf.cast(normal(*ROWS, D, seed=6), table.dtype)
            target = tf.reduce_sum(tf.cast(outputs[-1], table.dtype) * shares)
        gradients.append(tape.gradient(target, theta))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
    np.testing.assert_array_equal(
        joined(sliced, gradients[2], "table"), tf.convert_to_tensor(gradients[0]["table"])
    )


def test_ids_beyond_a_label_s_dtype_are_no_hits() -> None:
    params = layers.SlicedSoftmax.Params(name="s", vocabulary=300, slices=2, reads=("x", "label"))
    bias = tf.split(tf.one_hot(299, 300), 2)
    theta = {f"s_{n}": {"kernel": tf.zeros([150, 2]), "bias": bias[n]} for n in range(2)}
    label = tf.constant([299 - 256], tf.uint8)
    _, collected, _ = run(params, theta, (tf.ones([1, 2]), label))
    assert float(collected["sums"]["accuracy"]["total"]) == 0.0


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("slices", [1, 2, (1, 6)], ids=str)
def test_a_feed_forward_part_in_slices_is_the_whole_one(slices: Any, use_bias: bool) -> None:
    """Outputs and every gradient; the bias of the output is added once."""
    sliced = layers.SlicedFeedForward.Params(
        name="f",
        units=D,
        hidden=7,
        slices=slices,
        use_bias=use_bias,
        activation="tanh",
        dtype="float64",
    )
    sizes = sliced.slice_sizes()
    shapes: dict[str, tuple[int, ...]] = {"middle/kernel": (D, 7), "output/kernel": (7, D)}
    if use_bias:
        shapes |= {"middle/bias": (7,), "output/bias": (D,)}
    whole = {path: normal(*shape, seed=len(path)) for path, shape in shapes.items()}
    x, shares = normal(*ROWS, D, seed=1), normal(*ROWS, D, seed=2)

    def compute(theta: Any) -> tf.Tensor:
        flat: dict[str, Any] = {f"f_{n}": {} for n in range(len(sizes))}
        for path, axis in (("middle/kernel", 1), ("middle/bias", 0), ("output/kernel", 0)):
            if path in theta:
                for n, part in enumerate(tf.split(theta[path], sizes, axis)):
                    flat[f"f_{n}"][path] = part
        if use_bias:
            flat["f_0"]["output/bias"] = theta["output/bias"]
        nested = {name: layer_cases.nested(part) for name, part in flat.items()}
        outputs: tf.Tensor = sliced.instantiate().run(nested, x, layer_cases.context())
        return outputs

    def reference(theta: Any) -> tf.Tensor:
        middle = tf.einsum("btd,dh->bth", x, theta["middle/kernel"])
        middle = tf.tanh(middle + theta.get("middle/bias", 0.0))
        outputs = tf.einsum("bth,hd->btd", middle, theta["output/kernel"])
        return outputs + theta.get("output/bias", 0.0)

    with tf.GradientTape(persistent=True) as tape:
        tape.watch([whole, x])
        found, wanted = compute(whole), reference(whole)
        targets = [tf.reduce_sum(each * shares) for each in (found, wanted)]
    close(found, wanted)
    for one, other in zip(
        *(tf.nest.flatten(tape.gradient(target, [whole, x])) for target in targets), strict=True
    ):
        close(one, other)


def test_half_precision_computes_the_sums_in_the_master_dtype() -> None:
    params = layers.SlicedSoftmax.Params(
        name="s", vocabulary=V, slices=2, dtype="mixed_bfloat16", label_smoothing=0.1
    )
    x = tf.TensorSpec((*ROWS, D), tf.bfloat16)
    for part in params.consecutive()[:2]:
        inputs = [x, tf.TensorSpec(ROWS, tf.int32)]
        meta = part.fprop_meta(*inputs)
        floats = [s.dtype for s in tf.nest.flatten(meta.outputs) if s.dtype.is_floating]
        assert set(floats) == {tf.float32}


# --- in a network ---------------------------------------------------------------------------------


def language_net(slices: Any = 4, *, tie: bool = True, **fields: Any) -> list[Any]:
    """Return a small language model in slices."""
    return [
        layers.SlicedEmbedding.Params(
            name="embedding", vocabulary=256, units=D, slices=slices, reads=("ids",)
        ),
        layers.Dense.Params(name="middle", units=D),
        layers.SlicedSoftmax.Params(
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
    params = layers.SlicedEmbedding.Params(name="e", vocabulary=11, units=2, slices=4)
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
        for link in traffic.links(analysis, traffic.Stream(analysis))
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


def test_ready_cells_count_slices() -> None:
    first, middle, last = language_net(2)
    params = pipelining.PipeliningLayer.Params(cells=[[first, middle], [last]], num_partitions=2)
    assert network.analyze(params, TOKENS).cuts == (3, 3)


def test_an_override_sets_the_number_of_slices() -> None:
    params = pipelining.PipeliningLayer.Params(layers=language_net(2, tie=False))
    params.set_path("layers[0].slices", 8)
    assert len(network.layer_params(params)) == 8 + 1 + 3
    assert hyperparams.from_text(params.to_text()) == params


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
    served = inference.InferenceNetwork(pipe.params, {"ids": TOKENS["ids"]})
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
    sliced = layers.SlicedEmbedding.Params(
        name="e",
        vocabulary=6000,
        units=40,
        slices=(1000, 5000),
        table_init=kind,
        table_init_args=arguments,
    )
    whole = layer_cases.create_flat(sliced_whole(sliced).fprop_meta(TOKENS["ids"]))["table"]
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
        assert abs(np.std(part) / np.std(whole) - 1.0) < 0.02
        assert abs(np.max(np.abs(part)) / np.max(np.abs(whole)) - 1.0) < 0.3


def test_initial_kernels_of_a_feed_forward_part_use_the_whole_fans() -> None:
    params = layers.SlicedFeedForward.Params(name="f", units=300, hidden=900, slices=(100, 800))
    limit = (6 / 1200) ** 0.5
    x = tf.TensorSpec((2, 300))
    for n, part in enumerate(params.consecutive()):
        meta = part.fprop_meta(*([x, x] if n else [x]))
        values = layer_cases.create_flat(meta, n)
        for path in ("middle/kernel", "output/kernel"):
            assert abs(np.max(np.abs(values[path])) / limit - 1.0) < 0.01


def sliced_whole(sliced: Any) -> Any:
    """Return the embedding that is sliced."""
    fields = ("name", "vocabulary", "units", "table_init", "table_init_args")
    return layers.Embedding.Params(**{name: sliced.get(name) for name in fields})


# --- what is refused ------------------------------------------------------------------------------


def _with_tie(owner: Any, borrower: Any) -> list[Any]:
    flat = language_net()
    return [owner or flat[0], flat[1], borrower or flat[2]]


def transformer(name: str, slices: Any, **fields: Any) -> Any:
    return layers.TransformerLayer.Params(
        name=name, units=4, heads=1, hidden=3, feed_forward_slices=slices, **fields
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
            "embedding (SlicedEmbedding): slices=257, but vocabulary=256. Use 1 to 256",
        ),
        (
            lambda: language_net((100, 155)),
            "embedding (SlicedEmbedding): slices (100, 155) add up to 255, but vocabulary=256. "
            "Change a size, or set slices=2 for equal ones",
        ),
        (
            lambda: language_net((256, 0)),
            "embedding (SlicedEmbedding): field slices is (256, 0), expected at least 1",
        ),
        (
            lambda: language_net(0),
            "embedding (SlicedEmbedding): field slices is 0, expected at least 1",
        ),
        (
            lambda: _with_tie(language_net(2)[0], None),
            "softmax (SlicedSoftmax): slices of 64, 64, 64, 64, but tied to 'embedding/table', and "
            "embedding has slices of 128, 128. Set their fields slices alike",
        ),
        (
            lambda: _with_tie(WHOLE, language_net(8)[2]),
            "softmax (SlicedSoftmax): 8 slices of 32, 32, …, 32, but tied to 'embedding/table', "
            "and embedding is not sliced. Set their fields slices alike",
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
            lambda: [layers.SlicedFeedForward.Params(name="f", units=4, hidden=3, slices=4)],
            "f (SlicedFeedForward): slices=4, but hidden=3. Use 1 to 3",
        ),
        (
            lambda: [transformer("t", 4)],
            "t (TransformerLayer): feed_forward_slices=4, but hidden=3. Use 1 to 3",
        ),
        (
            lambda: [transformer("t", (1, 1))],
            "t (TransformerLayer): feed_forward_slices (1, 1) add up to 2, but hidden=3. Change a "
            "size, or set feed_forward_slices=2 for equal ones",
        ),
        (
            lambda: [
                transformer("t", 2),
                transformer(
                    "u", 3, tie={"feed_forward/dense/kernel": "t/feed_forward/dense/kernel"}
                ),
            ],
            "u (TransformerLayer): slices of 1, 1, 1, but tied to 't/feed_forward/dense/kernel', "
            "and t has slices of 2, 1. Set their fields feed_forward_slices alike",
        ),
        (
            lambda: [
                layers.TransformerLayer.Params(
                    name="t", units=4, heads=1, hidden=3, feed_forward_slices=2, cost=1.0
                )
            ],
            "t (TransformerLayer): cost=1.0, but it is several layers. Set the network's costs, or "
            "leave the field empty",
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
    sliced = whole.copy().set(feed_forward_slices=(3, 4))
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


def test_slices_inside_another_layer_are_refused() -> None:
    inner = layers.TransformerLayer.Params(units=8, heads=2, hidden=7, feed_forward_slices=2)
    around = layers.Sequential.Params(name="s", layers=[inner])
    with pytest.raises(errors.LayerError, match=r"feed_forward_slices=2 inside another layer"):
        around.fprop_meta(tf.TensorSpec((3, 5, 8)))


def test_the_hook_is_one_layer_where_nothing_is_said() -> None:
    params: base.Layer.Params = layers.Dense.Params(units=3)
    assert params.consecutive() == (params,)
