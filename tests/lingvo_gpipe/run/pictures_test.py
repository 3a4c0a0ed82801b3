"""Pictures for TensorBoard: confusion matrices, also as text, and examples."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import image

from lingvo_gpipe.run import pictures
from lingvo_gpipe.run.examples import Example

MATRIX = np.array([[8, 2, 0], [1, 0, 3], [0, 0, 0]])
NAMES = ("a cat", "a dog", "an owl")


def pixels(picture: bytes) -> Any:
    return image.imread(io.BytesIO(picture))


@pytest.mark.parametrize("names", [(), ("only", "two")])
def test_classes_without_names_have_numbers(names: tuple[str, ...]) -> None:
    lines = pictures.confusion_table(MATRIX, names).splitlines()
    assert [line.split()[0] for line in lines] == ["class", "0", "1", "2", "all"]


@pytest.mark.parametrize("count", [1, 3, 10, 37, 1000])
def test_a_picture_of_any_number_of_classes_has_a_size_that_fits_a_screen(count: int) -> None:
    random = np.random.default_rng(0)
    matrix = random.integers(0, 2, (count, count)) + 9 * np.eye(count, dtype=int)
    drawn = pixels(pictures.of_confusion(matrix, [f"class {n}" for n in range(count)]))
    height, width, _ = drawn.shape
    assert 400 <= height <= 1300
    assert 400 <= width <= 1400


def test_the_picture_shows_rows_as_true_classes() -> None:
    def darkest(matrix: Any) -> tuple[float, float]:
        drawn = pixels(pictures.of_confusion(matrix))
        # The colour bar lies to the right.
        inner = drawn[:, : int(drawn.shape[1] * 0.8), :3].sum(-1)
        rows, columns = np.nonzero((inner < 1.1) & (drawn[:, : inner.shape[1], 2] > 0.3))
        return rows.mean() / inner.shape[0], columns.mean() / inner.shape[1]

    upper = np.zeros([12, 12])
    upper[0, 11] = 50
    assert darkest(upper)[0] < 0.4 < 0.6 < darkest(upper)[1]
    assert darkest(upper.T)[1] < 0.4 < 0.6 < darkest(upper.T)[0]


def test_a_name_with_the_signs_of_a_formula_is_no_formula() -> None:
    names = ("$\\frac$", "a $ and a $", "an owl")
    assert (
        pixels(pictures.of_confusion(MATRIX, names)).shape
        == pixels(pictures.of_confusion(MATRIX)).shape
    )


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
