"""What backwards make use of: which forwards are kept, fused, or computed again.

The table and each cell's policy alone decide it. Executor, costs, cuts and plan ask here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.schedule.table import Table

POLICIES = ("full", "except_last", "never")


def policies(text: str, num_cells: int) -> tuple[str, ...]:
    """Return the recompute policy of each cell from its text form.

    Raises:
        LayerError: one is unknown, or there are neither one nor as many as cells.

    >>> policies("full,never", 2)
    ('full', 'never')
    """
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if part not in POLICIES:
            near = errors.nearest(part, POLICIES) or POLICIES
            raise errors.LayerError(
                f"recompute {part!r} is no policy; nearest {near[0]!r}. Use "
                f"{', '.join(POLICIES)}, or one for each cell separated by commas"
            )
    if len(parts) not in (1, num_cells):
        raise errors.LayerError(
            f"recompute names {len(parts)} policies for {num_cells} cells. Give one, or one for "
            "each cell"
        )
    return parts if len(parts) == num_cells else parts * num_cells


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a layer does for one micro-batch, in FLOPs, seconds or any unit.

    Attributes:
        forward: its forward.
        backward: its backward from a forward that was kept.
        again: its forward where a backward computes it again.
    """

    forward: float
    backward: float
    again: float


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """How the backward slots of a table come by their forward, where cells have a backward.

    Attributes:
        kept: per cell, the micro-batches whose forward is kept for its backward.
        fused: the micro-batches that the last cell runs forward and backward as one program.
        again: per cell, how often the forward of a micro-batch is computed again, on average; I
            and W, where both of them work, do so each for itself.
        halved: per cell, the share of micro-batches whose I and W both work: from a kept forward,
            I does all, and in cell 0, which reads fields alone, W.
    """

    kept: tuple[frozenset[int], ...]
    fused: frozenset[int]
    again: tuple[float, ...]
    halved: tuple[float, ...]

    def costs(self, layers: Sequence[Work]) -> tuple[tuple[float, ...], ...]:
        """Return per cell what each layer would cost in it; cells that are alike share one row.

        A backward that is halved counts once and a half: both halves compute the gradient of the
        layer's inputs.

        >>> none = frozenset()
        >>> Reuse((none, none), none, (1.0, 0.0), (0.0, 0.5)).costs([Work(1.0, 2.0, 1.5)])
        ((4.5,), (3.5,))
        """
        shares = list(zip(self.again, self.halved, strict=True))
        rows = {
            (again, halved): tuple(
                work.forward + again * work.again + (1 + halved / 2) * work.backward
                for work in layers
            )
            for again, halved in set(shares)
        }
        return tuple(rows[share] for share in shares)


def reuse(table: Table, by_cell: Sequence[str], *, fuse: bool) -> Reuse:
    """Tell what the backwards of a table make use of.

    Args:
        table: the schedule.
        by_cell: per cell, its policy.
        fuse: fuses the last cell's F and B where they meet, unless it keeps every forward.

    >>> table = Table.from_text("0F0,0F1,0B1,0B0")
    >>> reuse(table, ["full"], fuse=True).again
    (0.5,)
    >>> reuse(table, ["except_last"], fuse=False).kept
    (frozenset({1}),)
    """
    forwards: list[list[int]] = [[] for _ in by_cell]
    for _, slot in table.order():
        if slot.phase == "F":
            forwards[slot.cell].append(slot.micro_batch)
    M = table.num_micro_batches
    count = {"full": 0, "except_last": 1, "never": M}
    kept = tuple(
        frozenset(order[len(order) - count[policy] :])
        for order, policy in zip(forwards, by_cell, strict=True)
    )
    fused = table.fused() if fuse and by_cell[-1] != "never" else frozenset[int]()
    kept = (*kept[:-1], kept[-1] - fused)
    spared = [*kept[:-1], kept[-1] | fused]
    halves = [
        split - own if cell else frozenset[int]()
        for cell, (own, split) in enumerate(zip(spared, table.split(), strict=True))
    ]
    again = tuple((M - len(own) + len(both)) / M for own, both in zip(spared, halves, strict=True))
    return Reuse(kept, fused, again, tuple(len(both) / M for both in halves))
