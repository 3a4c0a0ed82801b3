from __future__ import annotations

import doctest
import itertools

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import forward_only
from lingvo_gpipe.schedule.table import Slot, Table


def test_forward_table_keeps_cells_on_their_devices() -> None:
    interleaved = schedule.make("interleaved", 2, 2)
    table = forward_only.forward_table(interleaved, 3)
    assert table.is_forward_only
    assert (table.num_cells, table.num_micro_batches) == (4, 3)
    assert [table.device_of(k) for k in range(4)] == [0, 1, 0, 1]


def training_table(homes: tuple[int, ...]) -> Table:
    rows = [[k for k, home in enumerate(homes) if home == d] for d in range(max(homes) + 1)]
    return Table.on_grid(
        [[Slot(k, "F", 0) for k in row] + [Slot(k, "B", 0) for k in reversed(row)] for row in rows]
    )


@pytest.mark.parametrize("K", range(1, 7))
@pytest.mark.parametrize("order", ["there", "there there", "there there there", "there back"])
def test_no_forward_table_ends_sooner(K: int, order: str) -> None:
    """A device begins after the cells before its first one and ends before those after its last."""
    steps = {"there": range(K), "back": range(K - 1, -1, -1)}
    homes = tuple(itertools.chain(*(steps[way] for way in order.split())))
    V, training = len(order.split()), training_table(homes)
    for M in (1, 2, 3, 5, 8, 13):
        table = forward_only.forward_table(training, M)
        assert {str(slot) for slot in table} == {
            f"{k}F{m}" for k in range(len(homes)) for m in range(M)
        }
        cells = range(len(homes))
        of_devices = [[k for k in cells if homes[k] == device] for device in range(K)]
        least = max(
            len(homes) + M - 1, *(c[0] + M * V + len(homes) - 1 - c[-1] for c in of_devices)
        )
        assert max(map(len, table.devices)) == least


def test_blocks_of_cells_run_one_micro_batch_after_the_other() -> None:
    table = forward_only.forward_table(training_table((0, 0, 1, 1)), 2)
    assert table.to_text() == "0F0,1F0,0F1,1F1\n,,2F0,3F0,2F1,3F1"


def test_docstring_examples_run() -> None:
    result = doctest.testmod(forward_only)
    assert result.attempted > 0
    assert result.failed == 0
