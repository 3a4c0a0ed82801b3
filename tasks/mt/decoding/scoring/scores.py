"""BLEU and chrF of translations, per language and resource group, with intervals.

sacreBLEU computes the counts of every sentence and the scores of summed counts, by the two
functions that its significance tests use. A bootstrap resample is a weighted sum of sentence
counts, so that thousands take seconds. The sentences of a resample depend only on the seed, the
pair of languages and the number of sentences: two systems that translated the same sentences have
the same resamples, and the interval of their difference is that of a paired bootstrap.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe import errors, hyperparams

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

Array: TypeAlias = npt.NDArray[np.float64]

METRICS = ("BLEU", "chrF")
GROUPS = ("high", "mid", "low")
ALL = "all"
_PERCENTILES = (2.5, 97.5)
_BLOCK = 4_000_000  # weights of resamples in memory at a time
# sacreBLEU's default tokeniser splits at spaces, which these languages do not use; its tokeniser
# for Japanese needs another package.
_TOKENIZERS = {"zh": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


class Scoring(hyperparams.Params):
    """What is translated and how it is scored."""

    split: str | None = hyperparams.field(
        None, "Split that is translated and scored; None: eval.split."
    )
    max_sentences: int | None = hyperparams.field(
        None, "Maximum sentences of a pair of languages, evenly spaced over the split; None: all."
    )
    thresholds: tuple[int, int] | None = hyperparams.field(
        None,
        "Pairs with fewer training examples than the first are low-resource, with more than the "
        "second high-resource; None: thirds of the pairs, pairs with equally many together.",
    )
    resamples: int = hyperparams.field(
        1_000, "Bootstrap resamples, from which intervals are computed."
    )
    seed: int = hyperparams.field(0, "Seed of the resamples.")


@dataclasses.dataclass(frozen=True, slots=True)
class PairTranslations:
    """Sentences of a pair of languages and their translations.

    Attributes:
        pair: such as `de:en`.
        examples: number of the pair's examples in the training data.
        hypotheses: translations, one line each.
        references: the reference translations.
        sources: the translated sentences.
    """

    pair: str
    examples: int
    hypotheses: Sequence[str]
    references: Sequence[str]
    sources: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A score, or the difference of two.

    Attributes:
        value: value of all sentences.
        samples: [resamples] of each bootstrap resample.
    """

    value: float
    samples: Array = dataclasses.field(repr=False, compare=False)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the central 95 % of the resamples."""
        low, high = np.percentile(self.samples, _PERCENTILES)
        return float(low), float(high)

    def __sub__(self, other: Score) -> Score:
        """Return the difference; its interval is paired if both scored the same sentences."""
        return Score(self.value - other.value, self.samples - other.samples)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreRow:
    """Scores of a pair of languages, or the means over the pairs of a group.

    Attributes:
        name: such as `de:en`, or that of the group.
        group: its resource group; `all` if it is in none.
        examples: number of examples in the training data.
        sentences: number of scored sentences.
        scores: metric → score.
        copied: metric → score of the sources as their own translations.
        signatures: metric → sacreBLEU's signature of it.
    """

    name: str
    group: str
    examples: int
    sentences: int
    scores: Mapping[str, Score]
    copied: Mapping[str, Score]
    signatures: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreReport:
    """All scores of a system.

    Attributes:
        languages: a row per pair of languages, most training examples first.
        groups: means over the pairs of `high`, `mid`, `low` (those that have any) and `all`.
    """

    languages: tuple[ScoreRow, ...]
    groups: tuple[ScoreRow, ...]

    def row(self, name: str) -> ScoreRow:
        """Return the row of a pair or group."""
        return next(row for row in (*self.groups, *self.languages) if row.name == name)


def sacrebleu() -> ModuleType:
    """Return the module of sacreBLEU's metrics.

    Raises:
        InputError: it is not installed.
    """
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise errors.InputError(
            "sacreBLEU, which computes the scores, is not installed. Install it: "
            "pip install 'lingvo-gpipe[mt]'"
        ) from error
    return metrics


def resource_groups(
    examples: Mapping[str, int], thresholds: tuple[int, int] | None = None
) -> dict[str, str]:
    """Return name → `high`, `mid` or `low`; `all` if all names have equally many examples.

    Args:
        examples: name → training examples.
        thresholds: fewer than the first are low, more than the second high; None: thirds of the
            names. Names with equally many are in one group, which depends on the share of the
            others that have more. If all have equally many, there are no thirds.

    >>> resource_groups({"de": 900, "sw": 40, "fr": 800})
    {'de': 'high', 'fr': 'mid', 'sw': 'low'}
    >>> resource_groups({"de": 900, "sw": 40, "fr": 900})
    {'de': 'high', 'fr': 'high', 'sw': 'low'}
    """
    names = sorted(examples, key=lambda name: (-examples[name], name))
    if thresholds is None:
        return _thirds(names, examples)
    least, most = thresholds
    if least > most:
        raise errors.ParamsError(
            f"score.thresholds={thresholds} decrease. Put the lower one first: ({most}, {least})"
        )
    return {
        name: "low" if examples[name] < least else "high" if examples[name] > most else "mid"
        for name in names
    }


def _thirds(names: Sequence[str], examples: Mapping[str, int]) -> dict[str, str]:
    """Return name → group; `names` are in decreasing order of examples."""
    groups: dict[str, str] = {}
    for _, tied in itertools.groupby(names, key=lambda name: examples[name]):
        equal, ahead, count = list(tied), len(groups), len(names)
        others = count - len(equal)
        # A single name's place is `ahead`; equal names have the place that the others give them.
        group = GROUPS[3 * ahead * (count - 1) // (others * count)] if others else ALL
        groups |= dict.fromkeys(equal, group)
    return groups


def check(params: Scoring) -> None:
    """Refuse settings that are out of range.

    Raises:
        ParamsError: a number is out of range.
    """
    for name, least in (("resamples", 1), ("max_sentences", 1), ("seed", 0)):
        value = params.get(name)
        if value is not None and value < least:
            raise errors.ParamsError(f"score.{name}={value} is too small. Use {least} or more")
    resource_groups({}, params.thresholds)


def score(
    texts: Sequence[PairTranslations],
    params: Scoring,
    progress: Callable[[int], object] | None = None,
) -> ScoreReport:
    """Score translations.

    A group's score is the mean over its pairs of languages, whatever their numbers of sentences.
    Its resamples draw sentences within each pair; the set of languages is fixed.

    Args:
        texts: texts of each pair of languages.
        params: settings.
        progress: called after each pair with its number of sentences.

    Raises:
        InputError: there is nothing to score, or sacreBLEU is not installed.
    """
    metrics = sacrebleu()
    check(params)
    by_name = {text.pair: text for text in texts if text.references}
    if not by_name:
        raise errors.InputError("there is no sentence to score. Use another score.split")
    examples = {name: text.examples for name, text in by_name.items()}
    rows = []
    for name, group in resource_groups(examples, params.thresholds).items():
        rows.append(_row(by_name[name], group, params, metrics))
        if progress is not None:
            progress(rows[-1].sentences)
    groups = []
    for group in (*GROUPS, ALL):
        of_group = [row for row in rows if group in (row.group, ALL)]
        if of_group:
            groups.append(_mean(group, of_group))
    return ScoreReport(tuple(rows), tuple(groups))


def _row(text: PairTranslations, group: str, params: Scoring, metrics: ModuleType) -> ScoreRow:
    count = len(text.references)
    tokenize = _TOKENIZERS.get(text.pair.partition(":")[2].partition("-")[0], "13a")
    references = [list(text.references)]
    by_name: dict[str, Metric] = {
        # `force` silences a warning about text that looks tokenised.
        "BLEU": metrics.BLEU(tokenize=tokenize, force=True, references=references),
        "chrF": metrics.CHRF(references=references),
    }
    systems = (text.hypotheses, text.sources)
    counts = [
        np.asarray(metric._extract_corpus_statistics(list(system), None), np.float64)
        for metric in by_name.values()
        for system in systems
    ]
    random = np.random.default_rng([params.seed, zlib.crc32(text.pair.encode())])
    joined = np.concatenate(counts, axis=1)
    sums = np.concatenate(
        [weights @ joined for weights in _resamples(random, count, params.resamples)]
    )
    ends = np.cumsum([part.shape[1] for part in counts])
    parts = iter(zip(counts, np.split(sums, ends[:-1], axis=1), strict=True))
    scores: dict[str, Score] = {}
    copied: dict[str, Score] = {}
    for name, metric in by_name.items():
        for result in (scores, copied):
            part, sampled = next(parts)
            samples = np.array([_value(metric, row) for row in sampled])
            result[name] = Score(_value(metric, part.sum(0)), samples)
    signatures = {name: str(metric.get_signature()) for name, metric in by_name.items()}
    return ScoreRow(text.pair, group, text.examples, count, scores, copied, signatures)


def _resamples(random: np.random.Generator, count: int, resamples: int) -> Iterator[Array]:
    """Yield blocks [r, count]: how often a resample has each sentence; `resamples` rows in all."""
    step = max(1, _BLOCK // count)
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        yield random.multinomial(count, np.full(count, 1.0 / count), rows).astype(np.float64)


def _value(metric: Metric, counts: Array) -> float:
    return float(metric._compute_score_from_stats(counts.astype(np.int64).tolist()).score)


def _mean(name: str, rows: Sequence[ScoreRow]) -> ScoreRow:
    """Return the means over pairs of languages."""

    def means(kind: Literal["scores", "copied"]) -> dict[str, Score]:
        return {
            metric: Score(
                float(np.mean([getattr(row, kind)[metric].value for row in rows])),
                np.mean([getattr(row, kind)[metric].samples for row in rows], axis=0),
            )
            for metric in METRICS
        }

    return ScoreRow(
        name,
        name,
        sum(row.examples for row in rows),
        sum(row.sentences for row in rows),
        means("scores"),
        means("copied"),
        {metric: " ".join(sorted({row.signatures[metric] for row in rows})) for metric in METRICS},
    )
