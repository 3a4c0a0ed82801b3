"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head; the columns after the first are numbers.

    >>> print(table([["run", "minutes"], ["a", "3"]]))
    | run | minutes |
    | --- | ---: |
    | a | 3 |
    """
    rules = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rules, *rows[1:]))
