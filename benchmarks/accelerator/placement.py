"""Does `auto` put each cell on a device of its own, with its variables, slots and gradients?"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from tensorflow.python.eager import context

from benchmarks.accelerator.question import Answers, Setting, attempt
from lingvo_gpipe.run import learner
from tests import tiny_task


def answers(setting: Setting) -> Answers:
    """Yield the devices of everything in two replicas of two cells."""
    setting.devices(4, memory_mib=2048)
    task = tiny_task.tiny_task()
    task.model.set(num_replicas=2, num_micro_batches=4)
    source = task.input.instantiate()
    updates = learner.Learner(task, source.element_spec(training=True))
    yield "cells", updates.pipe.executor.devices
    yield "variables", counted(updates.variables.values())
    batch = next(iter(source.batches(0)))
    yield "fields", counted(batch.values())
    yield "operations", attempt(_operations, updates, batch)
    result = updates.pipe.value_and_gradients(batch)
    yield (
        "gradients",
        dict(collections.Counter(_short(g.backing_device) for g in result.gradients.values())),
    )


def _operations(updates: Any, batch: Any) -> dict[str, int]:
    """Return how many operations of an update run on each device, as TensorFlow places them."""
    with context.collect_graphs(optimized=True) as graphs:  # of the first call
        updates.update([batch])
    nodes = [node for graph in graphs for node in graph.node]
    return dict(collections.Counter(_short(node.device) for node in nodes))


def counted(tensors: Iterable[Any]) -> dict[str, int]:
    """Return device → the number of tensors there."""
    return dict(collections.Counter(_short(tensor.device) for tensor in tensors))


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
