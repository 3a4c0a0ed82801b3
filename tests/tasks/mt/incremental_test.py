"""Cached decoding is full recomputation, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe import layers as core
from lingvo_gpipe.tasks.mt import incremental, transformer

V, LENGTH = 11, 6
SOURCE = np.array([[5, 7, 3, 9, 0], [4, 0, 0, 0, 0], [2, 2, 8, 0, 0]], np.int32)
TARGET = np.array([[2, 6, 7, 4, 9, 3], [2, 9, 5, 4, 3, 8], [2, 10, 1, 6, 6, 6]], np.int32)


def built(**settings: Any) -> Any:
    flat = transformer.translation_transformer(2, 10, 3, V, units=6, head_dim=4, **settings)
    pipe = pipelining.PipeliningLayer.Params(layers=flat, dtype="float64", seed=4).instantiate()
    pipe.build(fields(TARGET))
    random = np.random.default_rng(3)
    for path in sorted(pipe.by_path):  # biases, norms and shares count too
        variable = pipe.by_path[path]
        variable.assign(variable + 0.3 * random.normal(size=variable.shape))
    return pipe


def fields(target: Any, source: Any = SOURCE) -> dict[str, Any]:
    found = {"source": source, "target": target, "label": target}
    for side, ids in (("source", source), ("target", target)):
        found[f"{side}_segment"] = (ids != 0).astype(np.int32)
        found[f"{side}_position"] = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    made = {name: tf.constant(value) for name, value in found.items()}
    return made | {"weight": tf.ones(target.shape, tf.float64)}


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"tie": "all"},
    {"tie": "softmax", "transparent": "shared"},
    {"transparent": "per_layer"},
    {"packed": True},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_token_by_token_is_full_recomputation(settings: Any) -> None:
    pipe = built(**settings)
    decoder = incremental.Incremental(pipe.analysis, LENGTH)
    state = decoder.begin(pipe.by_path, tf.constant(SOURCE))
    step = tf.function(lambda s, ids: decoder.extend(pipe.by_path, s, ids), autograph=False)
    for t in range(LENGTH):
        logits, state = step(state, tf.constant(TARGET[:, t]))
        whole = pipe(fields(TARGET[:, : t + 1]), training=False)
        np.testing.assert_allclose(logits, whole[:, t], rtol=1e-10, atol=1e-12)


def test_a_cache_goes_with_its_rows() -> None:
    """Rows put into another order, one of them twice, as a beam does after each token."""
    pipe = built()
    decoder = incremental.Incremental(pipe.analysis, LENGTH)
    state = decoder.begin(pipe.by_path, tf.constant(SOURCE))
    for t in range(2):
        _, state = decoder.extend(pipe.by_path, state, tf.constant(TARGET[:, t]))
    order = [2, 0, 2]
    state = tf.nest.map_structure(lambda value: tf.gather(value, order), state)
    logits, _ = decoder.extend(pipe.by_path, state, tf.constant([7, 8, 9]))
    target = np.concatenate([TARGET[order, :2], [[7], [8], [9]]], 1)
    whole = pipe(fields(target, SOURCE[order]), training=False)
    np.testing.assert_allclose(logits, whole[:, 2], rtol=1e-10, atol=1e-12)


def test_a_layer_that_keeps_no_cache_is_refused() -> None:
    flat = transformer.translation_transformer(1, 10, 3, V, units=6, head_dim=4)
    own = core.TransformerLayer.Params(
        name="more", units=6, heads=2, hidden=5, reads=("decoder_0",), writes=("more",)
    )
    flat.insert(-2, own)
    flat[-2].reads = ("more",)
    pipe = pipelining.PipeliningLayer.Params(layers=flat).instantiate()
    pipe.build(fields(TARGET) | {"weight": tf.ones(TARGET.shape)})
    with pytest.raises(errors.LayerError, match=r"more \(TransformerLayer\) cannot compute token"):
        incremental.Incremental(pipe.analysis, LENGTH)
