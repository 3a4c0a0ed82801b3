"""Pictures for TensorBoard: examples with their predictions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.run import pictures
from lingvo_gpipe.run.examples import Example


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (4, 4, 1), (5, 4, 2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_has_four_columns(count: int, columns: int, rows: int, channels: int) -> None:
    pixels = np.full((5, 9, channels), 128, np.uint8)
    examples = [Example(n % 2, 1, 0.5, pixels) for n in range(count)]
    drawn = tf.io.decode_png(pictures.of_examples(examples, ["cat", "$x_{"]), 3).numpy()
    one = tf.io.decode_png(pictures.of_examples(examples[:1]), 3).shape
    assert drawn.shape[1] / one[1] == pytest.approx(columns, rel=0.1)
    assert drawn.shape[0] / one[0] == pytest.approx(rows, rel=0.1)
    grey = (np.abs(drawn.astype(int) - 128) <= 1).all(-1).sum()
    area = one[0] * one[1]
    assert 0.2 * area < grey / count < 0.6 * area  # every picture is there, in its aspect


def test_a_mistake_is_drawn_in_another_colour_than_a_right_prediction() -> None:
    pixels = np.zeros((2, 2, 1), np.uint8)

    def colours(label: int) -> set[tuple[int, ...]]:
        drawn = tf.io.decode_png(pictures.of_examples([Example(label, 1, 0.5, pixels)]), 3).numpy()
        return set(map(tuple, drawn.reshape(-1, 3).tolist()))

    red, green = (0xC6, 0x28, 0x28), (0x2E, 0x7D, 0x32)
    assert red in colours(0)
    assert red not in colours(1)
    assert green in colours(1)
    assert green not in colours(0)
