"""The blocks that speed is measured on, and a step over a few of them."""

from __future__ import annotations

import time
from typing import Any

KINDS = ("mlp", "transformer", "convolution")
K, M = 2, 32


def network(kind: str, num_cells: int = K) -> tuple[list[Any], dict[str, Any]]:
    """Return (layers, mini-batch) of `num_cells` equal cells of a kind.

    mlp: 4 layers 512 ↔ 1024 a cell, 64 rows a micro-batch. transformer: 2 blocks of 256 features,
    4 × 64 tokens. convolution: 4 of 3×3×64, 4 images of 28².
    """
    import tensorflow as tf

    from lingvo_gpipe import layers

    error = layers.MeanSquaredError.Params()
    one: list[Any]
    if kind == "mlp":
        one = [
            layers.Dense.Params(units=units, activation="gelu", use_bias=False)
            for units in (1024, 512, 1024, 512)
        ]
        shape = [64 * M, 512]
    elif kind == "transformer":
        one = [layers.TransformerLayer.Params(units=256, heads=4, hidden=1024) for _ in range(2)]
        shape = [4 * M, 64, 256]
    else:
        one = [layers.Conv2D.Params(filters=64, activation="relu") for _ in range(4)]
        shape = [4 * M, 28, 28, 64]
    x = tf.random.stateless_normal(shape, [1, 2])
    return [*one * num_cells, error], {"x": x, "target": tf.zeros_like(x)}


def updater(pipe: Any, **settings: Any) -> Any:
    """Return an updater of a built pipeline by Adam.

    Args:
        pipe: the pipeline.
        **settings: further fields of the updater's Params.
    """
    from lingvo_gpipe import optim

    adam = optim.Optimizer.Params(name="Adam", learning_rate=0.001)
    return optim.Updater.Params(optimizer=adam, **settings).instantiate(
        variables=pipe.weights,
        specs=pipe.analysis.variables,
        device_of=pipe.executor.device_of,
        layer_of=pipe.analysis.layer_of,
    )


def seconds(step: Any, count: int = 5) -> float:
    """Return the median seconds of `count` calls of `step`, after two that are not counted."""
    times = []
    for number in range(count + 2):
        start = time.perf_counter()
        step()
        if number > 1:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
