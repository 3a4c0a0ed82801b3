"""Markdown for TensorBoard's texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MARKS = {ord(mark): f"&#{ord(mark)};" for mark in "&<>\\`*_~{}[]()#+!|:-."}


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Return a table; texts are shown as they are, whatever signs of Markdown they hold.

    Args:
        headings: of its columns.
        rows: as many texts in each.
        numbers: columns that are aligned to the right.

    >>> print(table(["layer", "size"], [["a_b", "3"]], numbers=[1]))
    | layer | size |
    | --- | ---: |
    | a&#95;b | 3 |
    """
    rules = ["---:" if column in numbers else "---" for column in range(len(headings))]
    lines = [[plain(text) for text in row] for row in (headings, *rows)]
    lines.insert(1, rules)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """Return a text on one line, without signs that Markdown reads."""
    return " ".join(text.split()).translate(_MARKS)
