"""Pictures for TensorBoard: confusion matrices, and examples with their predictions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import axes, colors, figure, ticker

from lingvo_gpipe.console import units
from lingvo_gpipe.run.examples import Example

Matrix = np.ndarray[Any, np.dtype[Any]]


def _png(picture: figure.Figure) -> bytes:
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def _shortened(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


# --- confusion matrices: rows are true classes, columns predicted classes -------------------------


def confusion_table(matrix: Matrix, names: Sequence[str] = ()) -> str:
    """Return a line per class: count, recall, precision, and the class it is most confused with.

    Recall is the share of a class that was predicted correctly (its accuracy). Precision is the
    share of correct predictions among all predictions of the class. The last column has the class
    that was predicted most often in its place, and how often. A share without examples is "-".

    Args:
        matrix: [C, C] counts.
        names: names of the classes; numbers are used where there are not as many names as classes.

    >>> print(confusion_table(np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]]), ["cat", "dog", "owl"]))
    class  count  recall  precision  most confused with
    cat        4  0.7500     1.0000  dog (1)
    dog        2  1.0000     0.6667  -
    owl        0       -          -  -
    all        6  0.8333
    """
    classes = _class_names(matrix, names)
    true, predicted, hits = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    wrong = matrix - np.diag(hits)
    rows = [["class", "count", "recall", "precision", "most confused with"]]
    for place, name in enumerate(classes):
        other = int(np.argmax(wrong[place]))
        count = wrong[place, other]
        rows.append(
            [
                name,
                f"{true[place]:g}",
                _share(hits[place], true[place]),
                _share(hits[place], predicted[place]),
                f"{classes[other]} ({count:g})" if count else "-",
            ]
        )
    rows.append(["all", f"{true.sum():g}", _share(hits.sum(), true.sum()), "", ""])
    return "\n".join(units.table(rows, "lrrrl"))


def of_confusion(matrix: Matrix, names: Sequence[str] = ()) -> bytes:
    """Return a picture of the matrix as PNG: the shares of each row as shades, darkest for 1.

    A shade is the root of the share, so that rare confusions are visible. Up to 20 classes, counts
    are written; above 40, only some names.

    Args:
        matrix: [C, C] counts.
        names: names of the classes; numbers are used where there are not as many names as classes.
    """
    count = len(matrix)
    total = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, total, out=np.zeros(matrix.shape), where=total > 0)
    side = min(12.0, max(5.0, 2.6 + 0.42 * count))
    picture = figure.Figure(figsize=(side + 1.0, side), dpi=100, layout="constrained")
    plot = picture.add_subplot()
    scale = colors.PowerNorm(0.5, vmin=0.0, vmax=1.0)
    image = plot.imshow(shares, cmap="Blues", norm=scale)
    if count <= 20:
        _write_counts(plot, matrix, shares)
    step = -(-count // 40)
    places = range(0, count, step)
    classes = [_shortened(name, 28) for name in _class_names(matrix, names)[::step]]
    plot.set_xticks(places, classes, rotation=90 if max(map(len, classes)) > 2 else 0)
    plot.set_yticks(places, classes)
    for label in (*plot.get_xticklabels(), *plot.get_yticklabels()):
        label.set_parse_math(False)  # a name may hold the $ of a formula
    plot.tick_params(length=0 if step == 1 else 2, labelsize=8)
    plot.spines[:].set_visible(False)
    plot.set_xlabel("predicted")
    plot.set_ylabel("true")
    hits, examples = matrix.trace(), matrix.sum()
    plot.set_title(
        f"{count} classes, {examples:g} examples, accuracy {_share(hits, examples)}", loc="left"
    )
    bar = picture.colorbar(image, ax=plot, shrink=0.7, label="share of the true class")
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1.0])
    return _png(picture)


def _write_counts(plot: axes.Axes, matrix: Matrix, shares: Matrix) -> None:
    for row, column in np.argwhere(matrix):
        plot.text(
            column,
            row,
            f"{matrix[row, column]:g}",
            ha="center",
            va="center_baseline",
            color="white" if shares[row, column] > 0.3 else "#222222",
            fontsize=8,
            in_layout=False,  # inside its cell, whose place does not depend on it
        )


def _class_names(matrix: Matrix, names: Sequence[str]) -> list[str]:
    return list(names) if len(names) == len(matrix) else [str(n) for n in range(len(matrix))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.4f}" if whole else "-"


# --- examples -------------------------------------------------------------------------------------

_COLUMNS = 4
_TILE, _CAPTION, _GAP = 1.2, 0.42, 0.12
"""Inches of an example's edge, below it, and between two; TensorBoard shows some 4 inches."""


def of_examples(examples: Sequence[Example], names: Sequence[str] = ()) -> bytes:
    """Return examples as PNG, row by row, each above its prediction and its label.

    The confidence is in the corner of each.

    Args:
        examples: at least one, in their order.
        names: names of the classes; numbers are used for classes without a name.
    """
    columns = min(_COLUMNS, len(examples))
    rows = -(-len(examples) // columns)
    width = _GAP + columns * (_TILE + _GAP)
    height = _GAP + rows * (_TILE + _CAPTION + _GAP)
    picture = figure.Figure(figsize=(width, height), dpi=150)
    plot = picture.add_axes((0, 0, 1, 1))  # one for all, in inches: axes take long to draw
    plot.set_axis_off()
    for place, example in enumerate(examples):
        row, column = divmod(place, columns)
        left = _GAP + column * (_TILE + _GAP)
        _draw_example(
            plot, example, names, left, height - (row + 1) * (_TILE + _GAP) - row * _CAPTION
        )
    plot.set(xlim=(0, width), ylim=(0, height), aspect="auto")
    return _png(picture)


def _draw_example(
    plot: axes.Axes, example: Example, names: Sequence[str], left: float, bottom: float
) -> None:
    """Draw an example into its tile, and two lines below it."""
    pixels = example.picture[..., 0] if example.picture.shape[-1] == 1 else example.picture
    aspect = pixels.shape[0] / pixels.shape[1]
    width, height = _TILE * min(1.0, 1 / aspect), _TILE * min(1.0, aspect)
    x, y = left + (_TILE - width) / 2, bottom + (_TILE - height) / 2
    plot.imshow(
        pixels,
        cmap="gray",
        vmin=0,
        vmax=255,
        interpolation="antialiased" if max(pixels.shape[:2]) > 64 else "nearest",
        extent=(x, x + width, y, y + height),
    )
    plot.text(
        left + 0.05,
        bottom + _TILE - 0.05,
        percent(example.confidence),
        ha="left",
        va="top",
        fontsize=10.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )

    def name(number: int) -> str:
        return _shortened(names[number] if number < len(names) else str(number), 10)

    is_right = example.label == example.predicted
    lines = (
        (name(example.predicted), "#2E7D32" if is_right else "#C62828", "bold"),
        ("right" if is_right else f"is {name(example.label)}", "#222222", "normal"),
    )
    for number, (line, colour, weight) in enumerate(lines):
        plot.text(
            left + _TILE / 2,
            bottom - 0.12 - 0.19 * number,
            line,
            ha="center",
            va="center",
            color=colour,
            fontsize=11.5,
            fontweight=weight,
            parse_math=False,
        )


def percent(share: float) -> str:
    """Return a share rounded down, so that only a certainty is 100%.

    >>> percent(0.99999), percent(1.0)
    ('99%', '100%')
    """
    return f"{int(np.floor(share * 100 + 1e-6))}%"
