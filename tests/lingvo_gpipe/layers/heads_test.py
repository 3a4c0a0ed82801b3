"""Softmax heads: cross-entropy, served outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, pipelining
from lingvo_gpipe.layers import heads
from tests.cases import layer_cases

CLASSES = 5


def served(params: Any, outputs: tf.Tensor) -> dict[str, Any]:
    told: dict[str, Any] = params.served(outputs)
    return told


HEADS = [
    layers.Softmax.Params(name="head", classes=CLASSES, top_k=2),
    layers.SequenceSoftmax.Params(name="head", vocabulary=CLASSES, reads=("x", "label", "weights")),
    layers.MeanSquaredError.Params(name="head"),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.owner.__name__)
def test_a_head_reads_no_label_in_inference_and_has_the_same_variables(head: Any) -> None:
    own = head.inference()
    assert (tuple(own.reads), tuple(own.writes), own.name) == (("x",), ("x",), "head")
    assert len(head.reads) > 1
    meta = layer_cases.meta_of(own, tf.TensorSpec([2, 4, 3]))
    assert (meta.losses, meta.metrics) == ((), ())
    assert [v.path for v in meta.variables] == (["kernel", "bias"] if meta.variables else [])


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.owner.__name__)
def test_a_head_only_for_training_is_not_part_of_inference(head: Any) -> None:
    own = head.copy()
    own.training_only = True
    assert own.inference() is None


def test_layers_that_give_but_a_loss_or_metric_hand_their_input_on() -> None:
    for params in (
        layers.AuxiliaryLoss.Params(name="small"),
        layers.KerasMetric.Params(name="auc", metric="AUC"),
    ):
        assert params.inference() is None
        params.writes = ("y",)
        own: Any = params.inference()
        assert own.owner is layers.Identity
        assert (tuple(own.reads), tuple(own.writes), own.name) == (("x",), ("y",), params.name)


def test_probabilities_are_served_of_logits() -> None:
    logits = tf.constant([[1.0, 2.0, 4.0]])
    head = layers.Softmax.Params(classes=3)
    block = layers.Sequential.Params(layers=[layers.Flatten.Params(), head], reads=("x", "label"))
    for params in (head, block):
        (told,) = served(params, logits).items()
        assert told[0] == "probabilities"
        np.testing.assert_allclose(told[1], tf.nn.softmax(logits))
    plain = layers.Dense.Params(units=3, writes=("y",))
    assert list(served(plain, logits)) == ["y"]


def test_composed_layers_give_up_what_their_children_do() -> None:
    head = layers.Softmax.Params(classes=3)
    block = layers.Sequential.Params(layers=[head, layers.Dropout.Params()], reads=("y", "label"))
    own: Any = block.inference()
    assert tuple(own.reads) == ("y",)
    assert tuple(own.layers[0].reads) == ("x",)
    # A child in the middle receives as many values as before, so it continues to read them.
    two = layers.Identity.Params(reads=("x", "label"), writes=("x", "label"))
    kept = layers.Sequential.Params(layers=[two, head], reads=("y", "label"))
    still: Any = kept.inference()
    assert tuple(still.reads) == ("y", "label")
    outer = layers.Residual.Params(
        body=[layers.Dense.Params(units=3), layers.AuxiliaryLoss.Params()]
    )
    own = outer.inference()
    before, after = (layer_cases.meta_of(params, tf.TensorSpec([2, 3])) for params in (outer, own))
    assert [v.path for v in after.variables] == [v.path for v in before.variables]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cross_entropy_of_rows_is_its_formula(smoothing: float) -> None:
    rng = np.random.default_rng(2)
    logits, label = 4.0 * rng.normal(size=(30, CLASSES)), rng.integers(0, CLASSES, 30)
    smoothed, plain = heads.cross_entropy(tf.constant(logits), tf.constant(label), smoothing)
    logs = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    own = -logs[np.arange(30), label]
    np.testing.assert_allclose(plain, own, rtol=1e-12)
    wanted = (1.0 - smoothing) * own - smoothing * np.mean(logs, -1)
    np.testing.assert_allclose(smoothed, wanted, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_that_is_no_class_stops_the_program(smoothing: float) -> None:
    label = tf.constant([0, CLASSES, 1], tf.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=str(CLASSES)):
        heads.cross_entropy(tf.zeros([3, CLASSES]), label, smoothing)


@pytest.mark.parametrize(
    ("head", "kernel"),
    [
        (layers.Softmax.Params(classes=3, use_bias=False), (4, 3)),
        (layers.SequenceSoftmax.Params(vocabulary=3, use_bias=False), (3, 4)),
    ],
    ids=("classes", "tokens"),
)
def test_a_head_without_bias_or_labels(head: Any, kernel: tuple[int, int]) -> None:
    """The logits are a matrix product, and there is no loss without a label."""
    head.reads = ("x",)
    pipe = pipelining.PipeliningLayer.Params(layers=[head]).instantiate()
    x = tf.random.stateless_normal([2, 5, 4], [1, 2])
    if kernel == (4, 3):
        x = x[:, 0]
    logits = pipe(x)
    (weight,) = pipe.weights.values()
    assert tuple(weight.shape) == kernel
    np.testing.assert_allclose(
        logits,
        tf.linalg.matmul(x, weight, transpose_b=kernel == (3, 4)),
        rtol=1e-5,
        atol=1e-6,
    )
    assert not pipe.analysis.losses


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int16, tf.uint32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("head", [*HEADS[:2], HEADS[0].copy().set(label_smoothing=0.1)], ids=str)
def test_labels_of_any_integers_are_as_good_as_int32(head: Any, dtype: tf.DType) -> None:
    rng = np.random.default_rng(3)
    fields = {
        "x": tf.constant(rng.normal(size=(8, 3)), tf.float32),
        "label": tf.constant(rng.integers(0, CLASSES, 8), tf.int32),
        "weights": tf.constant(rng.random(8), tf.float32),
    }
    fields = {name: fields[name] for name in head.reads}
    results = [
        pipelining.PipeliningLayer.Params(layers=[head]).instantiate().evaluate(given)
        for given in (fields, fields | {"label": tf.cast(fields["label"], dtype)})
    ]
    one, other = (tf.nest.flatten((each.losses, each.sums)) for each in results)
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("head", "first", "later"),
    [
        (
            layers.MeanSquaredError.Params(reads=("x", "target", "weights")),
            {"x": (8, 4), "target": (8, 4), "weights": (8,)},
            [{"target": (8, 1)}, {"weights": (8, 1)}],
        ),
        (
            layers.SequenceSoftmax.Params(vocabulary=7, reads=("x", "label", "weights")),
            {"x": (4, 5, 3), "label": (4, 5), "weights": (4, 5)},
            [{"weights": (4, 1)}],
        ),
    ],
    ids=["regression", "sequences"],
)
def test_shapes_of_later_mini_batches_are_compared_too(
    head: Any, first: dict[str, Any], later: list[dict[str, Any]]
) -> None:
    def batch(shapes: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {
            name: tf.ones(shape, tf.int32 if name == "label" else tf.float32)
            for name, shape in shapes.items()
        }

    units = first["x"][-1]
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(units=units), head], num_micro_batches=2
    ).instantiate()
    pipe.build(batch(first))
    for change in later:
        runs = [pipe.evaluate]
        if all(len(shape) == len(first[name]) for name, shape in change.items()):
            runs.append(pipe.value_and_gradients)  # it refuses other ranks itself
        for run in runs:
            with pytest.raises(errors.LayerError, match=r"(or|label) weights of shape"):
                run(batch(first | change))
