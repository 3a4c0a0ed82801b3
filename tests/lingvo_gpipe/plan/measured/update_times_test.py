"""The time of an update is that of the devices that own most weights, updating at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, optim, pipelining
from lingvo_gpipe.plan import machine_memory
from lingvo_gpipe.plan.measured import update_times
from tests.tiny_task import tiny_task

FIELDS = {"ids": tf.TensorSpec([4, 3], tf.int32), "label": tf.TensorSpec([4, 3], tf.int32)}
DEVICES = ["/device:CPU:0", "/device:CPU:1"]


def model(**changes: Any) -> network.PipelineParams:
    """Return a tied network whose three devices own 200, 30 and 88 numbers."""
    return pipelining.PipeliningLayer.Params(
        layers=[
            layers.Embedding.Params(
                name="emb", vocabulary=40, units=5, reads=("ids",), writes=("x",)
            ),
            layers.Dense.Params(name="few", units=5),
            layers.Dense.Params(name="wide", units=8),
            layers.Dense.Params(name="narrow", units=5, trainable=False),
            layers.SequenceSoftmax.Params(
                name="head", vocabulary=40, reads=("x", "label"), tie={"kernel": "emb/table"}
            ),
        ],
        num_partitions=3,
        num_micro_batches=2,
        cuts=(1, 1, 3),
        **changes,
    )


def places(**changes: Any) -> dict[str, str]:
    params = model(**changes)
    return update_times._places(network.analyze(params, FIELDS), params.num_replicas, DEVICES)


def test_the_devices_with_most_weights_update_what_they_own() -> None:
    assert places() == {
        "emb/table": DEVICES[0],
        **dict.fromkeys(("wide/kernel", "wide/bias", "head/bias"), DEVICES[1]),
    }


def test_frozen_weights_are_not_updated() -> None:
    assert places(frozen=("emb/*", "wide/*")) == {
        "head/bias": DEVICES[0],
        "few/kernel": DEVICES[1],
        "few/bias": DEVICES[1],
    }


def measured(update: optim.Updater.Params, **changes: Any) -> update_times._Update:
    analysis = network.analyze(model(**changes), FIELDS)
    of = update_times._places(analysis, 1, DEVICES)
    return update_times._Update(update, {p: analysis.variables[p] for p in of}, of, analysis)


def test_each_call_is_timed_and_does_one_update() -> None:
    train = tiny_task(optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.5)).train
    update = measured(train)
    update._gradients = {p: tf.ones_like(g) for p, g in update._gradients.items()}
    ticks = itertools.count()
    assert update.median_s(lambda: float(next(ticks))) == 1.0
    calls = update_times._WARM_UP + update_times._RUNS
    assert next(ticks) == 2 * calls
    for variable in update._updater._weights.values():
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, -0.5 * calls))


def test_groups_of_other_weights_do_not_count() -> None:
    params = model()
    train = tiny_task().train
    train.optimizer.groups = (("absent", 0.5),)
    analysis = network.analyze(params, FIELDS)
    assert (update_times.measure(train, params, analysis) or 0.0) > 0.0
    assert train.optimizer.groups  # the caller's are as they were


def test_what_does_not_fit_in_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    params = model()
    analysis = network.analyze(params, FIELDS)
    train = tiny_task(optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.5)).train
    # 288 numbers, each with two slots, the new values of all of them, and a gradient.
    needed = 4 * 7 * 288
    for memory, fits in ((2 * needed, True), (2 * needed - 2, False)):
        found = machine_memory.MachineMemory(memory, memory)
        monkeypatch.setattr(machine_memory, "of_this_machine", lambda found=found: found)
        assert (update_times.measure(train, params, analysis) is not None) == fits


def test_a_device_with_too_little_memory_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise tf.errors.ResourceExhaustedError(None, None, "full")

    monkeypatch.setattr(update_times._Update, "median_s", full)
    params = model()
    analysis = network.analyze(params, FIELDS)
    assert update_times.measure(tiny_task().train, params, analysis) is None
