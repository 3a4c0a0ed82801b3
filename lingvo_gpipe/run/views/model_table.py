"""The description of a model as a table of Markdown: layers by cell, shapes, parameters, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe import network
from lingvo_gpipe.plan import describe
from lingvo_gpipe.run.views import markdown

_HEADINGS = ("layer", "kind", "output", "weights", "FLOPs forward", "FLOPs backward")


def table(analysis: network.Analysis) -> str:
    """Return what `--mode=describe` prints, as Markdown; dots mark inner layers.

    What it notes of single layers follows the table, whose columns it would make too narrow.
    """
    rows: list[list[str]] = []
    notes: list[str] = []
    for row in describe.rows(analysis):
        if len(row) == 1 and rows:
            notes.append(f"{rows[-1][0]}: {row[0].strip()}")
        else:
            rows.append(_cells(row))
    lines = [*describe.heading(analysis), *describe.totals(analysis)]
    table = markdown.table(_HEADINGS, rows, numbers=(3, 4, 5))
    return "\n\n".join(filter(None, (_listed(lines), table, _listed(notes))))


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown.plain(line)}" for line in lines)


def _cells(row: Sequence[str]) -> list[str]:
    """Return a row with a text in each column, its name marked by its depth."""
    name = row[0].lstrip()
    depth = (len(row[0]) - len(name)) // 2
    marked = "·· " * max(depth - 1, 0) + name
    return [marked, *row[1:], *[""] * (len(_HEADINGS) - len(row))]
