"""Examples of an evaluation: the most confident mistakes, whatever the batches and cells are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.input import Batch
from lingvo_gpipe.keras_layers import from_keras
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.run import evaluation, loop
from lingvo_gpipe.run.examples import Examples, ranks
from tests.support import tensorboard_files
from tests.tiny_task import Points, one_layer_task, tiny_task

HELD_OUT = 13


class DrawnPoints(Points):
    """Points that are drawn as images: example i is filled with i."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        more = {
            "number": tf.TensorSpec([], tf.int32),
            "column": tf.TensorSpec([1]),
            "one_hot": tf.TensorSpec([3]),
        }
        return {**super().example_spec(), **more}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        def more(labels: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
            return {
                "number": np.arange(len(labels), dtype=np.int32),
                "column": labels[:, None].astype(np.float32),
                "one_hot": np.eye(3, dtype=np.float32)[labels],
            }

        return {
            split: {**fields, **more(fields["label"])} for split, fields in super().arrays().items()
        }

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        shade = tf.cast(batch["number"][:, tf.newaxis, tf.newaxis, tf.newaxis], tf.uint8)
        return {"samples": tf.tile(shade, [1, 2, 2, 1])}


def evaluated(
    params: Any, count: int, size: int = HELD_OUT, pipe: PipeliningLayer | None = None
) -> evaluation.Evaluation:
    source = DrawnPoints.Params(batch_size=size).instantiate()
    if pipe is None:
        pipe = built(params)
    found = evaluation.evaluate(
        pipe, source.evaluation("test"), step=1, examples=Examples(pipe, source, count)
    )
    assert found is not None
    return found


def untrained() -> Any:
    """Return a task of one layer whose first weights classify 6 of 13 examples wrongly."""
    params = one_layer_task()
    params.model.seed = 0
    return params


def with_keras_loss(labels: str, order: str) -> Any:
    """Return that network with a loss and a metric of Keras on its logits, in some order."""
    params = untrained()
    kind = "Categorical" if labels == "one_hot" else "SparseCategorical"
    heads = {
        "loss": layers.Loss.Params(loss=f"{kind}Crossentropy", config={"from_logits": True}),
        "metric": layers.KerasMetric.Params(metric=f"{kind}Accuracy"),
    }
    logits = layers.Dense.Params(name="head", units=3, reads=("point",))
    found = [
        heads[name].set(name=name, reads=("x", labels)) for name in order.split() if name in heads
    ]
    if order.startswith("beside"):
        for head in found:
            head.set(reads=("logits", labels), writes=(f"after_{head.name}",))
        logits.writes = params.model.outputs = ("logits",)
    params.model.layers = [logits, *found]
    return params


def built(params: Any) -> PipeliningLayer:
    pipe: PipeliningLayer = params.model.instantiate()
    pipe.build(DrawnPoints.Params(batch_size=8).instantiate().element_spec())
    return pipe


def numbers(found: evaluation.Evaluation) -> list[int]:
    return [int(example.picture[0, 0, 0]) for example in found.examples]


@pytest.fixture(scope="module")
def reference() -> tuple[list[int], dict[int, float]]:
    """Return all examples in their order, and their confidences, from plain TensorFlow."""
    pipe = built(untrained())
    fields = DrawnPoints.Params(batch_size=8).instantiate().arrays()["test"]
    values = {path: variable.numpy() for path, variable in pipe.by_path.items()}
    logits = fields["point"] @ values["head/kernel"] + values["head/bias"]
    shares = tf.nn.softmax(logits).numpy()
    best, sure = shares.argmax(1), shares.max(1)
    wrong = [i for i in range(HELD_OUT) if best[i] != fields["label"][i]]
    right = [i for i in range(HELD_OUT) if i not in wrong]
    assert len(wrong) > 2
    assert len(right) > 2
    order = [*sorted(wrong, key=lambda i: -sure[i]), *sorted(right, key=lambda i: sure[i])]
    return order, dict(enumerate(sure.tolist()))


@pytest.mark.parametrize(("count", "size"), [(4, 13), (4, 5), (4, 1), (12, 5), (16, 5)])
def test_the_most_confident_mistakes_come_first_for_any_batches(
    count: int, size: int, reference: tuple[list[int], dict[int, float]]
) -> None:
    order, sure = reference
    found = evaluated(untrained(), count, size)
    assert numbers(found) == order[:count]
    for example, number in zip(found.examples, order, strict=False):
        assert example.confidence == pytest.approx(sure[number], rel=1e-5)
        assert example.picture.shape == (2, 2, 1)
        assert example.picture.dtype == np.uint8


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        ("label", "beside metric loss"),
        ("column", "loss metric"),
        ("one_hot", "metric loss"),
    ],
)
def test_a_loss_of_keras_shows_the_same_examples(
    labels: str, order: str, reference: tuple[list[int], dict[int, float]]
) -> None:
    expected, sure = reference
    found = evaluated(with_keras_loss(labels, order), 4, 5)
    assert numbers(found) == expected[:4]
    for example, number in zip(found.examples, expected, strict=False):
        assert example.confidence == pytest.approx(sure[number], rel=1e-5)


def test_no_number_of_an_evaluation_depends_on_what_is_shown() -> None:
    params = tiny_task()
    params.model.set(num_replicas=2, num_micro_batches=4)
    pipe = built(params)
    shown, plain = evaluated(params, 5, 5, pipe), evaluated(params, 0, 5, pipe)
    assert len(shown.examples) == 5
    assert plain.examples == ()
    assert shown.values == plain.values
    params.model.set(num_replicas=1, num_partitions=1)
    assert numbers(evaluated(params, 5, 13)) == numbers(shown)


def test_examples_of_weight_0_are_not_shown() -> None:
    params = one_layer_task()
    params.model.layers[0].reads = ("point", "label", "number")
    found = numbers(evaluated(params, HELD_OUT))
    assert sorted(found) == list(range(1, HELD_OUT))


def test_examples_of_a_class_that_a_loss_ignores_are_not_shown() -> None:
    params = with_keras_loss("column", "loss")
    params.model.layers[-1].config = {"from_logits": True, "ignore_class": 0}
    assert {example.label for example in evaluated(params, HELD_OUT).examples} == {1, 2}


def test_what_is_not_finite_is_not_shown() -> None:
    pipe = built(one_layer_task())
    pipe.by_path["head/bias"].assign([np.nan, 0.0, 0.0])
    assert evaluated(None, 4, pipe=pipe).examples == ()
    scores = ranks(np.array([0, 0]), np.array([1, 1]), np.array([np.inf, 0.5], np.float32))
    assert scores.tolist() == [-np.inf, 0.5]


@pytest.mark.parametrize(
    "case", ["regression", "keras regression", "two outputs", "tokens", "undrawn"]
)
def test_outputs_are_read_of_classifiers_of_drawn_examples_alone(case: str) -> None:
    params, source = one_layer_task(), DrawnPoints.Params(batch_size=8).instantiate()
    batch = next(iter(source.evaluation("test")))
    head = params.model.layers[0]
    dense = layers.Dense.Params(name="d", units=2, reads=("point",))
    if case == "regression":
        params.model.layers = [dense]
    elif case == "keras regression":
        loss = layers.Loss.Params(loss="mse", reads=("x", "one_hot"))
        params.model.layers = [dense.set(units=3), loss]
    elif case == "two outputs":
        params.model.layers = [dense.set(writes=("y",)), head]
        params.model.outputs = ("x", "y")
    elif case == "tokens":
        reshape = from_keras(keras.layers.Reshape([2, 2]), reads=("point",))
        params.model.layers = [reshape, head.set(reads=("x", "label"))]
        batch["label"] = tf.zeros([8, 2], tf.int32)
    else:
        source = Points.Params(batch_size=8).instantiate()
        batch = next(iter(source.evaluation("test")))
    pipe: PipeliningLayer = params.model.instantiate()
    pipe.build(batch)
    assert not Examples(pipe, source, 4).reads_outputs(batch)


def test_a_run_and_an_evaluation_show_them(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=1)
    params.input = DrawnPoints.Params(batch_size=8, eval_batch_size=5)
    loop.run(params, tmp_path, evaluate=True)
    evaluation.run(params, tmp_path)
    assert len(tensorboard_files.values(tmp_path / "eval", "accuracy")) == 2
    first, second = tensorboard_files.values(tmp_path / "eval", "examples")
    assert first[2] == second[2]
    assert first[2][:8] == b"\x89PNG\r\n\x1a\n"
