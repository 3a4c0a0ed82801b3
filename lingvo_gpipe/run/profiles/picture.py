"""A picture of where the time of a step went."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib import figure

from lingvo_gpipe.schedule import breakdown

_COLOURS = {
    "forward": "#4C78A8",
    "recomputation": "#9FB8D9",
    "backward": "#E08E45",
    "transfer": "#8C6BB1",
    "imbalance": "#D9D9D3",
    "fill and drain": "#F1F1EE",
    "update": "#72A776",
    "input": "#D9B23D",
    "start": "#B9B9B9",
    "rest": "#7F7F7F",
}
_LEAST_SHOWN = 0.04


def of_breakdown(rows: Sequence[Mapping[str, float]], labels: Sequence[str]) -> bytes:
    """Return a picture, PNG: a bar for each device, a box for each part, shares in percent.

    Args:
        rows: of each device, part → seconds; see `breakdown.of_step`.
        labels: names of the devices.
    """
    height = 1.3 + 0.5 * len(rows)
    drawing = figure.Figure(figsize=(12.0, height), dpi=120, layout="constrained")
    plot = drawing.add_subplot()
    left = [0.0] * len(rows)
    for name in breakdown.PARTS:
        shares = [max(0.0, row[name]) / sum(row.values()) for row in rows]
        if not any(shares):
            continue
        plot.barh(
            labels,
            shares,
            left=left,
            color=_COLOURS[name],
            edgecolor="white",
            label=name,
        )
        for number, share in enumerate(shares):
            if share >= _LEAST_SHOWN:
                plot.text(
                    left[number] + share / 2,
                    number,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                )
        left = [before + share for before, share in zip(left, shares, strict=True)]
    plot.set_xlim(0, max(left))
    plot.invert_yaxis()
    plot.xaxis.set_major_formatter("{x:.0%}")
    plot.tick_params(length=0)
    plot.spines[:].set_visible(False)
    handles, names = plot.get_legend_handles_labels()
    drawing.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=len(names),
        frameon=False,
        handlelength=1.2,
    )
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png")
    return buffer.getvalue()
