"""The schedules that have a name.

A new one is a function here and its line in `SCHEDULES`; the command and `auto` read that.
Tests then name what lacks it: their own tables, and the table, text and picture of the docs.

Each is a function (num_devices K, num_micro_batches M) → `Table`, with a third argument
cells_per_device V if it has tables for any V; all are 1 or more. What several share is in `orders`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import orders, search
from lingvo_gpipe.schedule.table import Slot, Table

MAX_STATES = 200_000
"""How far `optimal` searches: about a second, and the same table on every machine."""


def gpipe(num_devices: int, num_micro_batches: int) -> Table:
    """Return GPipe's fill-drain table; its bubble is (K-1)/(M+K-1) with equal cells.

    Backwards run from the last micro-batch to the first, so that the last cell's first backward
    directly follows its last forward and is fused with it.

    Source: Huang et al. 2019, figure 2.

    >>> print(gpipe(num_devices=3, num_micro_batches=3).grid())
    cell 0: F0 F1 F2 .  .  .  .  B2 B1 B0
    cell 1: .  F0 F1 F2 .  .  B2 B1 B0
    cell 2: .  .  F0 F1 F2 B2 B1 B0
    """
    return looped_bfs(num_devices, num_micro_batches, cells_per_device=1)


def one_f_one_b(num_devices: int, num_micro_batches: int) -> Table:
    """Return the 1F1B table: in cell k at most min(K-k, M) micro-batches are live, not M.

    Each backward runs as early as it can. The bubble is fill-drain's, (K-1)/(M+K-1) with equal
    cells. In the last cell every backward directly follows its forward.

    Source: Narayanan et al. 2019 (PipeDream), with the flush at the mini-batch's end of
    Narayanan et al. 2021, figure 3.

    >>> print(one_f_one_b(num_devices=3, num_micro_batches=4).grid())
    cell 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    cell 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    cell 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    return interleaved(num_devices, num_micro_batches, cells_per_device=1)


def interleaved(num_devices: int, num_micro_batches: int, cells_per_device: int) -> Table:
    """Return the interleaved 1F1B table: V cells per device, for a bubble V times smaller.

    The bubble is (K-1)/(V·M+K-1) with equal cells and M ≥ K, and every backward of the last cell
    directly follows its forward. On device k at most (V-1)·G + K-k of the cells' micro-batches
    are live, with rounds of G micro-batches: K, or more where M is not divisible by K. It is the
    least lead with which no device waits; the source runs K-1-k forwards more ahead.

    Source: Narayanan et al. 2021, figure 4; for any M, by rounds of nearly equal sizes.

    >>> print(interleaved(num_devices=2, num_micro_batches=4, cells_per_device=2).grid())
    device 0: 0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 .   2B3 0B2 0B3
    device 1: .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    return Table.on_grid(
        orders.in_rounds(num_devices, num_micro_batches, cells_per_device, backward="B")
    )


def looped_bfs(num_devices: int, num_micro_batches: int, cells_per_device: int) -> Table:
    """Return the breadth-first table: each cell runs all micro-batches in a row.

    The bubble is (K-1)/(V·M+K-1) with equal cells and M ≥ K, as that of `interleaved`. All V·M
    are live.

    Source: Lamy-Poirier 2022, section 4.1.

    >>> print(looped_bfs(num_devices=2, num_micro_batches=3, cells_per_device=2).grid())
    device 0: 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    device 1: .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
    """
    forward = range(num_micro_batches)
    rows = []
    for device in range(num_devices):
        cells = range(device, num_devices * cells_per_device, num_devices)
        rows.append(
            [Slot(cell, "F", m) for cell in cells for m in forward]
            + [Slot(cell, "B", m) for cell in reversed(cells) for m in reversed(forward)]
        )
    return Table.on_grid(rows)


def zb_h1(num_devices: int, num_micro_batches: int, cells_per_device: int) -> Table:
    """Return the ZB-H1 table: 1F1B whose weight gradients fill the time in which devices wait.

    It is 1F1B's order with B as I, and on device k each W comes k backwards later. With F, I and W
    equally long and M ≥ K each device waits for K-1 slots, a third of 1F1B's bubble. On every
    device as many are live as on 1F1B's first one: min(K, M). With V > 1, I and W are those of
    `interleaved`: (V-1)·G + K are live.

    Source: Qi et al. 2023, section 2.3, figure 2 of handcrafted schedules.

    >>> print(zb_h1(num_devices=3, num_micro_batches=4, cells_per_device=1).grid())
    cell 0: F0 F1 F2 .  .  B0 F3 B1 .  .  B2 .  B3
    cell 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    cell 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    rows = []
    for device, order in enumerate(
        orders.in_rounds(num_devices, num_micro_batches, cells_per_device, backward="I")
    ):
        waiting: list[Slot] = []
        row: list[Slot] = []
        for slot in order:
            row.append(slot)
            if slot.phase == "I":
                waiting.append(Slot(slot.cell, "W", slot.micro_batch))
                if len(waiting) > device:
                    row.append(waiting.pop(0))
        rows.append(row + waiting)
    return Table.on_grid(orders.with_whole_backwards(rows))


def zb_v(num_devices: int, num_micro_batches: int) -> Table:
    """Return the ZB-V table: device k has cells k and 2K-1-k, and waits only to fill and drain.

    With F, I and W equally long and M ≥ K each device waits for K-1 slots: a sixth of 1F1B's
    bubble, as cells have half the size. At most 2K of the cells' micro-batches are live on a
    device, which is as much as on 1F1B's first one.

    Source: Qi et al. 2023, section 6. With M < 2K-1, the first M micro-batches of its table for
    2K-1, with W where devices would wait; with M < K, a device's second cell comes first.

    >>> print(zb_v(num_devices=2, num_micro_batches=3).grid())
    device 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 0B0 .   3F2 3I2 0I1 3W2 0I2 0W1 0W2
    device 1: .   1F0 2F0 1F1 2F1 2B0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    K, M = num_devices, num_micro_batches
    rows = []
    for k in range(num_devices):
        order = orders.ThereAndBack(k, K)
        order.repeat("F0", 2 * (K - k) - 1)
        order.repeat("F1 F0", k)
        order.repeat("F1 I1 W1", K - k)
        order.repeat("F0 I0 W0 F1 I1 W1", max(M, 2 * K - 1) - (2 * K - 1 - k))
        order.repeat("I0 W0 F1 I1 W1", K - 1 - k)
        order.repeat("I0 I1", k)
        order.repeat("I0 W0", K - k)
        order.repeat("W1", k)
        order.repeat("W0", k)
        rows.append(order.of_micro_batches(M))
    return _there_and_back(rows, M)


def dualpipe_v(num_devices: int, num_micro_batches: int) -> Table:
    """Return the DualPipeV table: `zb_v`'s cells, with a forward beside each backward.

    In its main part a forward of one of the device's cells is followed by a backward of the other
    one, of another micro-batch. They do not need each other, so what one sends can travel while the
    other computes. With F, I and W equally long and M ≥ 2K devices wait as under `zb_v`; one more
    is live, 2K+1.

    Source: DeepSeek-AI 2024, section 3.2.1, and its DualPipeV. With M < 2K, the first M
    micro-batches of its table for 2K, with W where devices would wait; with M < K, `zb_v`.

    >>> print(dualpipe_v(num_devices=2, num_micro_batches=2).grid())
    device 0: 0F0 0F1 .   3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1
    device 1: .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1
    """
    K, M = num_devices, num_micro_batches
    rows = []
    for k in range(num_devices):
        order = orders.ThereAndBack(k, K)
        order.repeat("F0", 2 * (K - 1 - k))
        order.repeat("F0 F1", k + 1)
        order.repeat("I1 W F1", K - 1 - k)
        order.repeat("F0 I1 W F1 I0 W", max(M, 2 * K) - 2 * K + k + 1)
        order.repeat("I1 W F1 I0 W", K - 1 - k)
        # While it drains, W comes first after each I, and from the middle on only at the end.
        whole = k + 1
        order.repeat("I1 W I0 W", whole // 2)
        if whole % 2:
            order.repeat("I1 W I0")
        order.repeat("I1 I0", whole // 2)
        order.repeat("W I0", K - 1 - k)
        order.repeat("W", whole)
        rows.append(order.of_micro_batches(M))
    return _there_and_back(rows, M)


def optimal(num_devices: int, num_micro_batches: int, cells_per_device: int) -> Table:
    """Return a shortest table; among those, one with the fewest micro-batches in flight.

    F, I and W are equally long. A device's live micro-batches are counted for each of its cells.
    Cell k is on device k mod K; there and back, no better table was found for K·M·V ≤ 48.

    Raises:
        ScheduleError: the search is too long for these numbers.

    >>> print(optimal(num_devices=2, num_micro_batches=3, cells_per_device=1).grid())
    cell 0: F0 F1 .  B0 F2 B1 .  .  B2
    cell 1: .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    problem = search.Problem(tuple(range(num_devices)) * cells_per_device, num_micro_batches)
    try:
        rows = search.shortest_with_fewest_live(problem, MAX_STATES)
    except search.SearchLimitError:
        raise ScheduleError(
            f"optimal for num_devices={num_devices}, num_micro_batches={num_micro_batches}, "
            f"cells_per_device={cells_per_device}: the search is too long. Use fewer, or zb_h1, "
            "or zb_v for two cells per device"
        ) from None
    return Table.on_grid(orders.with_whole_backwards(rows))


def _there_and_back(rows: list[list[Slot]], num_micro_batches: int) -> Table:
    """Return a table of these rows, for M ≥ K, with W where devices would wait."""
    num_devices = len(rows)
    if num_micro_batches < num_devices:
        rows = orders.later_cell_first(num_devices, num_micro_batches)
    return Table.on_grid(orders.with_whole_backwards(orders.with_weights_in_gaps(rows)))


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A schedule that has a name.

    Attributes:
        make: (K, M) → table; or (K, M, V) → table.
        cells_per_device: V where the user sets none.
        any_v: whether `make` has tables for any V.
    """

    make: Callable[..., Table]
    cells_per_device: int
    any_v: bool


SCHEDULES: dict[str, Named] = {
    "gpipe": Named(gpipe, 1, any_v=False),
    "1f1b": Named(one_f_one_b, 1, any_v=False),
    "interleaved": Named(interleaved, 2, any_v=True),
    "looped_bfs": Named(looped_bfs, 2, any_v=True),
    "zb_h1": Named(zb_h1, 1, any_v=True),
    "zb_v": Named(zb_v, 2, any_v=False),
    "dualpipe_v": Named(dualpipe_v, 2, any_v=False),
    "optimal": Named(optimal, 1, any_v=True),
}
