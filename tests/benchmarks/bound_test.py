"""What `benchmarks.bound` derives from its runs."""

from __future__ import annotations

import pytest

from benchmarks import bound
from benchmarks.support import processes


def test_steps_are_divided_by_that_of_1f1b() -> None:
    def runs(*steps: tuple[float, float, float]) -> list[dict[str, float]]:
        return [{"s": s, "simulated_s": t, "other_load": load} for s, t, load in steps]

    found = {
        "1f1b,20.0": runs((1.0, 0.8, 0.0), (9.0, 9.0, 1.0)),  # the second one was disturbed
        "zb_h1,20.0": runs((0.9, 0.7, 0.0)),
        "interleaved,20.0": runs((0.95, 0.75, 0.0), (0.85, 0.65, 0.0)),
    }
    assert bound.beside_1f1b(found, 20.0) == (
        "step of zb_h1 / 1f1b 0.900, simulated 0.875, "
        "step of interleaved / 1f1b 0.900, simulated 0.875"
    )


def test_the_last_line_has_the_least_share_and_the_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounds(_: str, names: list[str], count: int) -> dict[str, list[dict[str, float]]]:
        run = {"s": 1.0, "simulated_s": 0.99, "share": 0.99, "other_load": 0.0}
        found = {name: [run] * count for name in names}
        assert "1f1b,40.0" not in found
        found["zb_v,20.0"] = [run | {"share": 0.96}] * count
        found["zb_v,40.0"] = [run | {"share": 0.98}] * count
        return found

    monkeypatch.setattr(processes, "rounds", rounds)
    monkeypatch.setattr("sys.argv", ["bound", "--quick"])
    bound.main()
    lines = capsys.readouterr().out.splitlines()
    pair = "step of {} / 1f1b 1.000, simulated 1.000"
    steps = f"{pair.format('zb_h1')}, {pair.format('interleaved')}"
    assert [line for line in lines if line.startswith("pairs of ")] == [
        f"pairs of 20 ms: {steps}",
        f"pairs of 4 ms: {steps}",
    ]
    of_device = "(0.960 where it is the pair of all cells of a device)"
    assert lines[-1].startswith(f"bound: 0.980 {of_device}; {steps} (aim at least 0.97")
