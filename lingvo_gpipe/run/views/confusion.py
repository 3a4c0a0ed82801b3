"""A confusion matrix as text, one line per class, and as a picture.

Rows are true classes, columns predicted classes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import axes, colors, figure, ticker

Matrix = np.ndarray[Any, np.dtype[Any]]

# Up to this number of classes, both axes show all names; with more, they show this many names.
_NAMED = 40
# Up to this number of classes, the cells show their counts.
_COUNTED = 20
_LONGEST = 28
_HEADINGS = ("class", "count", "recall", "precision", "most confused with")


def table(matrix: Matrix, names: Sequence[str] = ()) -> str:
    """Return a line per class: count, recall, precision, and the class it is most confused with.

    Recall is the share of a class that was predicted correctly (its accuracy). Precision is the
    share of correct predictions among all predictions of the class. The last column has the class
    that was predicted most often in its place, and how often. A share without examples is "-".

    Args:
        matrix: [C, C] counts.
        names: names of the classes; numbers are used where there are not as many names as classes.

    >>> print(table(np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]]), ["cat", "dog", "owl"]))
    class  count  recall  precision  most confused with
    cat        4  0.7500     1.0000  dog (1)
    dog        2  1.0000     0.6667  -
    owl        0       -          -  -
    all        6  0.8333
    """
    called = _names(matrix, names)
    true, predicted, hits = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    wrong = matrix - np.diag(hits)
    lines = [list(_HEADINGS)]
    for place, name in enumerate(called):
        taken = int(np.argmax(wrong[place]))
        most = wrong[place, taken]
        lines.append(
            [
                name,
                f"{true[place]:g}",
                _share(hits[place], true[place]),
                _share(hits[place], predicted[place]),
                f"{called[taken]} ({most:g})" if most else "-",
            ]
        )
    lines.append(["all", f"{true.sum():g}", _share(hits.sum(), true.sum()), "", ""])
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column in (0, 4) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def draw(matrix: Matrix, names: Sequence[str] = ()) -> bytes:
    """Return a picture of the matrix as PNG: the shares of each row as shades, darkest for 1.

    A shade is the root of the share, so that rare confusions are visible. With few classes, names
    and counts are written; with many, only some names.

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
    if count <= _COUNTED:
        _write_counts(plot, matrix, shares)
    step = -(-count // _NAMED)
    places = range(0, count, step)
    called = [_short(name) for name in _names(matrix, names)[::step]]
    plot.set_xticks(places, called, rotation=90 if max(map(len, called)) > 2 else 0)
    plot.set_yticks(places, called)
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
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


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


def _names(matrix: Matrix, names: Sequence[str]) -> list[str]:
    return list(names) if len(names) == len(matrix) else [str(n) for n in range(len(matrix))]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.4f}" if whole else "-"
