"""A tiny translation model in float64 whose every weight matters, and mini-batches for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import layers, pipelining
from lingvo_gpipe.tasks.mt.model import transformer

V, LENGTH = 11, 6
SOURCE = np.array([[5, 7, 3, 9, 0], [4, 0, 0, 0, 0], [2, 2, 8, 0, 0]], np.int32)
TARGET = np.array([[2, 6, 7, 4, 9, 3], [2, 9, 5, 4, 3, 8], [2, 10, 1, 6, 6, 6]], np.int32)


def transformer_layers(
    num_layers: int, hidden: int, heads: int, vocabulary: int, **fields: Any
) -> list[layers.Layer.Params]:
    """Return the layers of T(L, H, A), other fields as `TranslationTransformer` names them."""
    return transformer.translation_transformer(
        transformer.TranslationTransformer(
            num_layers=num_layers, hidden=hidden, heads=heads, vocabulary=vocabulary, **fields
        )
    )


def params(slices: Any = None, **settings: Any) -> Any:
    """Return the model's params, with the network's field `slices`."""
    flat = transformer_layers(2, 10, 3, V, units=6, head_dim=4, **settings)
    return pipelining.PipeliningLayer.Params(
        layers=flat, slices=slices or {}, dtype="float64", seed=4
    )


def disturb(by_path: dict[str, tf.Variable], spread: float = 0.3) -> None:
    """Move every variable off its initial value: biases, norms and shares count too."""
    random = np.random.default_rng(3)
    for path in sorted(by_path):
        variable = by_path[path]
        variable.assign(variable + spread * random.normal(size=variable.shape))


def built(**settings: Any) -> Any:
    """Return the model with its variables."""
    return built_from(params(**settings))


def built_from(given: Any, spread: float = 0.3) -> Any:
    """Return the model of such params with its variables."""
    pipe = given.instantiate()
    pipe.build(fields(TARGET))
    disturb(pipe.by_path, spread)
    return pipe


def in_slices(whole: Any, sliced: Any, batch: Any = None) -> Any:
    """Return the model of these params, in slices, with the weights of the whole one."""
    pipe = sliced.instantiate()
    pipe.build(fields(TARGET) if batch is None else batch)
    found: dict[str, list[str]] = {}
    for path in pipe.by_path:
        layer, _, rest = path.partition("/")
        if path not in whole.by_path:
            layer = layer.rpartition("_")[0]
        found.setdefault(f"{layer}/{rest}", []).append(path)
    assert set(found) == set(whole.by_path)
    for path, parts in found.items():
        axis = 1 if path.endswith("middle/kernel") else 0
        sizes = [pipe.by_path[part].shape[axis] for part in parts]
        for part, value in zip(parts, tf.split(whole.by_path[path], sizes, axis), strict=True):
            pipe.by_path[part].assign(value)
    return pipe


def fields(target: Any, source: Any = SOURCE) -> dict[str, Any]:
    """Return a mini-batch."""
    found = {"source": source, "target": target, "label": target}
    for side, ids in (("source", source), ("target", target)):
        found[f"{side}_segment"] = (ids != 0).astype(np.int32)
        found[f"{side}_position"] = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    made = {name: tf.constant(value) for name, value in found.items()}
    return made | {"weight": tf.ones(target.shape, tf.float64)}
