"""A training has the same result with any number of replicas, which share out its state."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, optim, pipelining
from lingvo_gpipe.execution import executor, placement
from lingvo_gpipe.network import replicas
from lingvo_gpipe.run import checkpoints, loop
from tests.support import saved
from tests.tiny_task import BrokenPoints, tiny_task


def task(num_replicas: int, **train: Any) -> Any:
    params = tiny_task(
        max_steps=6,
        save_interval_steps=3,
        clip_norm=0.5,
        average=optim.Average.Params(decay=0.9),
        **train,
    )
    params.model.set(dtype="float64", num_micro_batches=4, num_replicas=num_replicas)
    return params


def test_a_gradient_of_one_replica_that_is_not_finite_stops_the_update_of_all(
    tmp_path: Path,
) -> None:
    """Only the second replica computes the broken example; half the scale is tried then."""
    params = task(3, loss_scale=optim.LossScale.Params(initial=2.0))
    params.input = BrokenPoints.Params(batch_size=8)
    params.train.max_steps = 2
    result = loop.run(params, tmp_path)
    assert checkpoints.read_value(result.checkpoint, "loss_scale/skipped") == 1
    assert checkpoints.read_value(result.checkpoint, "loss_scale/scale") == 1.0
    for name, value in saved.values(result.checkpoint).items():
        assert np.isfinite(value).all() or name.startswith("best"), name


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.sameness_grid), 2])
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path, accumulate: int) -> None:
    """Its result changes by rounding only."""
    whole = loop.run(task(1, accumulate=accumulate), tmp_path / "whole", evaluate=True)
    for num_replicas, max_steps in ((1, 2), (3, 6)):
        params = task(num_replicas, accumulate=accumulate)
        params.train.max_steps = max_steps
        parts = loop.run(params, tmp_path / "parts", evaluate=max_steps == 6)
    saved.check_same(whole.checkpoint, parts.checkpoint, rtol=1e-9, atol=1e-12)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-9)


@pytest.mark.parametrize(
    ("workers", "places"),
    [((0, 0, 0, 0), "0123"), ((0, 0, 1, 1), "0213"), ((0, 1, 2, 3), "0123")],
)
def test_replicas_of_a_cell_share_a_worker_where_they_send_more(
    monkeypatch: pytest.MonkeyPatch, workers: tuple[int, ...], places: str
) -> None:
    """Devices of this process, taken for those of workers."""
    network = pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(units=9), layers.Softmax.Params(classes=3)],
        cuts=(1, 1),
        num_partitions=2,
        num_micro_batches=2,
        num_replicas=2,
        dtype="float64",
    )
    random = np.random.RandomState(0)
    batch = {"x": random.normal(size=(2, 9)), "label": np.array([0, 2], np.int32)}
    plain = network.copy().set(num_replicas=1, num_partitions=1, cuts=None).instantiate()
    expected = plain.value_and_gradients(batch).gradients
    monkeypatch.setattr(placement, "workers", lambda names: workers[: len(names)])
    names = [f"/device:CPU:{place}" for place in places]
    pipe = network.copy().instantiate()
    found = pipe.value_and_gradients(batch).gradients
    assert list(itertools.chain(*pipe.executor.devices)) == names
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-12, atol=1e-15)
    # Devices that the user names are taken as they are.
    named = tuple(f"/device:CPU:{k}" for k in (3, 1, 0, 2))
    pipe = network.copy().set(devices=named).instantiate()
    pipe.build(batch)
    assert tuple(itertools.chain(*pipe.executor.devices)) == named


def test_each_replica_holds_its_part_of_the_state() -> None:
    held = {}
    for num_replicas in (1, 4):
        pipe = pipelining.PipeliningLayer.Params(
            layers=[
                *(layers.Dense.Params(units=6) for _ in range(8)),
                layers.MeanSquaredError.Params(reads=("x", "y")),
            ],
            cuts=(4, 5),
            num_partitions=2,
            num_micro_batches=4,
            num_replicas=num_replicas,
        ).instantiate()
        pipe.build({"x": tf.zeros([4, 6]), "y": tf.zeros([4, 6])})
        updater = optim.Updater(
            optim.Updater.Params(optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.1)),
            variables=pipe.weights,
            specs=pipe.analysis.variables,
            device_of=pipe.executor.device_of,
            layer_of=pipe.analysis.layer_of,
            state=pipe.state,
        )
        size: collections.Counter[str] = collections.Counter()
        for variable in [*pipe.by_path.values(), *updater.slots.values()]:
            size[variable.device] += variable.shape.num_elements()
        held[num_replicas] = size
    assert len(held[1]) == 2
    assert len(held[4]) == 8
    assert sum(held[1].values()) == sum(held[4].values()) == 3 * 8 * (36 + 6)
    assert set(held[4].values()) == {sum(held[1].values()) // 8}


def test_too_few_devices_are_reported() -> None:
    params = task(6).model.set(num_partitions=2, num_micro_batches=6)
    with pytest.raises(
        errors.DeviceError, match=r"^6 replicas of 2 partitions need 12 CPU devices"
    ):
        params.instantiate().build(
            {"point": tf.TensorSpec([8, 4]), "label": tf.TensorSpec([8], tf.int32)}
        )


def table(
    num_replicas: int, vocabulary: int, slices: int | tuple[int, ...] = 1
) -> pipelining.PipeliningLayer:
    params = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Embedding.Params(
                name="embedding", vocabulary=vocabulary, units=3, slices=slices
            ),
            layers.SequenceSoftmax.Params(name="head", vocabulary=5, reads=("x", "label")),
        ],
        num_micro_batches=4,
        num_replicas=num_replicas,
        dtype="float64",
    )
    return params.instantiate()


def test_the_gradient_of_a_table_is_sent_as_rows_where_these_are_fewer_bytes() -> None:
    ids = np.random.RandomState(0).randint(0, 20, (8, 2))
    batch = {"x": tf.constant(ids), "label": tf.constant(ids % 5)}
    # Of a replica: 2 micro-batches of 2 rows with 2 ids, so 8 rows of 24 bytes and a number each.
    for vocabulary, as_rows in ((20, True), (11, True), (10, False)):
        fields = {name: tf.minimum(value, vocabulary - 1) for name, value in batch.items()}
        fields["label"] = batch["label"]
        gradients = []
        for num_replicas in (1, 2):
            pipe = table(num_replicas, vocabulary)

            @tf.function
            def step(pipe: Any = pipe, fields: Any = fields) -> Any:
                return pipe.value_and_gradients(fields).gradients

            gradients.append({path: value.numpy() for path, value in step().items()})
            kinds = {op.type for op in step.get_concrete_function().graph.get_operations()}
            assert ("TensorScatterAdd" in kinds) == (as_rows and num_replicas == 2)
        assert gradients[0].keys() == gradients[1].keys()
        for path, value in gradients[0].items():
            np.testing.assert_allclose(gradients[1][path], value, rtol=1e-12, atol=1e-15)
        assert np.abs(gradients[0]["embedding/table"]).sum() > 0


@pytest.mark.parametrize("slices", [1, 4, (6, 6, 12)])
def test_slices_of_a_table_send_the_bytes_that_the_plan_counts(
    monkeypatch: pytest.MonkeyPatch, slices: int | tuple[int, ...]
) -> None:
    """Of different ids, a row for each; of one, one row in the first slice."""
    found = executor._nonzero_rows
    counted: list[int] = []

    def count(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers, values = found(gradient)
        sizes = tf.size(numbers, tf.int64) * 8 + tf.size(values, tf.int64) * 8
        with tf.control_dependencies([tf.numpy_function(counted.append, [sizes], [])]):
            return numbers, tf.identity(values)

    monkeypatch.setattr(executor, "_nonzero_rows", count)
    pipe = table(2, 24, slices)
    different = np.concatenate([np.arange(8) * 3, np.arange(8) * 3 + 1])
    sent = []
    for ids in (different, different % 3):
        fields = {"x": tf.constant(ids.reshape(8, 2)), "label": tf.constant(ids.reshape(8, 2) % 5)}
        counted.clear()
        pipe.value_and_gradients(fields)
        sent.append(sum(map(int, counted)))
    variables = pipe.analysis.variables
    planned = sum(
        replicas.sent_bytes(spec, 2) for path, spec in variables.items() if "table" in path
    )
    # Of the replica that does not own a slice: 2 micro-batches of 2 rows with 2 ids.
    assert sent[0] == planned == 8 * (3 * 8 + 8)
    assert sent[1] == 3 * 8 + 8
