"""What a context collects."""

from __future__ import annotations

import tensorflow as tf

from tests.lingvo_gpipe.keras_layers import keras_runs


def test_moments_of_a_frozen_layer_are_ignored() -> None:
    moments = {"sum": tf.ones([3])}
    for frozen, collected in (
        (frozenset(["other"]), {"layer": moments}),
        (frozenset(["layer"]), {}),
    ):
        ctx = keras_runs.context({}, training=True, frozen=frozen)
        ctx.add_moments(moments)
        assert ctx.collected.moments == collected
