"""Confusion matrices as text and picture: numbers of the table, content of the picture."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from lingvo_gpipe.run.views import confusion

MATRIX = np.array([[8, 2, 0], [1, 0, 3], [0, 0, 0]])
NAMES = ("a cat", "a dog", "an owl")


def pixels(picture: bytes) -> Any:
    return image.imread(io.BytesIO(picture))


def test_a_line_per_class_reports_its_shares_and_what_it_is_taken_for() -> None:
    assert confusion.table(MATRIX, NAMES).splitlines() == [
        "class   count  recall  precision  most confused with",
        "a cat      10  0.8000     0.8889  a dog (2)",
        "a dog       4  0.0000     0.0000  an owl (3)",
        "an owl      0       -     0.0000  -",
        "all        14  0.5714",
    ]


@pytest.mark.parametrize("names", [(), ("only", "two")])
def test_classes_without_names_have_numbers(names: tuple[str, ...]) -> None:
    lines = confusion.table(MATRIX, names).splitlines()
    assert [line.split()[0] for line in lines] == ["class", "0", "1", "2", "all"]


def test_weighted_examples_are_counted_by_their_weights() -> None:
    (_, line, *_) = confusion.table(np.array([[1.5, 0.5], [0.0, 1.0]])).splitlines()
    assert line.split() == ["0", "2", "0.7500", "1.0000", "1", "(0.5)"]


@pytest.mark.parametrize("count", [1, 3, 10, 37, 1000])
def test_a_picture_of_any_number_of_classes_has_a_size_that_fits_a_screen(count: int) -> None:
    random = np.random.default_rng(0)
    matrix = random.integers(0, 2, (count, count)) + 9 * np.eye(count, dtype=int)
    drawn = pixels(confusion.draw(matrix, [f"class {n}" for n in range(count)]))
    height, width, _ = drawn.shape
    assert 400 <= height <= 1300
    assert 400 <= width <= 1400


def test_the_picture_shows_rows_as_true_classes() -> None:
    def darkest(matrix: Any) -> tuple[float, float]:
        drawn = pixels(confusion.draw(matrix))
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
    assert pixels(confusion.draw(MATRIX, names)).shape == pixels(confusion.draw(MATRIX)).shape
