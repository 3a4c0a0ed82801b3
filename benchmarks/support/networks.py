"""The four networks that speed is measured on: MLP, Transformer, convolution, small AmoebaNet-D.

TensorFlow is imported inside functions, since the process of PyTorch has none and reads K and M.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

BLOCKS = ("mlp", "transformer", "convolution")
KINDS = (*BLOCKS, "amoebanet")
K, M = 2, 32


def blocks(kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the layers of K equal cells, and a mini-batch of M micro-batches.

    mlp: 4 dense layers of 1,024 and 512 units a cell, 64 rows a micro-batch. transformer: 2 blocks
    of 256 features, 4 × 64 tokens. convolution: 4 of 3×3 with 64 channels, 4 images of 28².
    """
    import tensorflow as tf

    from lingvo_gpipe import layers

    cell: list[Any]
    if kind == "mlp":
        cell = [
            layers.Dense.Params(units=units, activation="gelu", use_bias=False)
            for units in (1024, 512, 1024, 512)
        ]
        shape = [64 * M, 512]
    elif kind == "transformer":
        cell = [layers.TransformerLayer.Params(units=256, heads=4, hidden=1024) for _ in range(2)]
        shape = [4 * M, 64, 256]
    else:
        cell = [layers.Conv2D.Params(filters=64, activation="relu") for _ in range(4)]
        shape = [4 * M, 28, 28, 64]
    x = tf.random.stateless_normal(shape, [1, 2])
    return [*cell * K, layers.MeanSquaredError.Params()], {"x": x, "target": tf.zeros_like(x)}


def task_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a task with a network of one of `KINDS` on K devices, and a mini-batch.

    amoebanet: AmoebaNet-D of 3 cells and 24 filters, 8 micro-batches of 16 images of 16².
    """
    import tensorflow as tf

    from lingvo_gpipe import optim, pipelining, task
    from lingvo_gpipe.tasks.image.model import amoebanet

    if kind in BLOCKS:
        layers, batch = blocks(kind)
        num_micro_batches = M
    else:
        num_micro_batches = 8
        settings = amoebanet.AmoebaNet(
            genotype="D", num_cells=3, filters=24, classes=10, stem="small", dropout=0.3
        )
        layers = amoebanet.amoeba_net(settings)
        batch = {
            "image": tf.random.stateless_normal([16 * num_micro_batches, 16, 16, 3], [1, 2]),
            "label": tf.zeros([16 * num_micro_batches], tf.int32),
        }
    params = task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=layers, num_partitions=K, num_micro_batches=num_micro_batches
        ),
        input=input_of(batch),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-4), max_steps=1
        ),
    )
    return params, batch


def learner_of(model: Any, batch: Mapping[str, Any], **train: Any) -> Any:
    """Return a network that learns by Adam.

    Args:
        model: Params of the pipeline.
        batch: a mini-batch, or its specs.
        **train: further fields of the task's `train`.
    """
    import tensorflow as tf

    from lingvo_gpipe import optim, task
    from lingvo_gpipe.run import learner

    adam = optim.Optimizer.Params(name="Adam", learning_rate=1e-4)
    params = task.Task.Params(model=model, train=task.Train(optimizer=adam, max_steps=1, **train))
    specs = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in batch.items()}
    return learner.Learner(params, specs)


def input_of(batch: dict[str, Any]) -> Any:
    """Return an input whose only mini-batch is `batch`."""
    import tensorflow as tf

    from lingvo_gpipe import input as inputs

    class OneMiniBatch(inputs.InMemory):
        """The examples of one mini-batch."""

        def arrays(self) -> dict[str, dict[str, Any]]:
            return {"train": {name: value.numpy() for name, value in batch.items()}}

        def example_spec(self) -> dict[str, Any]:
            return {name: tf.TensorSpec(v.shape[1:], v.dtype) for name, v in batch.items()}

    return OneMiniBatch.Params(batch_size=len(next(iter(batch.values()))))


def step_s(step: Callable[[], Any], count: int = 5) -> float:
    """Return the median seconds of `count` calls of `step`, after two that are not counted."""
    times = []
    for _ in range(count + 2):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[count // 2]
