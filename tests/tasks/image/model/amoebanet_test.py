"""AmoebaNet's cells compared with the reference, its parts by hand, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network, pipelining
from lingvo_gpipe.tasks.image.model import amoebanet, heads, operations
from tests.cases import layer_cases
from tests.networks import amoeba_nets, amoeba_reference
from tests.networks.amoeba_nets import amoeba_net

KINDS = tuple(amoeba_reference.CELLS)
FILTERS = 8
NORM = layers.BatchNorm.Params(momentum=0.9, epsilon=1e-3)
# What a cell reads: x, and the state before it, where there is one.
INPUTS = {
    "a larger state before": ((2, 6, 5, 7), (2, 11, 10, 5)),
    "a state of other channels": ((2, 6, 5, 7), (2, 6, 5, 5)),
    "a state that fits": ((2, 6, 5, 7), (2, 6, 5, FILTERS)),
    "no state before": ((2, 6, 5, 7),),
}


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("read", INPUTS)
def test_a_cell_is_that_of_the_reference(kind: tuple[str, str], read: str) -> None:
    """Output, variables and every gradient in training."""
    shapes = INPUTS[read]
    params = amoebanet.AmoebaCell.Params(
        genotype=kind[0],
        reduction=kind[1] == "reduction",
        filters=FILTERS,
        norm=NORM,
        reads=("x", "previous")[: len(shapes)],
        dtype="float64",
    )
    specs = tuple(tf.TensorSpec(shape, tf.float64) for shape in shapes)
    meta, inputs = layer_cases.meta_of(params, *specs), layer_cases.draw(specs, seed=3)
    random = np.random.default_rng(7)
    weights = {
        v.path: tf.constant(random.normal(size=v.shape) + v.path.endswith("gamma"))
        for v in meta.variables
        if not v.is_state
    }
    _, state = layer_cases.create_variables(meta)
    cell = params.instantiate()

    def ours() -> Any:
        ctx = layer_cases.context(state)
        return cell.run(layer_cases.nested(weights), layer_cases.as_read(inputs), ctx)

    def reference() -> Any:
        o = amoeba_reference.Plain(weights, epsilon=1e-3)
        return amoeba_reference.cell(
            o, "", kind, FILTERS, inputs[0], inputs[1] if len(inputs) > 1 else None
        )

    results = []
    for compute in (ours, reference):
        with tf.GradientTape() as tape:
            tape.watch([weights, inputs])
            output = compute()
            shares = tf.cos(tf.cast(tf.range(tf.size(output)), tf.float64))
            target = tf.reduce_sum(tf.reshape(output, [-1]) * shares)
        results.append((output, tape.gradient(target, [weights, list(inputs)])))
    assert tuple(meta.outputs.shape) == results[1][0].shape
    largest = max(float(tf.reduce_max(tf.abs(g))) for g in results[1][1][0].values())
    for a, b in zip(*map(tf.nest.flatten, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * largest)


# --- the list of layers ---------------------------------------------------------------------------


def analysed(*model: Any, side: int = 224, batch: int = 4, **settings: Any) -> network.Analysis:
    pipeline = {key: settings.pop(key) for key in ("num_partitions",) if key in settings}
    flat = amoeba_net(*model, **settings)
    fields = {
        "image": tf.TensorSpec([batch, side, side, 3]),
        "label": tf.TensorSpec([batch], tf.int32),
    }
    params = pipelining.PipeliningLayer.Params(layers=flat, **pipeline)
    return network.analyze(params, fields)


def test_the_layers_and_what_they_read() -> None:
    flat = amoeba_net("D", 18, 256, 1001, auxiliary_weight=0.4)
    assert [p.name for p in flat] == [
        *("stem_conv", "stem_cell_0", "stem_cell_1"),
        *(f"normal_{n}" for n in range(6)),
        "reduction_0",
        *(f"normal_{n}" for n in range(6, 12)),
        "reduction_1",
        *(f"normal_{n}" for n in range(12, 18)),
        "classifier",
    ]
    by_name = {p.name: p for p in flat}
    assert all(p.writes == (p.name,) for p in flat)
    assert by_name["stem_conv"].reads == ("image",)
    assert by_name["stem_cell_0"].reads == ("stem_conv",)
    assert by_name["stem_cell_1"].reads == ("stem_cell_0", "stem_conv")
    assert by_name["normal_6"].reads == ("reduction_0", "normal_5")
    assert by_name["normal_11"].reads == ("normal_10", "normal_9", "label")
    assert by_name["classifier"].reads == ("normal_17", "label")
    assert [p.name for p in flat if getattr(p, "auxiliary", None)] == ["normal_11"]


def test_the_small_stem_has_no_stem_cells() -> None:
    flat = amoeba_net("A", 3, 8, 10, stem="small")
    names = ["stem_conv", "normal_0", "reduction_0", "normal_1", "reduction_1", "normal_2"]
    assert [p.name for p in flat] == [*names, "classifier"]
    assert flat[1].reads == ("stem_conv",)
    assert flat[2].reads == ("normal_0", "stem_conv")


def test_every_link_carries_the_last_two_states() -> None:
    """The state before last goes directly to its reader: a cut sends two tensors and labels."""
    found = analysed("D", 18, 256, 1001, num_partitions=4)
    names = [[found.wiring.versions[v].name for v in route.imports] for route in found.cells]
    assert names[0] == ["image"]
    for before, route, imported in zip(found.cells[:-1], found.cells[1:], names[1:], strict=True):
        last, first = before.layers[-1], found.layers[before.layers[-1]].name
        assert set(imported) - {"label"} == {first, found.layers[last - 1].name}
        assert ("label" in imported) == (route is found.cells[-1])


def test_every_kernel_and_nothing_else_decays() -> None:
    """127 terms: the reference's own number for D(6, 64) with an auxiliary head."""
    found = analysed("D", 6, 64, 1001, auxiliary_weight=0.4)
    kernels = [v.path for v in found.variables.values() if v.group == "kernel" and not v.is_state]
    assert len(kernels) == 127
    assert all(path.endswith("kernel") for path in kernels)
    assert not [p for p in found.variables if p.endswith("kernel") and p not in kernels]


def test_kernels_begin_with_the_reference_s_deviation() -> None:
    conv = operations.conv("conv", 64, kernel_size=3)
    (kernel,) = layer_cases.meta_of(conv, tf.TensorSpec([1, 8, 8, 32])).variables
    drawn = kernel.initializer(kernel.shape, kernel.dtype, 1).numpy()
    assert drawn.std() == pytest.approx(np.sqrt(2.0 / (9 * 64)), rel=0.01)
    reference = np.sqrt(1.3 * 2.0 / (9 * 64))  # of the normal that is cut off at two deviations
    assert np.abs(drawn).max() == pytest.approx(2 * reference, rel=0.01)


# --- drop-path ------------------------------------------------------------------------------------


def dropped(step: int, keep: float = 0.5, steps: int = 10, **fields: Any) -> np.ndarray:
    params = operations.DropPath.Params(keep=keep, steps=steps, dtype="float64")
    ctx = layer_cases.context(**{"training": True, "seed": 1, **fields})
    ctx = ctx.replace(step=tf.constant(step, tf.int64))
    x = tf.ones([4000, 1, 2, 3], tf.float64)
    return np.asarray(params.instantiate().fprop({}, x, ctx))


@pytest.mark.parametrize(
    ("step", "steps", "share"),
    [(0, 10, 1.0), (2, 10, 0.9), (10, 10, 0.5), (25, 10, 0.5), (0, 0, 0.5)],
)
def test_drop_path_follows_its_schedule(step: int, steps: int, share: float) -> None:
    found = dropped(step, steps=steps)
    kept = found[:, 0, 0, 0] != 0
    assert np.mean(kept) == pytest.approx(share, abs=0.03)
    # Whole examples, and those that are kept are scaled.
    scaled = kept[:, None, None, None] / share
    np.testing.assert_allclose(found, np.broadcast_to(scaled, found.shape))


def test_drop_path_is_drawn_by_seed_and_path_and_leaves_evaluation_alone() -> None:
    np.testing.assert_array_equal(dropped(9), dropped(9))
    assert np.any(dropped(9) != dropped(9, seed=2))
    assert np.any(dropped(9) != dropped(9, path="other"))
    np.testing.assert_array_equal(dropped(9, training=False), 1.0)
    np.testing.assert_array_equal(dropped(9, keep=1.0), 1.0)


def test_drop_path_ends_every_operation_but_none() -> None:
    flat = amoeba_net("A", 2, 8, 10, drop_path_keep=0.7, drop_path_steps=100)
    cell = next(p for p in flat if p.name == "normal_0").instantiate()
    ends = {name: list(child.children)[-1] for name, child in cell.children.items()}
    operations_of = {name: child.params for name, child in cell.children.items() if "state" in name}
    assert len(operations_of) == 10
    for name, params in operations_of.items():
        assert (ends[name] == "drop_path") == (params.operation != "none")
    assert operations_of["state_2_left"].drop_path.steps == 100


# --- the auxiliary head, classes -----------------------------------------------------------


def pipeline(**settings: Any) -> Any:
    flat = amoeba_net("D", 2, 4, 3, stem="small", auxiliary_weight=0.4, **settings)
    flat = amoeba_nets.first_half(flat)
    pipe = pipelining.PipeliningLayer.Params(layers=flat, num_partitions=2, seed=1).instantiate()
    fields = {"image": tf.TensorSpec([4, 11, 11, 3]), "label": tf.TensorSpec([4], tf.int32)}
    pipe.build(fields)
    return pipe


@pytest.mark.parametrize(("classes", "has_top5"), [(3, False), (5, False), (6, True)])
def test_top5_is_a_metric_where_a_label_may_be_missed(classes: int, has_top5: bool) -> None:
    params = heads.Classifier.Params(
        name="head", classes=classes, top_k=5, reads=("image", "label")
    )
    meta = params.fprop_meta(tf.TensorSpec([2, 3, 3, 4]), tf.TensorSpec([2], tf.int32))
    assert [metric.name for metric in meta.metrics] == ["accuracy", *["top5"] * has_top5]
    assert params.top_k == 5  # as runs have written it


def test_the_auxiliary_head_is_only_in_training() -> None:
    pipe = pipeline()
    batch = {
        "image": tf.random.stateless_normal([4, 11, 11, 3], [1, 2]),
        "label": tf.constant([0, 1, 2, 1]),
    }
    trained, told = pipe.value_and_gradients(batch), pipe.evaluate(batch)
    assert set(trained.losses) == {"loss", "auxiliary"}
    assert set(told.losses) == {"loss"}
    assert float(told.loss) == float(told.losses["loss"])
    total = float(trained.losses["loss"]) + 0.4 * float(trained.losses["auxiliary"])
    assert float(trained.loss) == pytest.approx(total, rel=1e-6)
    of_head = {path for path in pipe.analysis.variables if path.startswith("normal_0/auxiliary/")}
    assert {path for path, spec in pipe.analysis.variables.items() if spec.training_only} == of_head
    assert "normal_0/auxiliary/softmax/kernel" in of_head
    weights = [path for path in of_head if not pipe.analysis.variables[path].is_state]
    assert all(np.any(trained.gradients[path] != 0) for path in weights)
    assert np.all(np.isfinite(pipe({**batch}, training=False)))


def test_what_is_served_has_no_auxiliary_head_and_no_label() -> None:
    flat = amoeba_net("D", 2, 4, 3, stem="small", auxiliary_weight=0.4)
    served = [own for p in flat if (own := p.inference())]
    assert len(served) == len(flat)
    assert not any("label" in p.reads for p in served)
    assert all(getattr(p, "auxiliary", None) is None for p in served)
    params = pipelining.PipeliningLayer.Params(layers=served)
    found = network.analyze(params, {"image": tf.TensorSpec([1, 11, 11, 3])})
    assert not found.losses
    told = served[-1].served(tf.zeros([1, 3]))
    np.testing.assert_allclose(told["probabilities"], 1 / 3)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: amoeba_net("C", 18, 256, 10),
            "no genotype 'C'. Use one of A, B, D",
        ),
        (
            lambda: amoeba_net("A", 6, 190, 10),
            "amoeba_net: filters=190 is not a multiple of 4, but the stem cells have a quarter and "
            "a half of them. Use 188 or 192",
        ),
        (
            lambda: amoeba_net("A", 1, 192, 10),
            "amoeba_net: num_cells=1, but a reduction cell comes before the second and the last "
            "third of them. Use 2 or more; the published networks have 6, 18, 36 or 72",
        ),
        (
            lambda: analysed("D", 6, 32, 10, side=66, auxiliary_weight=0.4),
            "normal_3: the auxiliary head pools windows of 5x5, but the cell before it returns "
            "4x4: the images are too small for it. Use at least 67x67 (11x11 with the small stem): "
            "input.height, input.width; or remove the head by auxiliary=None of its cell",
        ),
        (
            lambda: analysed("D", 6, 32, 10, side=2),
            "stem_conv (Stem): an image of 2x2 is too small for the stem's 3x3 convolution. Use "
            "images of 3x3 at least: input.height, input.width",
        ),
        (
            lambda: analysed("D", 6, 32, None),
            "classifier (Classifier): its number of classes is taken from the dataset "
            "before a run (task.complete). Without a dataset, set its field classes",
        ),
        (
            lambda: layer_cases.meta_of(
                operations.Operation.Params(operation="separable_3x3", filters=4),
                tf.TensorSpec([1, 4, 4, 4]),
            ),
            "Operation: no operation 'separable_3x3'; nearest 'separable_3x3_2', "
            "'separable_5x5_2', 'separable_7x7_2'",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused(call: Any, text: str) -> None:
    with pytest.raises(errors.LayerError) as caught:
        call()
    assert str(caught.value) == text


def test_images_just_large_enough_for_the_auxiliary_head() -> None:
    assert analysed("D", 6, 32, 10, side=67, auxiliary_weight=0.4).losses
    assert analysed("D", 6, 32, 10, side=11, stem="small", auxiliary_weight=0.4).losses
    assert analysed("D", 6, 32, 10, side=3).layers[-1].meta.outputs.shape == [4, 10]
