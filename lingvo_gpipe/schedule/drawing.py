"""Drawings: a table for terminals; of a timeline a picture, and a trace for a browser."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

from matplotlib import axes, colors, figure, patches

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Phase, Table

_PHASES: dict[Phase, tuple[str, str]] = {
    "F": ("forward", "#4C78A8"),
    "R": ("recomputation", "#9FB8D9"),
    "B": ("backward", "#E08E45"),
    "I": ("input gradient", "#D9B23D"),
    "W": ("weight gradient", "#72A776"),
}
_WAITING = "#F1F1EE"
_WIDTH = 6.0
"""Inches of a picture, as all its lengths; TensorBoard shows it some 4 inches wide."""
_DPI = 240
_TEXT = 10.5
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def grid(table: Table, width: int = 100) -> str:
    """Return a table as text of at most `width` columns; of a wider one, the middle is left out.

    >>> from lingvo_gpipe import schedule
    >>> print(grid(schedule.make("1f1b", 2, 8), width=40))
    cell 0: F0 F1 .  ... F6 B5 F7 B6 .  B7
    cell 1: .  F0 B0 ... B5 F6 B6 F7 B7
    """
    text = table.grid()
    lines = text.splitlines()
    full = max(map(len, lines))
    if full <= width:
        return text
    lines = [line.ljust(full) for line in lines]
    label = lines[0].index(":") + 1
    gaps = [i for i in range(label, full) if all(line[i] == " " for line in lines)]
    dots = " ..."
    room = width - len(dots)
    head = max((gap for gap in gaps if gap <= (room + 1) // 2), default=label)
    tail = min((gap for gap in gaps if full - gap <= room - head), default=full)
    return "\n".join(f"{line[:head]}{dots}{line[tail:]}".rstrip() for line in lines)


def draw(timeline: simulate.Timeline, *, unit: str | None = None) -> bytes:
    """Return a picture of the timeline: PNG, a row per device, a box per slot.

    Boxes are coloured by phase and bear the micro-batch where it fits; of the cells that share a
    device, later ones are lighter. The title shows how long it takes and how much is waiting.

    Args:
        timeline: simulated or measured.
        unit: unit of its numbers, before which a letter such as k stands, such as "FLOPs"; None:
            seconds.
    """
    table = timeline.table
    height = 1.5 + 0.3 * min(table.num_devices, 40)
    picture = figure.Figure(figsize=(_WIDTH, height), dpi=_DPI)
    # Constant margins: to find them, matplotlib would lay out every text once more.
    left, right, bottom, top = 0.1 + 0.085 * len(_labels(table)[-1]), 0.15, 0.8, 0.4
    plot = picture.add_axes(
        (
            left / _WIDTH,
            bottom / height,
            1 - (left + right) / _WIDTH,
            1 - (bottom + top) / height,
        )
    )
    unit_s, name = _scale(timeline.makespan_s, unit)
    whole = timeline.makespan_s / unit_s
    for device in range(table.num_devices):
        plot.broken_barh([(0, whole)], (device - 0.42, 0.84), facecolors=_WAITING)
    shades = _shades(table)
    boxes: dict[tuple[Phase, int], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        start, length = span.start_s / unit_s, (span.end_s - span.start_s) / unit_s
        boxes.setdefault((span.slot.phase, span.slot.cell), []).append((start, length))
        number = str(span.slot.micro_batch)
        if whole and length / whole * (_WIDTH - left - right) >= 0.02 + len(number) * 0.085:
            plot.text(
                start + length / 2,
                span.device,
                number,
                ha="center",
                va="center_baseline",
                color=_ink(_PHASES[span.slot.phase][1], shades[span.slot.cell]),
                fontsize=_TEXT,
            )
    for (phase, cell), places in boxes.items():
        plot.broken_barh(
            places,
            (table.device_of(cell) - 0.42, 0.84),
            facecolors=_lighter(_PHASES[phase][1], shades[cell]),
            edgecolors="white",
            linewidths=[min(0.8, 100 * length / whole) if whole else 0.0 for _, length in places],
        )
    axis = f"time ({name})" if unit is None else f"work ({name})"
    _draw_legend_and_axes(picture, plot, timeline, f"{whole:.3g} {name}", axis)
    plot.set_xlim(0, whole or 1.0)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def chrome_trace(timelines: Mapping[str, simulate.Timeline]) -> str:
    """Return timelines as JSON for chrome://tracing and ui.perfetto.dev.

    Args:
        timelines: name → timeline. Each is a process with a row per device, in this order.
    """
    events: list[dict[str, object]] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        process = {"ph": "M", "pid": number}
        events += [
            process | {"name": "process_name", "args": {"name": name}},
            process | {"name": "process_sort_index", "args": {"sort_index": number}},
        ]
        events += [
            process | {"name": "thread_name", "tid": device, "args": {"name": label}}
            for device, label in enumerate(_labels(timeline.table))
        ]
        events += [
            {
                "name": str(span.slot),
                "cat": _PHASES[span.slot.phase][0],
                "ph": "X",
                "pid": number,
                "tid": span.device,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"cell": span.slot.cell, "micro_batch": span.slot.micro_batch},
            }
            for span in timeline.spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _draw_legend_and_axes(
    picture: figure.Figure,
    plot: axes.Axes,
    timeline: simulate.Timeline,
    length: str,
    axis: str,
) -> None:
    """Draw title, axes and legend."""
    table = timeline.table
    plot.set_title(
        f"{_count(table.num_cells, 'cell', 's')}, "
        f"{_count(table.num_micro_batches, 'micro-batch', 'es')}: "
        f"{length}, {timeline.bubble_share:.1%} bubble",
        loc="left",
        fontsize=_TEXT + 1,
        pad=8,
    )
    plot.set_ylim(table.num_devices - 0.5, -0.5)
    step = -(-table.num_devices // 40)
    plot.set_yticks(range(0, table.num_devices, step), _labels(table)[::step])
    plot.set_xlabel(axis, loc="left", fontsize=_TEXT)
    plot.tick_params(length=0, labelsize=_TEXT)
    plot.spines[:].set_visible(False)
    present = {span.slot.phase for span in timeline.spans}
    handles = [
        patches.Patch(facecolor=colour, label=label)
        for phase, (label, colour) in _PHASES.items()
        if phase in present
    ]
    handles.append(patches.Patch(facecolor=_WAITING, edgecolor="#CCCCCC", label="waiting"))
    plot.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1 - 0.1 / _WIDTH, 0.0),
        bbox_transform=picture.transFigure,
        ncols=min(len(handles), 3),
        frameon=False,
        fontsize=_TEXT,
        handlelength=1.1,
        columnspacing=1.2,
        labelspacing=0.2,
        borderaxespad=0.2,
    )


def _labels(table: Table) -> list[str]:
    what = "cell" if table.is_plain else "device"
    digits = len(str(table.num_devices - 1))
    return [f"{what} {device:>{digits}}" for device in range(table.num_devices)]


def _count(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _scale(whole: float, unit: str | None) -> tuple[float, str]:
    """Return the size and the name of the largest unit that is not larger than the whole."""
    units = _UNITS if unit is None else [(size, prefix + unit) for size, prefix in _PREFIXES]
    size, name = next((known for known in units if whole >= known[0]), units[-1])
    return size, name.strip()


def _shades(table: Table) -> list[float]:
    """Return how far to lighten each cell's colour: 0 for a device's first, then more."""
    seen = [0] * table.num_devices
    result = []
    for cell in range(table.num_cells):
        device = table.device_of(cell)
        result.append(1 - 0.65 ** seen[device])
        seen[device] += 1
    return result


def _lighter(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = colors.to_rgb(colour)
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share)


def _ink(colour: str, share: float) -> str:
    """Return the text colour that is readable on a box of that colour."""
    red, green, blue = _lighter(colour, share)
    return "#222222" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.65 else "white"
