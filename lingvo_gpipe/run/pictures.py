"""Pictures for TensorBoard: examples with their predictions."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import axes, figure

from lingvo_gpipe.run.examples import Example


def _png(picture: figure.Figure) -> bytes:
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def _shortened(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


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
