"""Bar plots of scores."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lingvo_gpipe.tasks.mt.decoding.scoring.scores import ALL, METRICS, ScoreReport, ScoreRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"high": "#1f5a96", "mid": "#4c9ac9", "low": "#a3cfe6", ALL: "#666666"}


def draw(report: ScoreReport) -> bytes:
    """Return a bar plot, PNG: groups with their intervals on the left, languages on the right.

    Languages are in the order of their training examples; up to 40 are labelled. A line across a
    bar is the score of the copied source.
    """
    from matplotlib import figure

    named = len(report.languages) <= 40
    width = min(16.0, 5.0 + max(3.0, 0.3 * len(report.languages)))
    picture = figure.Figure(figsize=(width, 6.4), dpi=100, layout="constrained")
    plots = picture.subplots(
        len(METRICS), 2, squeeze=False, sharey="row", width_ratios=[4.0, width - 4.0]
    )
    for (left, right), metric in zip(plots, METRICS, strict=True):
        for plot, rows in ((left, report.groups), (right, report.languages)):
            _bars(plot, rows, metric, intervals=named or plot is left)
            plot.set_xticks(range(len(rows)), [row.name for row in rows])
        left.set_ylim(bottom=0.0)
        left.set_ylabel(metric)
        left.set_title("means over languages", loc="left", fontsize=10)
        left.legend(fontsize=8, frameon=False)
        right.set_title("languages, most training examples first", loc="left", fontsize=10)
        if named:
            right.tick_params(axis="x", labelrotation=90, labelsize=8)
        else:
            right.set_xticks([])
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _bars(plot: Axes, rows: Sequence[ScoreRow], metric: str, intervals: bool) -> None:
    places = np.arange(len(rows))
    values = np.array([row.scores[metric].value for row in rows])
    plot.bar(places, values, color=[_COLORS[row.group] for row in rows], width=0.8)
    copied = [row.copied[metric].value for row in rows]
    plot.hlines(copied, places - 0.4, places + 0.4, color="#c03020", label="copied source")
    if intervals:
        ends = np.array([row.scores[metric].interval for row in rows]).T
        # All resamples may score higher than the translations themselves, or all lower.
        reach = np.maximum([values - ends[0], ends[1] - values], 0.0)
        plot.errorbar(places, values, reach, fmt="none", ecolor="#222222", capsize=2, linewidth=1)
    plot.spines[["top", "right"]].set_visible(False)
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)
