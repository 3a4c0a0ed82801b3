"""What worker processes hold in a step is what its plan has for them."""

from __future__ import annotations

from benchmarks.support import processes


def test_workers_hold_the_tensors_of_their_plan() -> None:
    found = processes.run(["benchmarks.scaling", "held,1x2,512"])
    for planned, tensors, resident in zip(
        found["planned"], found["tensors"], found["resident"], strict=True
    ):
        # The plan is of the most at once: how much an update holds depends on the order in which
        # threads free and allocate: up to 18 % less here, on a busy machine.
        assert 0.7 <= tensors / planned <= 1.1
        assert resident > 0.95 * tensors
