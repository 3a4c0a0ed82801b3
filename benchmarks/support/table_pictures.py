"""Pictures of the GPipe paper's tables beside this library's figures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib import axes, figure

from benchmarks.support import paper_tables

_PAPER, _OURS = "#8D8D86", "#4C78A8"
_COLOURS = ("#4C78A8", "#72A776", "#E08E45", "#8C6BB1")


def largest(title: str, rows: Sequence[Sequence[str]]) -> bytes:
    """Return a picture of Table 1, PNG: memory of parameters and of activations, on log scales.

    Args:
        title: of the picture.
        rows: a head, then the rows of `tables.table_1`.
    """
    drawing = figure.Figure(figsize=(11.0, 3.8), dpi=120, layout="constrained")
    groups = [f"{row[0]}\n{row[1]}" for row in rows[1:]]
    for plot, first in zip(drawing.subplots(1, 2), (4, 6), strict=True):
        kinds = {"paper": (first, _PAPER), "plan": (first + 1, _OURS)}
        bars = {
            name: ([float(row[column]) for row in rows[1:]], colour)
            for name, (column, colour) in kinds.items()
        }
        plot.set_yscale("log")
        _bars(plot, groups, bars)
        subject = rows[0][first].removesuffix(": paper")
        plot.set_title(f"{title}: {subject} (log scale)", fontsize=10)
    handles, names = plot.get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    return _png(drawing)


def speeds(measured: Mapping[tuple[str, int, int], float]) -> bytes:
    """Return a picture of Table 2, PNG.

    Args:
        measured: family, K and M → throughput of waiting cells in that of K = 2, M = 1.
    """
    drawing = figure.Figure(figsize=(11.0, 4.2), dpi=120, layout="constrained")
    plots = drawing.subplots(1, len(paper_tables.FAMILIES), sharey=True)
    for plot, (name, family) in zip(plots, paper_tables.FAMILIES.items(), strict=True):
        partitions = sorted({K for of_family, K, _ in measured if of_family == name})
        for (M, printed), colour in zip(family.table_2.items(), _COLOURS, strict=False):
            ours = [measured[name, K, M] for K in partitions]
            plot.plot(partitions, ours, "o-", color=colour, label=f"M={M}, waiting cells")
            plot.plot(partitions, printed, "s--", color=colour, alpha=0.6, label=f"M={M}, paper")
        plot.set_title(family.table_2_name, fontsize=10)
        plot.set_xticks(partitions)
        plot.set_xlabel("K")
        plot.spines[["top", "right"]].set_visible(False)
    plots[0].set_ylabel("throughput (K=2, M=1: 1)")
    handles, names = plots[0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return _png(drawing)


def links(found: Mapping[str, Mapping[str, Sequence[float]]]) -> bytes:
    """Return a picture of Table 3, PNG; `found` is as `tables.table_3` returns it."""
    drawing = figure.Figure(figsize=(11.0, 3.8), dpi=120, layout="constrained")
    plots = drawing.subplots(1, len(found), sharey=True)
    for plot, (name, lines) in zip(plots, found.items(), strict=True):
        colours = iter(_COLOURS)
        bars = {
            title: (values[1:], _PAPER if title == "paper" else next(colours))
            for title, values in lines.items()
        }
        _bars(plot, ["K=4", "K=8"], bars)
        plot.set_title(
            f"{paper_tables.FAMILIES[name].table_3_name}: throughput (K=2: 1)", fontsize=10
        )
    handles, names = plots[0].get_legend_handles_labels()
    names[0] = "paper, P100 over PCIe"
    drawing.legend(
        handles, names, loc="outside upper center", ncols=len(names), frameon=False, fontsize=9
    )
    return _png(drawing)


def _bars(
    plot: axes.Axes, groups: Sequence[str], bars: Mapping[str, tuple[Sequence[float], str]]
) -> None:
    """Draw groups of bars with their values above them, and no axis of values.

    Args:
        plot: where.
        groups: name of each group.
        bars: name of a bar in every group → its value in each, and its colour.
    """
    width = 0.8 / len(bars)
    for number, (name, (values, colour)) in enumerate(bars.items()):
        offset = (number - (len(bars) - 1) / 2) * width
        places = [place + offset for place in range(len(groups))]
        drawn = plot.bar(places, values, width=0.94 * width, color=colour, label=name)
        plot.bar_label(drawn, fmt=_text, fontsize=8)
    plot.set_xticks(range(len(groups)), groups, fontsize=8.5)
    plot.tick_params(axis="y", which="both", left=False, labelleft=False)
    plot.spines[["top", "right", "left"]].set_visible(False)
    plot.margins(y=0.12)


def _text(value: float) -> str:
    """Return a value with three digits, trailing zeros included."""
    return f"{value:#.3g}".removesuffix(".")


def _png(drawing: figure.Figure) -> bytes:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png")
    return buffer.getvalue()
