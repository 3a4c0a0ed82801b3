"""Draws the pictures of this folder: python docs/figures/draw.py."""

from __future__ import annotations

from pathlib import Path

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import drawing, simulate

FOLDER = Path(__file__).parent


def timelines() -> dict[str, simulate.Timeline]:
    """Return name of picture → timeline, K=4, M=8.

    Those of `schedules.md` are by `equal_cells`. For the others: a forward of 1 ms, a backward of
    3 ms, recomputation included. Under 1f1b every backward of the last cell is fused with its
    forward and recomputes nothing, so that cell has a third more layers; under gpipe only one is,
    and cells are equal.
    """
    cut_s = [1e-3] * 3 + [4e-3 / 3]
    pages = {f"schedule_{name}": equal_cells(name) for name in schedule.SCHEDULES}
    return pages | {
        "gpipe": simulate.simulate(
            schedule.make("gpipe", 4, 8), {"F": 1e-3, "B": 3e-3}, fused_s=3e-3
        ),
        "1f1b": simulate.simulate(
            schedule.make("1f1b", 4, 8),
            {"F": cut_s, "B": [3 * s for s in cut_s]},
            fused_s=3 * cut_s[-1],
        ),
    }


def equal_cells(name: str, V: int | None = None) -> simulate.Timeline:
    """Return the timeline of a schedule with equal cells that keep their forwards, K=4, M=8.

    All cells of a device together take 1 ms for a forward and 2 ms for a backward, half of that
    for each of its parts.
    """
    table = schedule.make(name, 4, 8, V)
    part_s = 1e-3 * table.num_devices / table.num_cells
    return simulate.simulate(table, {"F": part_s, "B": 2 * part_s, "I": part_s, "W": part_s})


def main() -> None:
    """Write every picture."""
    for name, planned in timelines().items():
        (FOLDER / f"{name}.png").write_bytes(drawing.draw(planned))


if __name__ == "__main__":
    main()
