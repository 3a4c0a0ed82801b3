r"""Draws evaluation losses of runs over the tokens that they have seen.

    python -m benchmarks.translation.curves batch.png --tokens=4096,16384,65536 \
        "4k=runs/De" "16k=runs/batch16k" "64k=runs/batch64k"

Each run is NAME=LOGDIR of the trainer (`--mode=train_eval`). `--tokens` are those of an update, one
number per run or one for all; without it curves go over updates. `--tag` names another metric.
Where each run ended is printed; its minutes are from before its first update to its last point of
training or evaluation, a pause included where it was resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A scalar of TensorBoard."""

    step: int
    wall_s: float
    value: float


def read(folder: Path) -> dict[str, list[Point]]:
    """Return the scalars in a folder of TensorBoard: tag → points in the order of writing.

    A folder that is not there has none.
    """
    if not folder.exists():
        return {}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    found.Reload()

    def value(event: Any) -> float:
        return float(tensor_util.make_ndarray(event.tensor_proto))

    points: dict[str, list[Point]] = {}
    for tag in found.Tags()["tensors"]:
        if found.SummaryMetadata(tag).plugin_data.plugin_name != "scalars":
            continue
        points[tag] = sorted(
            (Point(event.step, event.wall_time, value(event)) for event in found.Tensors(tag)),
            key=lambda point: point.wall_s,
        )
    return points


def draw(
    curves: Sequence[tuple[str, int, Sequence[Point]]], tag: str, unit: str, path: Path
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
    given = parser.parse_args()
    tokens = [int(number) for number in given.tokens.split(",")]
    if len(tokens) == 1:
        tokens *= len(given.runs)
    if len(tokens) != len(given.runs):
        parser.error(f"--tokens has {len(tokens)} numbers for {len(given.runs)} runs")
    curves = []
    print("run", "updates", "tokens", "minutes", f"last {given.tag}", sep="\t")
    for run, each in zip(given.runs, tokens, strict=True):
        name, _, logdir = run.rpartition("=")
        points = read(Path(logdir) / "eval").get(given.tag)
        training = read(Path(logdir) / "train")
        if not points or "loss" not in training:
            parser.error(f"{logdir} has no {given.tag!r} of an evaluation, or no training")
        last = points[-1]
        # Constants such as sampling shares are written before the first update.
        times = [point.wall_s for own in (*training.values(), points) for point in own]
        minutes = (max(times) - min(times)) / 60.0
        print(*(name, last.step, last.step * each, f"{minutes:.1f}", f"{last.value:.4f}"), sep="\t")
        curves.append((name, each, points))
    draw(curves, given.tag, "updates" if given.tokens == "1" else "tokens seen", given.picture)


if __name__ == "__main__":
    main()
