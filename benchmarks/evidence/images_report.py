"""A table and a picture of `benchmarks.evidence.images`, from the runs that are done.

`python -m benchmarks.evidence.images_report --results=FILE --picture=FILE`: accuracies on the test
images after the last update, their mean over seeds, and its interval of 95 % by Student's t. Two
kinds of runs are compared by the difference of each seed: they read the same images in one order.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.evidence.runs import Result, read_results
from benchmarks.support import markdown

# Two-sided 95 % of Student's t for one to nine degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

_NETWORKS = {
    "amoebanet": "AmoebaNet",
    "resnet": "ResNet, equal epochs",
    "resnet_minutes": "ResNet, equal time",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What the seeds of a kind of run reached, or by how much more than those of another.

    Attributes:
        name: of the kind, such as `tuned/1000`.
        updates: of each run.
        core_minutes: of a run on average.
        accuracies: seed → accuracy.
    """

    name: str
    updates: int
    core_minutes: float
    accuracies: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean of the seeds."""
        return statistics.fmean(self.accuracies.values())

    @property
    def error(self) -> float:
        """Half of the mean's interval; NaN for one seed."""
        number = len(self.accuracies)
        if number < 2:
            return math.nan
        return _T[number - 2] * statistics.stdev(self.accuracies.values()) / math.sqrt(number)


def rows(results: Iterable[Result]) -> list[Row]:
    """Return a row for each kind of run."""
    kinds: dict[str, list[Result]] = {}
    for each in sorted(results, key=lambda result: result.name):
        kinds.setdefault(each.name.rpartition("/")[0] or each.name, []).append(each)
    return [
        Row(
            name,
            of_kind[0].updates,
            statistics.fmean(each.core_minutes for each in of_kind),
            {each.name.rpartition("/")[2]: each.evaluations[-1][1] for each in of_kind},
        )
        for name, of_kind in kinds.items()
    ]


def differences(found: Sequence[Row]) -> list[Row]:
    """Return by how much a kind is better than another, where both have at least one seed."""
    by_name = {each.name: each for each in found}
    pairs = [("amoebanet", "resnet"), ("amoebanet", "resnet_minutes")]
    tuned = (name for name in by_name if name.startswith("tuned/"))
    pairs += [(name, name.replace("tuned", "scratch")) for name in tuned]
    compared = []
    for first, second in pairs:
        if first in by_name and second in by_name:
            one, other = by_name[first], by_name[second]
            both = {
                seed: value - other.accuracies[seed]
                for seed, value in one.accuracies.items()
                if seed in other.accuracies
            }
            if both:
                minutes = one.core_minutes - other.core_minutes
                name = f"{first} − {second}"
                compared.append(Row(name, one.updates - other.updates, minutes, both))
    return compared


def table(found: Sequence[Row]) -> str:
    """Return a markdown table with a line for each kind of run."""
    head = ["run", "seeds", "updates", "core minutes", "accuracy", "±", "each seed"]
    lines = [head]
    for each in found:
        seeds = " ".join(f"{value:.4f}" for value in each.accuracies.values())
        count = str(len(each.accuracies))
        error = "" if math.isnan(each.error) else f"{each.error:.4f}"
        numbers = [f"{each.core_minutes:.1f}", f"{each.mean:.4f}", error]
        lines.append([each.name, count, f"{each.updates:,}", *numbers, seeds])
    return markdown.table(lines)


def draw(found: Sequence[Row], path: Path) -> None:
    """Draw the networks on all images, and the fine-tuned ones over the number of images."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(11, 4), dpi=110, layout="constrained")
    whole, few = picture.subplots(1, 2)
    networks = [each for each in found if each.name in _NETWORKS]
    for number, each in enumerate(networks):
        whole.errorbar(number, each.mean, yerr=each.error, fmt="o", capsize=3, color="C0")
        whole.plot([number] * len(each.accuracies), each.accuracies.values(), "_", color="C1")
    labels = [f"{_NETWORKS[each.name]}\n{each.core_minutes:.0f} core minutes" for each in networks]
    whole.set_xticks(range(len(networks)), labels)
    whole.set(ylabel="accuracy")
    whole.set_xlim(-0.5, max(0.5, len(networks) - 0.5))
    for kind, label in (("scratch", "from random weights"), ("tuned", "pre-trained")):
        of_kind = [
            (int(each.name.rpartition("/")[2]), each)
            for each in found
            if each.name.startswith(f"{kind}/")
        ]
        of_kind.sort(key=lambda pair: pair[0])
        few.errorbar(
            [number for number, _ in of_kind],
            [each.mean for _, each in of_kind],
            yerr=[each.error for _, each in of_kind],
            fmt="o-",
            capsize=3,
            label=label,
        )
    few.set(xscale="log", xlabel="images to learn from", ylabel="accuracy")
    few.legend()
    for axes in (whole, few):
        axes.grid(axis="y", alpha=0.3)
    picture.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    """Print the tables and draw the picture of the runs that are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="of the runs")
    parser.add_argument("--picture", type=Path, required=True, help="PNG to write")
    options = parser.parse_args()
    found = rows(read_results(options.results).values())
    print(table(found), table(differences(found)), sep="\n\n")
    draw(found, options.picture)


if __name__ == "__main__":
    main()
