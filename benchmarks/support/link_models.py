"""Networks of benchmarks.links: little to compute, much to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import hyperparams, layers, optim, pipelining, task
from lingvo_gpipe.input import InMemory

BATCH = 64


class Numbers(InMemory):
    """Random rows, with a target or ids."""

    class Params(InMemory.Params):
        """Params of Numbers."""

        shape: tuple[int, ...] = hyperparams.field((256,), "Shape of an example.")
        ids: int = hyperparams.field(0, "Number of ids; 0: floating numbers.")

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example."""
        if self.params.ids:
            field = tf.TensorSpec(self.params.shape, tf.int32)
            return {"ids": field, "label": field}
        label = tf.TensorSpec([], tf.int32)
        return {"x": tf.TensorSpec(self.params.shape), "label": label}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        """Return 512 examples."""
        random = np.random.RandomState(0)
        if self.params.ids:
            ids = random.randint(0, self.params.ids, (512, *self.params.shape)).astype(np.int32)
            return {"train": {"ids": ids, "label": ids}}
        x = random.normal(size=(512, *self.params.shape)).astype(np.float32)
        return {"train": {"x": x, "label": random.randint(0, 10, 512).astype(np.int32)}}


def _task(network: list[layers.Layer.Params], source: InMemory.Params) -> task.Task.Params:
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=network, num_micro_batches=4),
        input=source,
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-3),
            max_steps=100,
            stall_after_s=0.0,
        ),
    )


def dense() -> task.Task.Params:
    """Return six dense layers of 1,024 units: 20 MiB of weights."""
    network = [layers.Dense.Params(name=f"d{n}", units=1024, activation="relu") for n in range(6)]
    return _task(
        [*network, layers.Softmax.Params(name="head", classes=10)], Numbers.Params(batch_size=BATCH)
    )


def convolution() -> task.Task.Params:
    """Return six convolutions with batch norm."""
    network: list[layers.Layer.Params] = []
    for n in range(6):
        network.append(layers.Conv2D.Params(name=f"c{n}", filters=16, kernel_size=3))
        network.append(layers.BatchNorm.Params(name=f"n{n}"))
    network.append(layers.GlobalPool2D.Params(name="pool"))
    network.append(layers.Softmax.Params(name="head", classes=10))
    return _task(network, Numbers.Params(batch_size=BATCH, shape=(16, 16, 3)))


def ties() -> task.Task.Params:
    """Return a table of 4 MiB that the first and the last cell share."""
    network = [
        layers.Embedding.Params(name="embedding", vocabulary=4096, units=256, reads=("ids",)),
        *(layers.Dense.Params(name=f"d{n}", units=256, activation="relu") for n in range(4)),
        layers.SequenceSoftmax.Params(
            name="head", vocabulary=4096, tie={"kernel": "embedding/table"}
        ),
    ]
    return _task(network, Numbers.Params(batch_size=BATCH, shape=(16,), ids=4096))


def table() -> task.Task.Params:
    """Return a table of 16 MiB, of which a mini-batch reads 1,024 rows at most."""
    network = [
        layers.Embedding.Params(name="embedding", vocabulary=16384, units=256, reads=("ids",)),
        layers.Dense.Params(name="d0", units=256, activation="relu"),
        layers.SequenceSoftmax.Params(name="head", vocabulary=16384),
    ]
    return _task(network, Numbers.Params(batch_size=BATCH, shape=(16,), ids=16384))


TASKS: Mapping[str, Callable[[], task.Task.Params]] = {
    "dense": dense,
    "convolution": convolution,
    "ties": ties,
    "table": table,
}
