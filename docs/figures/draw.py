"""Draws the pictures of this folder: python docs/figures/draw.py."""

from __future__ import annotations

from pathlib import Path

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import drawing, simulate

FOLDER = Path(__file__).parent


def timelines() -> dict[str, simulate.Timeline]:
    """Return name of picture → timeline, K=4, M=8.

    A forward of 1 ms, a backward of 3 ms, recomputation included. Under 1f1b every backward of the
    last cell is fused with its forward and recomputes nothing, so that cell has a third more
    layers; under gpipe only one is, and cells are equal.
    """
    equal_s, fused_s = [1e-3] * 4, 3e-3
    cut_s = [1e-3] * 3 + [4e-3 / 3]
    return {
        "gpipe": simulate.simulate(
            schedule.make("gpipe", 4, 8), equal_s, [3e-3] * 4, fused_s=fused_s
        ),
        "1f1b": simulate.simulate(
            schedule.make("1f1b", 4, 8), cut_s, [3 * s for s in cut_s], fused_s=3 * cut_s[-1]
        ),
    }


def main() -> None:
    """Write every picture."""
    for name, planned in timelines().items():
        (FOLDER / f"{name}.png").write_bytes(drawing.draw(planned))


if __name__ == "__main__":
    main()
