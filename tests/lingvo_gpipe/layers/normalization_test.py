"""Normalization without some of its weights."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lingvo_gpipe import layers
from tests.lingvo_gpipe.keras_layers import keras_runs


def test_a_norm_that_is_not_centred_has_no_beta() -> None:
    x = tf.constant([[1.0, 3.0], [2.0, 8.0]])
    y, _, meta = keras_runs.run(layers.LayerNorm.Params(center=False, epsilon=0.0), x)
    assert [variable.path for variable in meta.variables] == ["gamma"]
    np.testing.assert_allclose(y, [[-1.0, 1.0], [-1.0, 1.0]], rtol=1e-6)
