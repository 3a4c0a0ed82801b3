"""A small language model whose layers can be divided, on random ids; a run keeps a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import hyperparams, optim, pipelining, task
from lingvo_gpipe.input import InMemory
from lingvo_gpipe.tasks.lm import transformer

hyperparams.register_package(__name__)

VOCABULARY = 11
ASSETS = {"ids.txt": b"what the ids are\n"}
WHOLE: dict[str, Any] = {}
THREE = {"embedding": 3, "softmax": 3, "layer_0": (5, 7)}
UNEQUAL = {"embedding": (1, 10), "softmax": (1, 10), "layer_0": (7, 1, 4)}


class Ids(InMemory):
    """Random ids; a run keeps a file about them."""

    asset_names = tuple(ASSETS)

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        ids = tf.TensorSpec([5], tf.int32)
        return {"target": ids, "label": ids, "weight": tf.TensorSpec([5])}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        random = np.random.RandomState(1)
        splits = {}
        for split in ("train", "test"):
            ids = random.randint(0, VOCABULARY, (12, 6)).astype(np.int32)
            weight = np.ones((12, 5), np.float32)
            splits[split] = {"target": ids[:, :-1], "label": ids[:, 1:], "weight": weight}
        return splits

    def assets(self) -> Mapping[str, bytes]:
        return ASSETS


def task_of(slices: Any, *, tie: Any = False, dtype: Any = "float64", **train: Any) -> Any:
    """Return a task of a language model.

    Args:
        slices: field of the network.
        tie: whether the softmax shares the table.
        dtype: policy of the network.
        **train: fields of the task's `train`.
    """
    sizes = {"units": 8, "heads": 2, "hidden": 12, "vocabulary": VOCABULARY}
    flat = transformer.language_model(1, **sizes)
    if tie:
        flat[-1].tie = {"kernel": "embedding/table"}
    adam = optim.Optimizer.Params(name="Adam", learning_rate=0.02)
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=flat, slices=slices, dtype=dtype, num_micro_batches=4, seed=3
        ),
        input=Ids.Params(batch_size=4),
        train=task.Train(**{"optimizer": adam, "max_steps": 2, "save_interval_steps": 2, **train}),
        eval=task.Eval(best="loss"),
    )


def in_slices(slices: Any) -> Any:
    """Return the task in float32 with averages."""
    return task_of(slices, average=optim.Average.Params(decay=0.9), dtype="float32")
