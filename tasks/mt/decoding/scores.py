"""BLEU and chrF of translations, per language and resource group, with intervals; their files.

sacreBLEU computes the counts of every sentence and the scores of summed counts, by the two
functions that its significance tests use. The sentences of a bootstrap resample depend only on the
pair of languages and the number of sentences: two systems that translated the same sentences have
the same resamples, and the interval of their difference is that of a paired bootstrap.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import itertools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import units

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

Array: TypeAlias = npt.NDArray[np.float64]

METRICS = ("BLEU", "chrF")
GROUPS = ("high", "mid", "low")
ALL = "all"
RESAMPLES = 1_000
# sacreBLEU's default tokeniser splits at spaces, which these languages do not use; its tokeniser
# for Japanese needs another package.
_TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "cmn"), "zh"),
    **dict.fromkeys(("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"), "char"),
}
_FILE_KINDS = ("hypothesis", "reference", "source")


class Scoring(hyperparams.Params):
    """What is translated and scored."""

    split: str | None = hyperparams.field(
        None, "Split that is translated and scored; None: eval.split."
    )
    max_sentences: int | None = hyperparams.field(
        None, "Maximum sentences of a pair of languages, evenly spaced over the split; None: all."
    )


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
        samples: value of each bootstrap resample.
    """

    value: float
    samples: Array = dataclasses.field(repr=False, compare=False)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the central 95 % of the resamples."""
        low, high = np.percentile(self.samples, (2.5, 97.5))
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


def resource_groups(examples: Mapping[str, int]) -> dict[str, str]:
    """Return name → `high`, `mid` or `low`: thirds of the names by their training examples.

    Names with equally many are in one group, which depends on the share of the others that have
    more. If all have equally many, they are in the group `all`.

    >>> resource_groups({"de": 900, "sw": 40, "fr": 800})
    {'de': 'high', 'fr': 'mid', 'sw': 'low'}
    >>> resource_groups({"de": 900, "sw": 40, "fr": 900})
    {'de': 'high', 'fr': 'high', 'sw': 'low'}
    """
    names = sorted(examples, key=lambda name: (-examples[name], name))
    groups: dict[str, str] = {}
    for _, tied in itertools.groupby(names, key=lambda name: examples[name]):
        equal, ahead, count = list(tied), len(groups), len(names)
        others = count - len(equal)
        # A single name's place is `ahead`; equal names have the place that the others give them.
        group = GROUPS[3 * ahead * (count - 1) // (others * count)] if others else ALL
        groups |= dict.fromkeys(equal, group)
    return groups


def score(
    texts: Sequence[PairTranslations], progress: Callable[[int], object] = lambda _: None
) -> ScoreReport:
    """Score translations.

    A group's score is the mean over its pairs of languages, whatever their numbers of sentences.
    Its resamples draw sentences within each pair; the set of languages is fixed.

    Args:
        texts: texts of each pair of languages.
        progress: called after each pair with its number of sentences.

    Raises:
        InputError: sacreBLEU is not installed.
    """
    metrics = sacrebleu()
    by_name = {text.pair: text for text in texts}
    examples = {name: text.examples for name, text in by_name.items()}
    rows = []
    for name, group in resource_groups(examples).items():
        rows.append(_score_pair(by_name[name], group, metrics))
        progress(rows[-1].sentences)
    groups = []
    for group in (*GROUPS, ALL):
        of_group = [row for row in rows if group in (row.group, ALL)]
        if of_group:
            groups.append(_mean(group, of_group))
    return ScoreReport(tuple(rows), tuple(groups))


def _score_pair(text: PairTranslations, group: str, metrics: ModuleType) -> ScoreRow:
    count = len(text.references)
    target = text.pair.partition(":")[2].lower()  # such as zh-hans or zho_hans
    tokenize = _TOKENIZERS.get(re.split("[-_]", target)[0], "13a")
    references = [list(text.references)]
    by_name: dict[str, Metric] = {
        # `force` silences a warning about text that looks tokenised.
        "BLEU": metrics.BLEU(tokenize=tokenize, force=True, references=references),
        "chrF": metrics.CHRF(references=references),
    }
    random = np.random.default_rng([0, zlib.crc32(text.pair.encode())])
    # How often each resample has each sentence.
    weights = random.multinomial(count, np.full(count, 1.0 / count), RESAMPLES).astype(np.float64)

    def score_of(metric: Metric, system: Sequence[str]) -> Score:
        counts = np.asarray(metric._extract_corpus_statistics(list(system), None), np.float64)
        samples = [_value(metric, sums) for sums in weights @ counts]
        return Score(_value(metric, counts.sum(0)), np.array(samples))

    return ScoreRow(
        text.pair,
        group,
        text.examples,
        count,
        {name: score_of(metric, text.hypotheses) for name, metric in by_name.items()},
        {name: score_of(metric, text.sources) for name, metric in by_name.items()},
        {name: str(metric.get_signature()) for name, metric in by_name.items()},
    )


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


def table(report: ScoreReport, languages: bool = True) -> str:
    """Return scores as aligned text: groups, then languages, then the signatures.

    Args:
        report: all scores.
        languages: whether to add a line for each pair of languages.
    """
    head = ["", "training", "sentences"]
    for metric in METRICS:
        head += [metric, "95 %", "source"]
    rows = [head]
    counted = collections.Counter(row.group for row in report.languages)
    counted[ALL] = len(report.languages)
    for row in report.groups:
        rows.append(_cells(row, f"{row.name} ({counted[row.name]})"))
    for row in report.languages if languages else ():
        rows.append(_cells(row, row.name if row.group == ALL else f"{row.name} {row.group}"))
    lines = units.table(rows, "lrr" + "rrr" * len(METRICS))
    lines.append("")
    lines.append("source: the source sentence as its own translation; groups: means over pairs")
    for metric in METRICS:
        signatures = sorted({row.signatures[metric] for row in report.languages})
        lines += [f"{metric}|{signature}" for signature in signatures]
    return "\n".join(lines)


def _cells(row: ScoreRow, name: str) -> list[str]:
    cells = [name, f"{row.examples:,}", f"{row.sentences:,}"]
    for metric in METRICS:
        low, high = row.scores[metric].interval
        cells.append(f"{row.scores[metric].value:.2f}")
        cells.append(f"{low:.2f}-{high:.2f}")
        cells.append(f"{row.copied[metric].value:.2f}")
    return cells


def tsv(report: ScoreReport, step: int) -> str:
    """Return scores as tab-separated values, a line for each group and pair of languages.

    Columns: name, kind (`group` or `pair`), group, step, training, sentences; then for each of
    BLEU and chrF the score, _low and _high (95 %), _source (of the copied source), _signature.

    Args:
        report: all scores.
        step: number of updates of the checkpoint.
    """
    buffer = io.StringIO()
    names = ["name", "kind", "group", "step", "training", "sentences"]
    for metric in METRICS:
        names += [metric, *(f"{metric}_{part}" for part in ("low", "high", "source", "signature"))]
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(names)
    for kind, rows in (("group", report.groups), ("pair", report.languages)):
        for row in rows:
            cells: list[str | int] = [row.name, kind, row.group, step, row.examples, row.sentences]
            for metric in METRICS:
                values = (row.scores[metric].value, *row.scores[metric].interval)
                cells += [f"{value:.4f}" for value in (*values, row.copied[metric].value)]
                cells.append(row.signatures[metric])
            writer.writerow(cells)
    return buffer.getvalue()


def write(
    folder: Path, split: str, texts: Sequence[PairTranslations], report: ScoreReport, step: int
) -> Path:
    """Write the sentences and the scores of a split; return the path of the scores.

    SPLIT/SOURCE.TARGET.{hypothesis,reference,source} hold a line for each sentence, SPLIT.tsv the
    result of `tsv`, SPLIT.txt that of `table`.
    """
    path = folder / f"{split}.tsv"
    (folder / split).mkdir(parents=True, exist_ok=True)
    # Its presence means that the sentences are complete: it is removed before they change.
    path.unlink(missing_ok=True)
    for text in texts:
        sentences = (text.hypotheses, text.references, text.sources)
        for kind, lines in zip(_FILE_KINDS, sentences, strict=True):
            content = "".join(f"{line}\n" for line in lines)
            _path(folder, split, text.pair, kind).write_text(content, encoding="utf-8")
    (folder / f"{split}.txt").write_text(f"step {step}\n{table(report)}\n", encoding="utf-8")
    path.write_text(tsv(report, step), encoding="utf-8")
    return path


def read(folder: Path, split: str) -> tuple[list[PairTranslations], int]:
    """Return what `write` wrote: the translations of the pairs in SPLIT.tsv, and the step.

    Raises:
        InputError: the files do not exist.
    """
    path = folder / f"{split}.tsv"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if row["kind"] == "pair"]
        texts = []
        for row in rows:
            paths = [_path(folder, split, row["name"], kind) for kind in _FILE_KINDS]
            sentences = [each.read_text(encoding="utf-8").split("\n")[:-1] for each in paths]
            texts.append(PairTranslations(row["name"], int(row["training"]), *sentences))
        return texts, int(rows[0]["step"])
    except OSError as error:
        raise errors.InputError(
            f"{error.filename or path} cannot be read: {error.strerror}. Make it with --mode=score "
            f"--logdir={folder.parent}"
        ) from error


def _path(folder: Path, split: str, pair: str, kind: str) -> Path:
    return folder / split / f"{pair.replace(':', '.')}.{kind}"
