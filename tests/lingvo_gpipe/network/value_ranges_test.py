"""Which integers the fields of a mini-batch may hold."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, keras_layers, layers, network, pipelining
from lingvo_gpipe.layers.base import ValueRange
from lingvo_gpipe.network import value_ranges
from lingvo_gpipe.network.value_ranges import FieldRange

LABELS = FieldRange("label", "head", ValueRange(5, "classes"))
IGNORING = FieldRange("label", "head", ValueRange(5, "classes", ignored=-1))
WEIGHTED = FieldRange("label", "head", ValueRange(5, "classes", weights="weight"))


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ([0, 4], None),
        ([], None),
        ([0, 5, 6], "field 'label', row 1: 5 (and 1 more), but layer head takes 0 to 4"),
        ([[0, 1], [2, -3]], "field 'label', row 1, position [1]: -3, but layer head takes 0 to 4"),
        ([2**31 - 1], "row 0: 2147483647,"),
    ],
)
def test_the_first_value_outside_is_named(label: Any, expected: str | None) -> None:
    message = LABELS.first_outside({"label": np.array(label, np.int32)})
    assert message == expected if expected is None else expected in str(message)


@pytest.mark.parametrize("is_on_worker", [False, True])
def test_rows_are_counted_over_the_parts_of_a_mini_batch(
    is_on_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_ranges, "_is_on_worker", lambda _: is_on_worker)
    first, second = ({"label": tf.constant(labels)} for labels in ([[0] * 3] * 4, [[1, 9], [2, 3]]))
    assert str(refusal(LABELS, first, second)).startswith(
        "field 'label', row 4, position [1]: 9, but layer"
    )


def test_a_value_of_weight_zero_may_be_anything() -> None:
    fields = {"label": np.array([[7, 1], [1, 8]]), "weight": np.array([[0.0, 1.0], [1.0, 1.0]])}
    assert "row 1, position [1]: 8," in str(WEIGHTED.first_outside(fields))
    fields["weight"][1, 1] = 0.0
    assert WEIGHTED.first_outside(fields) is None
    fields["weight"] = fields["weight"].astype(bool)  # as a mask
    assert WEIGHTED.first_outside(fields) is None


def refusal(field_range: FieldRange, *parts: dict[str, Any]) -> str | None:
    """Return why a mini-batch is refused, if it is."""
    try:
        value_ranges.check([field_range], *parts)
    except errors.InputError as error:
        return str(error)
    return None


def test_only_fields_have_ranges() -> None:
    """A label that a layer computes is not looked at."""
    head = layers.Softmax.Params(name="head", classes=3)
    shift = layers.Identity.Params(name="same", reads=("label",), writes=("label",))
    specs = {"x": tf.TensorSpec([4, 2]), "label": tf.TensorSpec([4], tf.int32)}
    wrong = {"x": np.zeros([4, 2]), "label": np.array([0, 1, 2, 3])}
    network.analyze(pipelining.PipeliningLayer.Params(layers=[shift, head]), specs).check_values(
        wrong
    )
    with pytest.raises(errors.InputError, match="row 3: 3, but layer head takes 0 to 2"):
        network.analyze(pipelining.PipeliningLayer.Params(layers=[head]), specs).check_values(wrong)


def keras_classifier(**loss: Any) -> pipelining.PipeliningLayer.Params:
    """Ids of 11 to 4 classes, and a loss on what the model predicts."""
    ids = keras.Input([3], dtype="int32", name="ids")
    rows = keras.layers.Flatten()(keras.layers.Embedding(11, 2)(ids))
    model = keras_layers.from_keras_model(keras.Model(ids, keras.layers.Dense(4)(rows)))
    head = layers.Loss.Params(name="loss", reads=(model.outputs, "label"), **loss)
    return pipelining.PipeliningLayer.Params(layers=[*model.layers, head])


@pytest.mark.parametrize(
    ("loss", "label", "expected"),
    [
        ({}, [0, 3], None),
        ({}, [3, 4], "row 1: 4, but layer loss takes 0 to 3 (it reads predictions of 4 classes)"),
        ({}, [-1, 4], "row 0: -1 (and 1 more), but layer loss takes 0 to 3"),
        ({}, [[3], [4]], "row 1, position [0]: 4, but layer loss takes 0 to 3"),
        ({}, [3.0, 4.0], "row 1: 4.0, but layer loss takes 0 to 3"),
        ({"config": {"ignore_class": -1}}, [-1, 3], None),
        ({"config": {"ignore_class": -1}}, [-1, -2], "row 1: -2, but layer loss takes 0 to 3"),
        ({"loss": "CategoricalGeneralizedCrossEntropy"}, [0, 4], "row 1: 4, but layer loss"),
        ({"loss": "BinaryCrossentropy"}, np.full([2, 4], 2), "takes 0 to 1"),
        ({"loss": "BinaryCrossentropy"}, np.full([2, 4], 1.2), None),
        ({"loss": "mse"}, np.full([2, 4], 7), None),
    ],
)
def test_a_loss_of_keras_takes_the_classes_of_its_predictions(
    loss: Any, label: Any, expected: str | None
) -> None:
    params = keras_classifier(**{"loss": "SparseCategoricalCrossentropy", **loss})
    fields = {"ids": np.zeros([2, 3], np.int32), "label": np.array(label)}
    specs = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in fields.items()}
    analysis = network.analyze(params, specs)
    if expected is None:
        analysis.check_values(fields)
        return
    with pytest.raises(errors.InputError, match=re.escape(expected)) as caught:
        analysis.check_values(fields)
    assert str(caught.value).startswith("field 'label', row ")
    assert str(caught.value).endswith("Correct the data, or the model that predicts them")


class Shifted(keras.losses.SparseCategoricalCrossentropy):
    """Its classes are counted from 1."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true - 1, y_pred)


def test_a_loss_of_ones_own_may_take_any_label() -> None:
    specs = {"ids": tf.TensorSpec([2, 3], tf.int32), "label": tf.TensorSpec([2], tf.int32)}
    wired = network.analyze(keras_classifier(loss=Shifted), specs)
    ids = np.array([[0, 1, 2], [3, 4, 10]])
    wired.check_values({"ids": ids, "label": np.array([1, 4])})
    with pytest.raises(errors.InputError, match=r"'ids', row 1, position \[2\]: 11.*input_dim=11"):
        wired.check_values({"ids": ids + ids // 10, "label": np.array([1, 4])})


def test_a_worker_looks_at_the_fields_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values are found, and only a mini-batch with one of them is fetched."""
    looked_at: list[bool] = []

    def is_on_worker(value: object) -> bool:
        looked_at.append(isinstance(value, tf.Tensor))
        return True

    monkeypatch.setattr(value_ranges, "_is_on_worker", is_on_worker)
    fetched = mock.Mock(side_effect=np.asarray)
    monkeypatch.setattr(value_ranges, "np", mock.Mock(wraps=np, asarray=fetched))
    for label, weight, outside in (
        ([[0, 4]], [[1.0, 1.0]], None),
        ([[0, 9]], [[1.0, 0.0]], None),
        ([[0, 9]], [[1.0, 0.5]], "field 'label', row 0, position [1]: 9,"),
        ([[-1, 9, 2]], [[0.0, 0.0, 0.0]], None),
    ):
        fields = {"label": tf.constant(label), "weight": tf.constant(weight)}
        fetched.reset_mock()
        message = refusal(WEIGHTED, fields)
        assert str(message).startswith(outside or "None")
        assert (message is None) == (outside is None)
        assert bool(fetched.call_count) == (outside is not None)
    assert looked_at == [True] * 4


def test_a_worker_looks_at_many_fields_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow warns of a function that is traced at each of its first calls."""
    monkeypatch.setattr(value_ranges, "_is_on_worker", lambda _: True)
    warned = mock.Mock()
    monkeypatch.setattr(tf.get_logger(), "warning", warned)
    for size in range(10, 20):
        one = FieldRange("label", "head", ValueRange(size, "classes"))
        fields = {"label": tf.constant([0, size - 1])}
        assert refusal(one, fields) is None
        assert refusal(one, {"label": fields["label"] + 1}) is not None
    assert not warned.called


@pytest.mark.parametrize(
    ("one", "values", "weights", "fails"),
    [
        (WEIGHTED, [[0, 4], [1, 2]], [[1.0, 1.0], [1.0, 1.0]], False),
        (WEIGHTED, [[0, 4], [5, 2]], [[1.0, 1.0], [1.0, 1.0]], True),
        (WEIGHTED, [[0, -1], [4, 2]], [[1.0, 1.0], [1.0, 1.0]], True),
        (WEIGHTED, [[0, 4], [5, 2]], [[1.0, 1.0], [0.0, 1.0]], False),
        (IGNORING, [[0, -1], [4, 2]], [[1.0, 1.0], [1.0, 1.0]], False),
        (IGNORING, [[0, -2], [4, 2]], [[1.0, 1.0], [1.0, 1.0]], True),
    ],
)
def test_the_same_values_fail_in_a_graph(
    one: FieldRange, values: Any, weights: Any, fails: bool
) -> None:
    fields = {"label": tf.constant(values), "weight": tf.constant(weights)}

    @tf.function(autograph=False)
    def use(fields: dict[str, tf.Tensor]) -> tf.Tensor:
        return value_ranges.asserted([one], fields)["label"] + 1

    assert (one.first_outside(fields) is not None) == fails
    if not fails:
        assert use(fields).numpy().tolist() == (np.array(values) + 1).tolist()
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer head does not take"):
        use(fields)


def test_a_pipeline_looks_at_its_values_in_the_callers_graph() -> None:
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.Softmax.Params(name="head", classes=3)]
    ).instantiate()
    batch = {"x": tf.ones([4, 2]), "label": tf.constant([0, 1, 2, 3])}
    pipe.build(batch)
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer head does not take"):
        tf.function(lambda fields: pipe.value_and_gradients(fields).loss)(batch)


def test_a_sliced_table_has_no_zeros_for_ids_that_are_outside() -> None:
    pipe = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Embedding.Params(name="table", vocabulary=10, units=4, slices=2),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=2,
    ).instantiate()
    batch = {"x": tf.constant([[1, 12], [0, 2]]), "target": tf.zeros([2, 2, 4])}
    pipe.build(batch)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not take"):
        tf.function(lambda fields: pipe.value_and_gradients(fields).loss)(batch)


def test_each_replicas_part_is_looked_at_in_the_callers_graph() -> None:
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.Softmax.Params(name="head", classes=3)], num_micro_batches=2, num_replicas=2
    ).instantiate()
    parts = tuple(
        {"x": tf.ones([2, 2]), "label": tf.constant(labels)} for labels in ([0, 1], [2, 3])
    )
    pipe.build({name: tf.concat([part[name] for part in parts], 0) for name in parts[0]})

    @tf.function(autograph=False)
    def looked(first: dict[str, tf.Tensor], second: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        return [part["label"] for part in pipe.executor.checked(first, second)]

    with pytest.raises(tf.errors.InvalidArgumentError, match="layer head does not take"):
        looked(*parts)
    assert len(looked(parts[0], parts[0])) == 2


@pytest.mark.parametrize("ignored", [None, -1])
def test_sizes_beyond_the_dtype_of_a_field_are_compared(ignored: int | None) -> None:
    one = FieldRange("label", "head", ValueRange(300, "classes", ignored=ignored))
    inside = one.inside({"label": tf.constant([0, 44, 255], tf.uint8)})
    assert inside.numpy().tolist() == [True] * 3
    few = FieldRange("label", "head", ValueRange(200, "classes", ignored=ignored))
    inside = few.inside({"label": tf.constant([0, 199, 255], tf.uint8)})
    assert inside.numpy().tolist() == [True, True, False]
