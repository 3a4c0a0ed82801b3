"""What several runs resulted in, as a table."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gpipe.repeat.sweep import Setting


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The results of several runs.

    Attributes:
        metrics: seed → name → number, of each run's last evaluation.
    """

    metrics: Mapping[int, Mapping[str, float]]

    @property
    def names(self) -> list[str]:
        """Names of metrics that every run has, in the order of the first."""
        first, *others = self.metrics.values()
        return [name for name in first if all(name in other for other in others)]

    def mean(self, name: str) -> float:
        """Return the mean of a metric."""
        return statistics.fmean(self._values(name))

    def deviation(self, name: str) -> float:
        """Return the sample standard deviation of a metric (by n − 1); NaN of one run."""
        values = self._values(name)
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def table(self) -> str:
        """Return a line per seed, then mean ± deviation, then a line for each metric.

        >>> print(Summary({1: {"accuracy": 0.5}, 2: {"accuracy": 0.7}}).table())
        seed         accuracy
        1              0.5000
        2              0.7000
        mean  0.6000 ± 0.1414
        accuracy mean=0.6000 std=0.1414 n=2
        """
        rows = [["seed", *self.names]]
        rows += [
            [str(seed), *(f"{values[name]:.4f}" for name in self.names)]
            for seed, values in self.metrics.items()
        ]
        rows.append(
            ["mean", *(f"{self.mean(n):.4f} ± {self.deviation(n):.4f}" for n in self.names)]
        )
        lines = list(_aligned(rows, num_labels=1))
        shown = [name for name in self.names if not name.startswith("loss")] or self.names
        count = len(self.metrics)
        lines += [
            f"{n} mean={self.mean(n):.4f} std={self.deviation(n):.4f} n={count}" for n in shown
        ]
        return "\n".join(lines)

    def _values(self, name: str) -> list[float]:
        return [values[name] for values in self.metrics.values()]


def sweep_table(results: Mapping[Setting, Summary]) -> str:
    """Return a line per setting: its values, the number of its runs, mean ± deviation.

    >>> rate = ("train.optimizer.learning_rate",)
    >>> one, other = Summary({1: {"loss": 0.5}}), Summary({1: {"loss": 0.25}})
    >>> settings = Setting(rate, ("1e-3",)), Setting(rate, ("3e-3",))
    >>> print(sweep_table(dict(zip(settings, (one, other)))))
    learning_rate  n    loss
    1e-3           1  0.5000
    3e-3           1  0.2500
    """
    first = next(iter(results))
    named = [summary.names for summary in results.values() if summary.metrics]
    names = [name for name in named[0] if all(name in each for each in named)] if named else []
    rows = [[*first.names, "n", *names]]
    for setting, summary in results.items():
        cells = [f"{summary.mean(name):.4f}" if summary.metrics else "-" for name in names]
        if len(summary.metrics) > 1:
            spread = [f" ± {summary.deviation(name):.4f}" for name in names]
            cells = list(map(str.__add__, cells, spread))
        rows.append([*setting.values, str(len(summary.metrics)), *cells])
    return "\n".join(_aligned(rows, num_labels=len(first.names)))


def _aligned(rows: Sequence[Sequence[str]], num_labels: int) -> Iterator[str]:
    """Yield rows of a table whose first columns begin at the left, and the others end right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        labels = map(str.ljust, row[:num_labels], widths)
        yield "  ".join([*labels, *map(str.rjust, row[num_labels:], widths[num_labels:])])
