"""A picture of examples, with their labels and what was predicted for them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import figure

from lingvo_gpipe.run.views.examples import Example

_COLUMNS = 4
_TILE = 1.2
"""Inches of an example's edge; TensorBoard shows a picture some 4 inches wide."""
_CAPTION = 0.42
_GAP = 0.12
_LONGEST = 10
"""Characters of a name beside which "is " fits below an example."""
_RIGHT, _WRONG = "#2E7D32", "#C62828"


def draw(examples: Sequence[Example], names: Sequence[str] = ()) -> bytes:
    """Return the examples as PNG, row by row, each above its prediction and its label.

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
        bottom = height - (row + 1) * (_TILE + _GAP) - row * _CAPTION
        pixels = example.picture
        shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        smooth = "antialiased" if max(shown.shape[:2]) > 64 else "nearest"
        plot.imshow(
            shown,
            cmap="gray",
            vmin=0,
            vmax=255,
            interpolation=smooth,
            extent=_inside(left, bottom, shown.shape[0] / shown.shape[1]),
        )
        is_right = example.label == example.predicted
        plot.text(
            left + 0.05,
            bottom + _TILE - 0.05,
            _percent(example.confidence),
            ha="left",
            va="top",
            fontsize=10.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )
        lines = (
            (_called(example.predicted, names), _RIGHT if is_right else _WRONG, "bold"),
            ("right" if is_right else f"is {_called(example.label, names)}", "#222222", "normal"),
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
    plot.set(xlim=(0, width), ylim=(0, height), aspect="auto")
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def _inside(left: float, bottom: float, aspect: float) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a picture in the middle of its tile.

    Args:
        left: of the tile.
        bottom: of the tile.
        aspect: height of the picture divided by its width.
    """
    width, height = _TILE * min(1.0, 1 / aspect), _TILE * min(1.0, aspect)
    left, bottom = left + (_TILE - width) / 2, bottom + (_TILE - height) / 2
    return left, left + width, bottom, bottom + height


def _percent(share: float) -> str:
    """Return a share rounded down, so that only a certainty is 100%.

    >>> _percent(0.99999), _percent(1.0)
    ('99%', '100%')
    """
    return f"{int(np.floor(share * 100 + 1e-6))}%"


def _called(number: int, names: Sequence[str]) -> str:
    name = names[number] if number < len(names) else str(number)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
