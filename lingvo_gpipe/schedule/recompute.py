"""Recomputation: which forwards are kept for the backward, fused with it, or computed again.

Who decides what is kept for a backward?

- `reuse` below decides for which micro-batches something is kept. It reads the table and the cells'
  policies.
- `network.Cell.kept`, `fused` and `early` are its answer for one cell.
- `execution.cut_backward.CutBackward` decides which tensors of these micro-batches are kept.
- `Layer.Params.recompute` and the policy `recompute_grad` decide for the tensors inside a layer or
  a cell.

The analysis calls `reuse` for each pass, and everything else reads its `Cell`s; only
`network.capacity` calls it, too, before there are cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.schedule.table import Slot, Table

POLICIES = ("full", "early", "except_last", "never", "recompute_grad")


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
            raise errors.LayerError(
                f"unknown recompute policy {part!r}; {errors.suggestion(part, POLICIES)}. Use one "
                "for all cells, or one for each cell separated by commas"
            )
    if len(parts) not in (1, num_cells):
        raise errors.LayerError(
            f"recompute names {len(parts)} policies for {num_cells} cells. Give one, or one for "
            "each cell"
        )
    return parts if len(parts) == num_cells else parts * num_cells


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a layer computes for one micro-batch, in FLOPs, seconds or any unit.

    Attributes:
        forward: its forward.
        backward: its backward from a forward that was kept.
        recompute: what a backward takes in addition if it computes the forward again.
        fused: forward and backward as one program.
    """

    forward: float
    backward: float
    recompute: float
    fused: float


@dataclasses.dataclass(frozen=True, slots=True)
class CellReuse:
    """How the backward slots of one cell get their forward, if the cell has a backward.

    For a cell that may have no backward, use `network.Cell.kept`, `fused` and `early`, which are
    empty if it has none.

    Attributes:
        kept: the micro-batches whose forward is kept for the backward.
        fused: the micro-batches whose forward and backward run as one program.
        early: the micro-batches whose forward is computed again in a slot R of its own.
        recomputations: how often the forward of a micro-batch is computed again, on average.
    """

    kept: frozenset[int] = frozenset()
    fused: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()
    recomputations: float = 0.0

    def cost(self, work: Work) -> float:
        """Return what a layer costs in the cell.

        >>> CellReuse(recomputations=0.5).cost(Work(1.0, 2.0, 1.5, fused=3.0))
        3.75
        """
        return work.forward + self.recomputations * work.recompute + work.backward


def with_slots(table: Table, by_cell: Sequence[str], *, fuse: bool) -> Table:
    r"""Return a table in which cells with the policy `early` recompute in slots of their own.

    An R comes directly before the backward of its micro-batch. A device that would wait there for
    the gradient recomputes meanwhile.

    Args:
        table: the schedule.
        by_cell: per cell, its policy.
        fuse: see `reuse`.

    >>> print(with_slots(Table.from_text("0F0,0B0\n1F0,1B0"), ["early"] * 2, fuse=True).grid())
    cell 0: F0 R0 .  B0
    cell 1: .  F0 B0
    """
    if "early" not in by_cell:
        return table
    reuses = reuse(table, by_cell, fuse=fuse)
    orders: list[list[Slot]] = [[] for _ in range(table.num_devices)]
    for device, slot in table.order():
        if slot.phase in "BI" and by_cell[slot.cell] == "early":
            cell = reuses[slot.cell]
            # What is kept or fused needs no R, and a table may have the R already.
            if slot.micro_batch not in cell.kept | cell.fused | cell.early:
                orders[device].append(Slot(slot.cell, "R", slot.micro_batch))
        orders[device].append(slot)
    return Table.on_grid(orders)


def costs(reuses: Sequence[CellReuse], layers: Sequence[Work]) -> tuple[tuple[float, ...], ...]:
    """Return per cell what each layer would cost in it; cells with equal costs share one row."""
    shares = [reuse.recomputations for reuse in reuses]
    by_share = dict(zip(shares, reuses, strict=True))
    rows = {share: tuple(map(reuse.cost, layers)) for share, reuse in by_share.items()}
    return tuple(rows[share] for share in shares)


def reuse(table: Table, by_cell: Sequence[str], *, fuse: bool) -> tuple[CellReuse, ...]:
    r"""Return how the backwards of each cell of a table get their forward.

    Args:
        table: the schedule.
        by_cell: per cell, its policy.
        fuse: fuses the last cell's F and B where they meet, unless the cell's policy is
            `recompute_grad`, or is `never` and some micro-batches do not meet: one pair of programs
            then serves all. Where F and I meet, the forward is kept from one to the other.

    >>> reverse = Table.from_text("0F0,0F1,0B1,0B0")
    >>> reuse(reverse, ["full"], fuse=True)[0].recomputations
    0.5
    >>> reuse(reverse, ["except_last"], fuse=False)[0].kept
    frozenset({1})
    >>> reuse(Table.from_text("0F0,0B0,0F1,0B1"), ["never"], fuse=True)[0].fused
    frozenset({0, 1})
    >>> split = Table.from_text("0F0,,,0I0,0W0\n,1F0,1I0,1W0")
    >>> [cell.recomputations for cell in reuse(split, ["full"] * 2, fuse=True)]
    [1.0, 0.0]
    """
    forwards: list[list[int]] = [[] for _ in by_cell]
    for _, slot in table.order():
        if slot.phase == "F":
            forwards[slot.cell].append(slot.micro_batch)
    M = table.num_micro_batches
    num_kept = {"except_last": 1, "never": M}
    last, early = len(by_cell) - 1, table.recomputed()
    reuses = []
    for k, (order, policy) in enumerate(zip(forwards, by_cell, strict=True)):
        is_fused = k == last and fuse and policy != "recompute_grad"
        fused = table.fused() if is_fused else frozenset[int]()
        if policy == "never" and len(fused) < M:
            fused = frozenset()
        kept = frozenset(order[len(order) - num_kept.get(policy, 0) :]) - fused
        if is_fused and last > 0:  # the I of a single cell is empty: W would wait with it
            kept |= table.fused_with_input_gradient()
        reuses.append(
            CellReuse(
                kept=kept,
                fused=fused,
                early=early[k] - kept - fused,
                recomputations=(M - len(kept | fused)) / M,
            )
        )
    return tuple(reuses)
