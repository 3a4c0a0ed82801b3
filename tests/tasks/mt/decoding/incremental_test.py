"""Cached decoding equals full recomputation, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe import layers as core
from lingvo_gpipe.tasks.mt.decoding import incremental
from tests.tasks.mt.toy_model import (
    LENGTH,
    SOURCE,
    TARGET,
    V,
    built_from,
    fields,
    params,
    transformer_layers,
)

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"tie": "all"},
    {"transparent": "per_layer"},
    {"packed": True},
)
MIXED: tuple[dict[str, Any], ...] = (
    {"tie": "softmax", "transparent": "shared"},
    {"tie": "all", "transparent": "per_layer", "packed": True},
)


ROUNDING = 2.0**-5  # of the largest logit: eight of bfloat16's


def check(got: Any, wanted: Any, dtype: str) -> None:
    """Compare logits that were computed in another order."""
    relative, absolute = 1e-10, 1e-12
    if dtype == "mixed_bfloat16":
        relative, absolute = 0.0, ROUNDING * float(np.abs(wanted).max())
    np.testing.assert_allclose(got, wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        *(pytest.param(each, "float64", marks=pytest.mark.sameness_grid) for each in SETTINGS),
        (MIXED[0], "mixed_bfloat16"),
        (MIXED[1], "float64"),
    ],
    ids=str,
)
def test_token_by_token_is_full_recomputation(settings: Any, dtype: str) -> None:
    pipe = built_from(params(**settings).set(dtype=dtype))
    decoder = incremental.Incremental(pipe.analysis, LENGTH)
    theta = decoder.read(pipe.by_path)
    state = decoder.begin(theta, tf.constant(SOURCE))
    step = tf.function(lambda s, ids: decoder.extend(theta, s, ids), autograph=False)
    whole = pipe(fields(TARGET), training=False)
    for t in range(LENGTH):
        logits, state = step(state, tf.constant(TARGET[:, t]))
        check(logits, whole[:, t], dtype)
    # Later tokens do not matter.
    others = np.where(np.arange(LENGTH) < 2, TARGET, 1 + TARGET % (V - 1))
    assert (others != TARGET)[:, 2:].all()
    found = pipe(fields(others), training=False)
    check(found[:, :2], whole[:, :2], dtype)


@pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("mixed_bfloat16", marks=pytest.mark.sameness_grid)]
)
def test_a_cache_goes_with_its_hypotheses(dtype: str) -> None:
    """Hypotheses put into another order, one of them twice, as a beam does after each token."""
    pipe, beam = built_from(params(transparent="shared").set(dtype=dtype)), 2
    decoder = incremental.Incremental(pipe.analysis, LENGTH)
    theta = decoder.read(pipe.by_path)
    state = decoder.begin(theta, tf.constant(SOURCE), beam)
    assert state["decoder_0"]["memory_key"].shape[0] == len(SOURCE)  # once for a sentence
    prefixes = np.array([[2, 5], [2, 6], [2, 7], [2, 8], [2, 9], [2, 10]], np.int32)
    for t in range(2):
        _, state = decoder.extend(theta, state, tf.constant(prefixes[:, t]))
    order = [1, 1, 3, 2, 4, 4]
    state = decoder.reorder(state, tf.constant(order))
    added = np.array([7, 8, 9, 4, 5, 6], np.int32)
    logits, _ = decoder.extend(theta, state, tf.constant(added))
    target = np.concatenate([prefixes[order], added[:, np.newaxis]], 1)
    whole = pipe(fields(target, SOURCE.repeat(beam, 0)), training=False)
    check(logits, whole[:, 2], dtype)


def test_a_layer_that_keeps_no_cache_is_refused() -> None:
    flat = transformer_layers(1, 10, 3, V, units=6, head_dim=4)
    own = core.TransformerLayer.Params(
        name="more", units=6, heads=2, hidden=5, reads=("decoder_0",), writes=("more",)
    )
    flat.insert(-2, own)
    flat[-2].reads = ("more",)
    pipe = pipelining.PipeliningLayer.Params(layers=flat).instantiate()
    pipe.build(fields(TARGET) | {"weight": tf.ones(TARGET.shape)})
    with pytest.raises(errors.LayerError, match=r"more \(TransformerLayer\) cannot compute token"):
        incremental.Incremental(pipe.analysis, LENGTH)
