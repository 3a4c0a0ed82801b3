"""Training on mini-batches that are large beside the weights, read by workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import layers, optim, pipelining, task
from lingvo_gpipe.input import InMemory
from lingvo_gpipe.run import evaluation, learner, worker_input

LENGTH = 2**14
"""T of a sequence, of which four are a mini-batch of 1 MiB."""
Traffic = Callable[[str], contextlib.AbstractContextManager[None]]


class Wide(InMemory):
    """Sequences whose fields are large beside the weights."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return x [T, 2], label [T] and real [T], of which half is padding."""
        return {
            "x": tf.TensorSpec([LENGTH, 2]),
            "label": tf.TensorSpec([LENGTH], tf.int32),
            "real": tf.TensorSpec([LENGTH]),
        }

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        """Return 12 sequences to train on, 6 held out; labels of padding are out of range."""
        random = np.random.RandomState(2)
        real = (np.arange(LENGTH) % 2).astype(np.float32)
        label = np.where(real > 0, random.randint(0, 3, [18, LENGTH]), 99).astype(np.int32)
        x = random.normal(size=[18, LENGTH, 2]).astype(np.float32)
        fields = {"x": x, "label": label, "real": np.tile(real, [18, 1])}
        return {
            "train": {name: array[:12] for name, array in fields.items()},
            "test": {name: array[12:] for name, array in fields.items()},
        }


def params_of(devices: tuple[str, ...], num_replicas: int) -> Any:
    """Return a task on `Wide`, whose last cell reads the labels; replicas have one cell each."""
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[
                layers.Dense.Params(name="d0", units=4, activation="tanh"),
                layers.SequenceSoftmax.Params(
                    name="head", vocabulary=3, reads=("x", "label", "real")
                ),
            ],
            num_partitions=2 // num_replicas,
            num_replicas=num_replicas,
            num_micro_batches=1 + num_replicas,  # the first of two replicas has 3 of 4 examples
            devices=devices,
            seed=3,
        ),
        input=Wide.Params(batch_size=4, on_worker=True),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.5), max_steps=1
        ),
    )


def run(devices: tuple[str, ...], traffic: Traffic, num_replicas: int = 1) -> dict[str, Any]:
    """Train and evaluate on mini-batches that workers read; then on one of the chief.

    Args:
        devices: one for each cell; if they are in this process, it reads itself.
        traffic: name → counts the bytes of a `with` block.
        num_replicas: 1, and the first worker reads; or 2, and each reads its examples.

    Returns:
        Bits of losses and weights, and bytes of a mini-batch.
    """
    params = params_of(devices, num_replicas)
    own = params.input.instantiate()
    made = learner.Learner(params, own.element_spec())
    source = worker_input.source_of(own, made.pipe.executor, lambda _: None)
    found: list[str] = []
    batches = iter(source.batches(1, 5))
    for name in ("first update", "update"):
        with traffic(name):
            batch = next(batches)
            found.append(float(made.update([batch]).loss).hex())
    for name in ("first accumulated update", "accumulated update"):
        with traffic(name):
            found.append(float(made.update([next(batches), next(batches)]).loss).hex())
    for name in ("first evaluation", "evaluation"):
        with traffic(name):
            evaluated = evaluation.evaluate(made.pipe, source.evaluation("test"), step=4)
            assert evaluated is not None
            found += [evaluated.number("loss").hex(), str(evaluated.num_rows)]
    with traffic("search for the cause"):
        found.append(made.pipe.first_nonfinite(batch))
        found.append(str(made.pipe.explain(tf.errors.InternalError(None, None, "none"), batch)))
    mine = next(iter(own.batches(1)))
    with traffic("update by a mini-batch of the chief"):
        found.append(float(made.update([mine]).loss).hex())
    found += [values.numpy().tobytes().hex() for values in made.pipe.weights.values()]
    return {
        "bits": found,
        "bytes": sum(v.dtype.size * v.shape.num_elements() for v in mine.values()),
    }
