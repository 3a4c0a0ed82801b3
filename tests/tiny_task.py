"""A task that trains in milliseconds: batch norm, dropout and shuffled data on 4 features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import hyperparams, layers, optim, pipelining, registry, task
from lingvo_gpipe.input import InMemory


class Points(InMemory):
    """Points around three centres; 42 to train on, 13 held out."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {"point": tf.TensorSpec([4]), "label": tf.TensorSpec([], tf.int32)}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        random = np.random.RandomState(1)
        centres = random.normal(size=(3, 4))
        labels = random.randint(0, 3, size=55).astype(np.int32)
        points = (centres[labels] + random.normal(size=(55, 4)) / 4).astype(np.float32)
        return {
            "train": {"point": points[:42], "label": labels[:42]},
            "test": {"point": points[42:], "label": labels[42:]},
        }


class BrokenPoints(Points):
    """Points in order. One of them has a NaN: the sixth of a mini-batch of eight."""

    class Params(Points.Params):
        """Params of BrokenPoints."""

        shuffle = False
        place: int = hyperparams.field(0, "Number of that mini-batch.")

    params: Params

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        found = super().arrays()
        found["train"]["point"][8 * self.params.place + 5, 2] = np.nan
        return found


def tiny_task(**overrides: Any) -> Any:
    """Return the task; `overrides` are fields of its `train`."""
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[
                layers.Dense.Params(name="first", units=8, activation="relu", reads=("point",)),
                layers.BatchNorm.Params(name="norm", momentum=0.8),
                layers.Dropout.Params(name="drop", rate=0.25),
                layers.Softmax.Params(name="head", classes=3),
            ],
            num_partitions=2,
            num_micro_batches=2,
            seed=3,
        ),
        input=Points.Params(batch_size=8),
        train=task.Train(
            **{
                "optimizer": optim.Optimizer.Params(name="Adam", learning_rate=0.02),
                "max_steps": 12,
                "save_interval_steps": 4,
                "log_interval_steps": 1,
                **overrides,
            }
        ),
    )


def one_layer_task(**overrides: Any) -> Any:
    """Return a task of one layer in one cell, without optimizer state: a third of the tracing.

    For tests of a run's evaluations, files, lines and signals. `overrides` are fields of its
    `train`.
    """
    rate = {"optimizer": optim.Optimizer.Params(name="SGD", learning_rate=0.02)}
    params = tiny_task(**{**rate, **overrides})
    head = params.model.layers[-1].set(reads=("point", "label"))
    params.model.set(layers=[head], num_partitions=1, num_micro_batches=1)
    return params


class Tiny(registry.Model):
    """The task as a named model, for packages in tests."""

    def task(self) -> Any:
        return tiny_task()


def stop_after(updates: int) -> Callable[[], bool]:
    """Return a `should_stop` that is true after this number of updates."""
    asked = itertools.count()
    return lambda: next(asked) >= updates
