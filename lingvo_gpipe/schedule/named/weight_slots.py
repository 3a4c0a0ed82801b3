"""Where weight gradients are computed: W in the bubbles, and I with its W as B where nobody waits.

Slots last F=1, I=1, W=1 and B=2; where cells recompute, I=2 and B=3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table

Order = Sequence[Slot]
_SECONDS = ((1.0, 2.0, 1.0, 1.0), (1.0, 3.0, 2.0, 1.0))
"""Lengths of F, B, I and W: from kept forwards, and with recomputation."""


def joined(orders: Sequence[Order]) -> list[list[Slot]]:
    """Return legal orders with B in place of I and W wherever that keeps no slot waiting.

    I and W must follow each other, and the previous cell must need the gradient only after W. One
    B costs a program less, and nothing lies in memory between I and W.

    >>> order = [Slot(0, phase, 0) for phase in "FIW"]
    >>> [list(map(str, row)) for row in joined([order])]
    [['0F0', '0B0']]
    """
    table = Table(tuple(map(tuple, orders)))
    timelines = [_spans(table, *seconds) for seconds in _SECONDS]
    found = []
    for order in orders:
        row: list[Slot] = []
        for slot in order:
            if (
                slot.phase == "W"
                and row
                and row[-1] == Slot(slot.cell, "I", slot.micro_batch)
                and not any(_is_awaited(slot, spans) for spans in timelines)
            ):
                row[-1] = Slot(slot.cell, "B", slot.micro_batch)
            else:
                row.append(slot)
        found.append(row)
    return found


def _is_awaited(slot: Slot, spans: Mapping[Slot, simulate.Span]) -> bool:
    """Whether the previous cell needs the gradient before this W ends."""
    if slot.cell == 0:
        return False
    reader = Slot(slot.cell - 1, "I", slot.micro_batch)
    return spans[reader].start_s < spans[slot].end_s


def _spans(
    table: Table, forward_s: float, backward_s: float, input_s: float, weight_s: float
) -> dict[Slot, simulate.Span]:
    cells = table.num_cells
    timeline = simulate.simulate(
        table,
        [forward_s] * cells,
        [backward_s] * cells,
        input_gradient_s=[input_s] * cells,
        weight_gradient_s=[weight_s] * cells,
    )
    return {span.slot: span for span in timeline.spans}
