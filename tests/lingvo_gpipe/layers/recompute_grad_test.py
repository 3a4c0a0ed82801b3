"""What has no gradient passes through `tf.recompute_grad` unseen, and nothing is warned of."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import base


def test_ids_masks_and_texts_are_closed_over(caplog: pytest.LogCaptureFixture) -> None:
    x, ids = tf.constant([1.0, 2.0, 3.0]), tf.constant([2, 0, 2])
    mask, names = tf.constant([True, False, True]), tf.constant(["a", "b", "c"])
    runs: list[int] = []

    def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
        runs.append(1)
        x, ids, mask, names = flat
        return [tf.where(mask, tf.gather(x, ids) ** 2, 0.0), tf.strings.length(names)]

    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING), tf.GradientTape() as tape:
            tape.watch(x)
            y, lengths = base.recompute_grad(forward)(x, ids, mask, names)
            gradient = tape.gradient(y, x)
    finally:
        logger.removeHandler(caplog.handler)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 12.0])
    np.testing.assert_array_equal(lengths, [1, 1, 1])
    assert len(runs) == 2
    assert not caplog.records
