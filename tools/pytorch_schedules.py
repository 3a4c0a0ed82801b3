"""Writes the figures of PyTorch's schedule tables, with which ours are compared.

In an environment with PyTorch, which the project does not need:
`python -m tools.pytorch_schedules > tests/lingvo_gpipe/schedule/pytorch.json`. For each schedule, K
and V, a list by M: ticks with F=1, B=2, I=1, W=1; ticks where cells recompute, B=3, I=2; the most
live micro-batches on a device; their sum over the devices. PyTorch refuses the other sizes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Table

NAMES = {
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zb_h1": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
MAX_K, MAX_M, MAX_V = 8, 32, 3


class Stage:
    """What the constructor of a schedule reads of a stage."""

    def __init__(self, index: int, num_stages: int, num_devices: int) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = num_devices
        self.group_rank = 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = None
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


def text(name: str, K: int, M: int, V: int) -> str:
    """Return the text of PyTorch's table.

    Raises:
        ValueError: PyTorch does not have it for these numbers.
    """
    schedule_class: Any = schedules.get_schedule_class(NAMES[name])
    stages = [Stage(K * v, K * V, K) for v in range(V)]
    schedule = schedule_class(stages, M, loss_fn=lambda *_: None)
    rows = []
    for device in range(K):
        actions = [action for action in schedule.pipeline_order[device] if action is not None]
        parts = [part for action in actions for part in action.sub_actions or [action]]
        rows.append(
            ",".join(
                f"{p.stage_index}{p.computation_type.value}{p.microbatch_index}" for p in parts
            )
        )
    return "\n".join(rows)


def figures(table: Table) -> list[int]:
    """Return ticks, ticks where cells recompute, the most live on a device, and all devices'."""
    ticks = []
    live: tuple[int, ...] = ()
    for lengths in (simulate.EQUAL_SLOTS, simulate.EQUAL_SLOTS_RECOMPUTING):
        timeline = simulate.simulate(table, lengths)
        ticks.append(int(timeline.makespan_s))
        live = timeline.peak_live
    return [*ticks, max(live), sum(live)]


def main() -> None:
    """Print a JSON object, a line for each schedule, K and V."""
    schedules._check_torch_compile_compatibility = lambda *_: None
    lines = [f'"torch": "{torch.__version__}"']
    for name in NAMES:
        for V in range(1, MAX_V + 1):
            for K in range(1, MAX_K + 1):
                by_size: dict[int, list[int]] = {}
                for M in range(1, MAX_M + 1):
                    try:
                        table = text(name, K, M, V)
                    except ValueError:
                        continue
                    by_size[M] = figures(Table.from_text(table))
                if by_size:
                    entries = json.dumps(by_size, separators=(",", ":"))
                    lines.append(f'"{name} {K} {V}": {entries}')
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
