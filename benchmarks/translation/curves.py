r"""Draws evaluation losses of runs over the tokens that they have seen.

    python -m benchmarks.translation.curves batch.png --tokens=4096,16384,65536 \
        "4k=runs/De" "16k=runs/batch16k" "64k=runs/batch64k"

Each run is NAME=LOGDIR of the trainer (`--mode=train_eval`). `--tokens` are the tokens of an
update, one number for each run or one for all; without it the x axis counts updates. `--tag`
selects another metric. The end of each run is printed; its minutes are from before its first update
to its last point of training or evaluation, with any pause before it was resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import scalars


def draw(
    curves: Sequence[tuple[str, int, Sequence[scalars.Point]]], tag: str, unit: str, path: Path
) -> None:
    """Draw (name, tokens per update, points) as curves into a PNG."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(7, 4), dpi=110, layout="constrained")
    plot = picture.add_subplot()
    for name, tokens, points in curves:
        plot.plot([p.step * tokens for p in points], [p.value for p in points], ".-", label=name)
    plot.set(xlabel=unit, ylabel=tag)
    plot.set_xlim(left=0)
    plot.grid(alpha=0.3)
    plot.legend()
    picture.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    """Read the runs, print where each ended, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=LOGDIR")
    parser.add_argument("--tokens", default="1", help="of an update: a number, or one per run")
    parser.add_argument("--tag", default="log_perplexity", help="metric of the evaluation")
    arguments = parser.parse_args()
    tokens = [int(number) for number in arguments.tokens.split(",")]
    if len(tokens) == 1:
        tokens *= len(arguments.runs)
    if len(tokens) != len(arguments.runs):
        parser.error(f"--tokens has {len(tokens)} numbers for {len(arguments.runs)} runs")
    curves = []
    print("run", "updates", "tokens", "minutes", f"last {arguments.tag}", sep="\t")
    for run, per_update in zip(arguments.runs, tokens, strict=True):
        name, _, logdir = run.rpartition("=")
        points = scalars.read(Path(logdir) / "eval").get(arguments.tag)
        training = scalars.read(Path(logdir) / "train")
        if not points or "loss" not in training:
            parser.error(f"{logdir} has no {arguments.tag!r} of an evaluation, or no training")
        last = points[-1]
        # Constants such as sampling shares are written before the first update.
        times = [point.wall_s for series in (*training.values(), points) for point in series]
        minutes = (max(times) - min(times)) / 60.0
        print(
            *(name, last.step, last.step * per_update, f"{minutes:.1f}", f"{last.value:.4f}"),
            sep="\t",
        )
        curves.append((name, per_update, points))
    draw(
        curves,
        arguments.tag,
        "updates" if arguments.tokens == "1" else "tokens seen",
        arguments.picture,
    )


if __name__ == "__main__":
    main()
