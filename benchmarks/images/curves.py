"""Draws test accuracy of runs over updates and over time, side by side.

    python -m benchmarks.images.curves curves.png "K=2=runs/k2" "ResNet-20=resnet20.tsv"

Each run is NAME=PATH: the log directory of a run of the trainer (`--mode=train_eval`), or a TSV
with columns step, seconds and accuracy, as `benchmarks.images.resnet20` writes. A run's time counts
from its first point of training; a run that was resumed counts the pause too.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from pathlib import Path

from benchmarks.support import scalars

TAG = "accuracy"


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Test accuracy of a run, point by point."""

    name: str
    steps: list[int]
    seconds: list[float]
    accuracy: list[float]


def read(name: str, path: Path) -> Curve:
    """Read the log directory of a run, or a TSV."""
    if path.is_dir():
        return _of_logdir(name, path)
    with path.open(encoding="ascii", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return Curve(
        name,
        [int(row["step"]) for row in rows],
        [float(row["seconds"]) for row in rows],
        [float(row[TAG]) for row in rows],
    )


def _of_logdir(name: str, path: Path) -> Curve:
    training = scalars.read(path / "train")
    start = min(point.wall_s for points in training.values() for point in points)
    points = scalars.read(path / "eval")[TAG]
    return Curve(
        name,
        [point.step for point in points],
        [point.wall_s - start for point in points],
        [point.value for point in points],
    )


def draw(curves: list[Curve], path: Path) -> None:
    """Draw curves over updates (left) and minutes (right) into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for curve in curves:
        (line,) = by_step.plot(curve.steps, curve.accuracy, label=curve.name)
        minutes = [s / 60.0 for s in curve.seconds]
        by_time.plot(minutes, curve.accuracy, color=line.get_color())
    by_step.set(xlabel="updates", ylabel="test accuracy")
    by_time.set(xlabel="minutes")
    lowest = min((a for curve in curves for a in curve.accuracy), default=0.0)
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.set_ylim(math.floor(10 * lowest) / 10, 1.0)
        axes.set_xlim(left=0)
    by_step.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Read the runs, print where each ended, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=PATH")
    options = parser.parse_args()
    curves = []
    for run in options.runs:
        name, _, path = run.rpartition("=")
        curves.append(read(name, Path(path)))
    print("run\tupdates\tminutes\tlast accuracy\tbest accuracy")
    for curve in curves:
        minutes = curve.seconds[-1] / 60.0
        last, best = curve.accuracy[-1], max(curve.accuracy)
        print(f"{curve.name}\t{curve.steps[-1]}\t{minutes:.1f}\t{last:.4f}\t{best:.4f}")
    draw(curves, options.picture)


if __name__ == "__main__":
    main()
