r"""Draws a metric of runs over updates, or the tokens that they have seen, and over time.

    python -m benchmarks.curves cifar10.png "K=1=runs/k1" "K=2=runs/k2"
    python -m benchmarks.curves batch.png --tag=log_perplexity --tokens=4096,16384 \
        "4k=runs/De" "16k=runs/batch16k"

Each run is NAME=PATH, the log directory of a run of the trainer (`--mode=train_eval`). `--tokens`
are the tokens of an update, one number for each run or one for all. The end of each run is printed.
Its time counts from its first point of training, with any pause before it was resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import scalars


def read(path: Path, tag: str) -> list[scalars.Point]:
    """Return the points of a metric, whose seconds count from the start of the run.

    Raises:
        ValueError: the run has none.
    """
    training = scalars.read(path / "train")
    points = scalars.read(path / "eval").get(tag)
    if not points or not training:
        raise ValueError(f"{path} has no {tag!r} of an evaluation, or no training")
    start_s = min(point.wall_s for series in training.values() for point in series)
    return [scalars.Point(p.step, p.wall_s - start_s, p.value) for p in points]


def draw(
    curves: Sequence[tuple[str, int, Sequence[scalars.Point]]], tag: str, unit: str, path: Path
) -> None:
    """Draw (name, tokens per update, points) as curves into a PNG."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(11, 4), dpi=110, layout="constrained")
    by_step, by_time = picture.subplots(1, 2, sharey=True)
    for name, tokens, points in curves:
        values = [p.value for p in points]
        by_step.plot([p.step * tokens for p in points], values, ".-", label=name)
        by_time.plot([p.wall_s / 60 for p in points], values, ".-")
    by_step.set(xlabel=unit, ylabel=tag)
    by_time.set(xlabel="minutes")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    by_step.legend()
    picture.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    """Read the runs, print where each ended, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--tokens", default="1", help="of an update: a number, or one per run")
    parser.add_argument("--tag", default="accuracy", help="metric of the evaluation")
    options = parser.parse_args()
    tokens = [int(number) for number in options.tokens.split(",")]
    if len(tokens) == 1:
        tokens *= len(options.runs)
    if len(tokens) != len(options.runs):
        parser.error(f"--tokens has {len(tokens)} numbers for {len(options.runs)} runs")
    curves = []
    unit = "updates" if options.tokens == "1" else "tokens"
    print("run", unit, "minutes", f"last {options.tag}", "lowest", "highest", sep="\t")
    for run, per_update in zip(options.runs, tokens, strict=True):
        name, _, path = run.rpartition("=")
        try:
            points = read(Path(path), options.tag)
        except ValueError as error:
            parser.error(str(error))
        last, values = points[-1], [point.value for point in points]
        numbers = [f"{value:.4f}" for value in (last.value, min(values), max(values))]
        print(name, last.step * per_update, f"{last.wall_s / 60:.1f}", *numbers, sep="\t")
        curves.append((name, per_update, points))
    draw(curves, options.tag, unit, options.picture)


if __name__ == "__main__":
    main()
