"""BLEU and chrF of translations, per language and resource group, with intervals.

The counts of every sentence and the scores of added-up counts are sacreBLEU's own, by the two
functions that its own significance tests use. A bootstrap resample is then a weighted sum of
sentence counts, so that thousands take seconds. Which sentences a resample has depends on the seed,
the pair of languages and the number of sentences alone: two systems that translated the same
sentences are resampled alike, and their difference is a paired bootstrap's.

Needs no TensorFlow.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import units

Array = np.ndarray[Any, Any]

METRICS = ("BLEU", "chrF")
GROUPS = ("high", "mid", "low")
ALL = "all"
_PERCENTILES = (2.5, 97.5)
_BLOCK = 4_000_000  # weights of resamples that are held at once
# sacreBLEU's usual tokeniser cuts at spaces, which these targets do not write; its own for
# Japanese needs one more package.
_TOKENIZERS = {"zh": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
_SIDES = ("hypothesis", "reference", "source")


class Scoring(hyperparams.Params):
    """What is translated and how it is scored."""

    split: str | None = hyperparams.field(
        None, "Part of the data that is translated and scored; None: eval.split."
    )
    max_sentences: int | None = hyperparams.field(
        None, "Sentences of a pair of languages at most, spread evenly over the part; None: all."
    )
    thresholds: tuple[int, int] | None = hyperparams.field(
        None,
        "Pairs with fewer training examples than the first are low-resource, with more than the "
        "second high-resource; None: thirds of the pairs, those with equally many together.",
    )
    resamples: int = hyperparams.field(1_000, "Bootstrap resamples that intervals come from.")
    seed: int = hyperparams.field(0, "Of the resamples.")


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """What was translated of a pair of languages.

    Attributes:
        pair: such as `de:en`.
        examples: of the pair in the training data.
        hypotheses: translations, a line each.
        references: as they should be.
        sources: what was translated.
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
        value: of all sentences.
        samples: [resamples] of each bootstrap resample.
    """

    value: float
    samples: Array = dataclasses.field(repr=False, compare=False)

    @property
    def interval(self) -> tuple[float, float]:
        """Between which 95 % of the resamples lie."""
        low, high = np.percentile(self.samples, _PERCENTILES)
        return float(low), float(high)

    def __sub__(self, other: Score) -> Score:
        """Return the difference; its interval is paired where both scored the same sentences."""
        return Score(self.value - other.value, self.samples - other.samples)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Scores of a pair of languages, or the means over the pairs of a group.

    Attributes:
        name: such as `de:en`, or the group's.
        group: that it belongs to; `all`: to no smaller one.
        examples: in the training data.
        sentences: that were scored.
        scores: metric → score.
        copied: metric → score of the sources, copied as they are.
        signatures: metric → how sacreBLEU computed it.
    """

    name: str
    group: str
    examples: int
    sentences: int
    scores: Mapping[str, Score]
    copied: Mapping[str, Score]
    signatures: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All scores of a system.

    Attributes:
        languages: a row per pair of languages, most training examples first.
        groups: means over the pairs of `high`, `mid`, `low` (those that have any) and `all`.
    """

    languages: tuple[Row, ...]
    groups: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """Return the row of a pair or group."""
        return next(row for row in (*self.groups, *self.languages) if row.name == name)


def sacrebleu() -> Any:
    """Return sacreBLEU's metrics.

    Raises:
        InputError: it is not installed.
    """
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise errors.InputError(
            "sacreBLEU is not installed, which gives the scores. Install it: "
            "pip install 'lingvo-gpipe[mt]'"
        ) from error
    return metrics


def resource_groups(
    examples: Mapping[str, int], thresholds: tuple[int, int] | None = None
) -> dict[str, str]:
    """Return name → `high`, `mid` or `low`; → `all` where nothing tells them apart.

    Args:
        examples: name → training examples.
        thresholds: fewer than the first are low, more than the second high; None: thirds of the
            names. Names with equally many are in one group, by the share of the others that have
            more; where all have equally many, there are no thirds.

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
            f"score.thresholds={thresholds} fall. Give the lower one first, such as ({most}, "
            f"{least})"
        )
    return {
        name: "low" if examples[name] < least else "high" if examples[name] > most else "mid"
        for name in names
    }


def _thirds(names: Sequence[str], examples: Mapping[str, int]) -> dict[str, str]:
    """Return name → group; `names` have most examples first."""
    groups: dict[str, str] = {}
    for _, tied in itertools.groupby(names, key=lambda name: examples[name]):
        own, ahead, count = list(tied), len(groups), len(names)
        others = count - len(own)
        # The place of a name alone is `ahead`; of equal ones, where the others ahead would put it.
        group = GROUPS[3 * ahead * (count - 1) // (others * count)] if others else ALL
        groups |= dict.fromkeys(own, group)
    return groups


def check(params: Scoring) -> None:
    """Refuse what cannot be done.

    Raises:
        ParamsError: a number is out of range.
    """
    for name, least in (("resamples", 1), ("max_sentences", 1), ("seed", 0)):
        value = params.get(name)
        if value is not None and value < least:
            raise errors.ParamsError(f"score.{name}={value} is too small. Use {least} or more")
    resource_groups({}, params.thresholds)


def score(
    texts: Sequence[Text], params: Scoring, progress: Callable[[int], Any] | None = None
) -> Report:
    """Score translations.

    A group's score is the mean over its pairs of languages, whatever their numbers of sentences;
    its resamples are of the sentences within each pair, for the languages as they are.

    Args:
        texts: of each pair of languages.
        params: how.
        progress: told of each pair how many sentences were scored.

    Raises:
        InputError: there is nothing to score, or sacreBLEU is not installed.
    """
    metrics = sacrebleu()
    check(params)
    by_name = {text.pair: text for text in texts if text.references}
    if not by_name:
        raise errors.InputError("there is no sentence to score. Give another score.split")
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
    return Report(tuple(rows), tuple(groups))


def _row(text: Text, group: str, params: Scoring, metrics: Any) -> Row:
    count = len(text.references)
    tokenize = _TOKENIZERS.get(text.pair.partition(":")[2].partition("-")[0], "13a")
    references = [list(text.references)]
    made = {
        # `force` silences a warning about text that looks tokenised.
        "BLEU": metrics.BLEU(tokenize=tokenize, force=True, references=references),
        "chrF": metrics.CHRF(references=references),
    }
    systems = (text.hypotheses, text.sources)
    counts = [
        np.asarray(metric._extract_corpus_statistics(list(system), None), np.float64)
        for metric in made.values()
        for system in systems
    ]
    random = np.random.default_rng([params.seed, zlib.crc32(text.pair.encode())])
    joined = np.concatenate(counts, axis=1)
    sums = np.concatenate(
        [weights @ joined for weights in _resamples(random, count, params.resamples)]
    )
    ends = np.cumsum([part.shape[1] for part in counts])
    found = iter(zip(counts, np.split(sums, ends[:-1], axis=1), strict=True))
    scores: dict[str, Score] = {}
    copied: dict[str, Score] = {}
    for name, metric in made.items():
        for into in (scores, copied):
            part, sampled = next(found)
            samples = np.array([_value(metric, row) for row in sampled])
            into[name] = Score(_value(metric, part.sum(0)), samples)
    signatures = {name: str(metric.get_signature()) for name, metric in made.items()}
    return Row(text.pair, group, text.examples, count, scores, copied, signatures)


def _resamples(random: np.random.Generator, count: int, resamples: int) -> Iterator[Array]:
    """Yield blocks [r, count] of how often each sentence is in a resample, `resamples` in all."""
    step = max(1, _BLOCK // count)
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        yield random.multinomial(count, np.full(count, 1.0 / count), rows).astype(np.float64)


def _value(metric: Any, counts: Array) -> float:
    return float(metric._compute_score_from_stats(counts.astype(np.int64).tolist()).score)


def _mean(name: str, rows: Sequence[Row]) -> Row:
    """Return the means over pairs of languages."""

    def means(kind: str) -> dict[str, Score]:
        return {
            metric: Score(
                float(np.mean([getattr(row, kind)[metric].value for row in rows])),
                np.mean([getattr(row, kind)[metric].samples for row in rows], axis=0),
            )
            for metric in METRICS
        }

    return Row(
        name,
        name,
        sum(row.examples for row in rows),
        sum(row.sentences for row in rows),
        means("scores"),
        means("copied"),
        {metric: " ".join(sorted({row.signatures[metric] for row in rows})) for metric in METRICS},
    )


def table(report: Report, languages: bool = True) -> str:
    """Return scores as aligned text: groups, then languages, then the signatures.

    Args:
        report: what is told.
        languages: with a line for each pair of languages.
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


def _cells(row: Row, name: str) -> list[str]:
    cells = [name, f"{row.examples:,}", f"{row.sentences:,}"]
    for metric in METRICS:
        low, high = row.scores[metric].interval
        cells.append(f"{row.scores[metric].value:.2f}")
        cells.append(f"{low:.2f}-{high:.2f}")
        cells.append(f"{row.copied[metric].value:.2f}")
    return cells


def tsv(report: Report, step: int) -> str:
    """Return scores as tab-separated values, a line per group and pair of languages.

    Columns: name, kind (`group` or `pair`), group, step, training, sentences; then for each of
    BLEU and chrF the score, _low and _high (95 %), _source (of the copied source), _signature.

    Args:
        report: what is written.
        step: updates of the checkpoint.
    """
    buffer = io.StringIO()
    names = ["name", "kind", "group", "step", "training", "sentences"]
    for metric in METRICS:
        names += [metric, *(f"{metric}_{part}" for part in ("low", "high", "source", "signature"))]
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(names)
    for kind, rows in (("group", report.groups), ("pair", report.languages)):
        for row in rows:
            cells: list[Any] = [row.name, kind, row.group, step, row.examples, row.sentences]
            for metric in METRICS:
                found = (row.scores[metric].value, *row.scores[metric].interval)
                cells += [f"{value:.4f}" for value in (*found, row.copied[metric].value)]
                cells.append(row.signatures[metric])
            writer.writerow(cells)
    return buffer.getvalue()


def write(folder: Path, split: str, texts: Sequence[Text], report: Report, step: int) -> Path:
    """Write the lines and the scores of a split; return the path of the scores.

    SPLIT/SOURCE.TARGET.{hypothesis,reference,source} hold a line per sentence, SPLIT.tsv what
    `tsv` gives, SPLIT.txt what `table` gives, SPLIT.png what `draw` gives.

    Raises:
        InputError: the folder cannot be written.
    """
    path = folder / f"{split}.tsv"
    try:
        (folder / split).mkdir(parents=True, exist_ok=True)
        # It vouches for the lines, so it goes before they change and comes after them.
        path.unlink(missing_ok=True)
        for text in texts:
            sides = (text.hypotheses, text.references, text.sources)
            for side, lines in zip(_SIDES, sides, strict=True):
                whole = "".join(f"{line}\n" for line in lines)
                _path(folder, split, text.pair, side).write_text(whole, encoding="utf-8")
        (folder / f"{split}.txt").write_text(f"step {step}\n{table(report)}\n", encoding="utf-8")
        (folder / f"{split}.png").write_bytes(draw(report))
        path.write_text(tsv(report, step), encoding="utf-8")
    except OSError as error:
        raise errors.InputError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Make room, or give "
            "another --logdir"
        ) from error
    return path


def read(folder: Path, split: str) -> tuple[list[Text], int]:
    """Return what `write` wrote: the texts of the pairs that SPLIT.tsv has, and the step.

    Raises:
        InputError: it is not there, or is torn.
    """
    path = folder / f"{split}.tsv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if row["kind"] == "pair"]
        told = [(row["name"], int(row["training"]), int(row["sentences"])) for row in rows]
        texts = []
        for pair, examples, sentences in told:
            paths = [_path(folder, split, pair, side) for side in _SIDES]
            sides = [each.read_text(encoding="utf-8").split("\n")[:-1] for each in paths]
            if {len(side) for side in sides} != {sentences}:
                raise ValueError(f"files of {pair} have other numbers of lines than told")
            texts.append(Text(pair, examples, *sides))
        return texts, int(rows[0]["step"])
    except OSError as error:
        raise errors.InputError(
            f"{error.filename or path} cannot be read: {error.strerror}. Make it with --mode=score "
            f"--logdir={folder.parent}"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise errors.InputError(f"{path} is torn: {error}. Score again") from error


def _path(folder: Path, split: str, pair: str, side: str) -> Path:
    return folder / split / f"{pair.replace(':', '.')}.{side}"


def draw(report: Report) -> bytes:
    """Return a bar plot, PNG: groups with their intervals on the left, languages on the right.

    Languages stand in the order of their training examples; up to 40 have their names. A line
    across a bar is the score of the copied source.
    """
    from matplotlib import figure

    named = len(report.languages) <= 40
    width = min(16.0, 5.0 + max(3.0, 0.3 * len(report.languages)))
    picture = figure.Figure(figsize=(width, 6.4), dpi=100, layout="constrained")
    plots = picture.subplots(
        len(METRICS), 2, squeeze=False, sharey="row", width_ratios=[4.0, width - 4.0]
    )
    for (left, right), metric in zip(plots, METRICS, strict=True):
        for plot, rows in ((left, report.groups), (right, report.languages)):
            _bars(plot, rows, metric, intervals=named or plot is left)
            plot.set_xticks(range(len(rows)), [row.name for row in rows])
        left.set_ylim(bottom=0.0)
        left.set_ylabel(metric)
        left.set_title("means over languages", loc="left", fontsize=10)
        left.legend(fontsize=8, frameon=False)
        right.set_title("languages, most training examples first", loc="left", fontsize=10)
        if named:
            right.tick_params(axis="x", labelrotation=90, labelsize=8)
        else:
            right.set_xticks([])
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


_COLORS = {"high": "#1f5a96", "mid": "#4c9ac9", "low": "#a3cfe6", ALL: "#666666"}


def _bars(plot: Any, rows: Sequence[Row], metric: str, intervals: bool) -> None:
    places = np.arange(len(rows))
    values = np.array([row.scores[metric].value for row in rows])
    plot.bar(places, values, color=[_COLORS[row.group] for row in rows], width=0.8)
    copied = [row.copied[metric].value for row in rows]
    plot.hlines(copied, places - 0.4, places + 0.4, color="#c03020", label="copied source")
    if intervals:
        ends = np.array([row.scores[metric].interval for row in rows]).T
        # A resample's scores may all lie on one side of the score itself.
        reach = np.maximum([values - ends[0], ends[1] - values], 0.0)
        plot.errorbar(places, values, reach, fmt="none", ecolor="#222222", capsize=2, linewidth=1)
    plot.spines[["top", "right"]].set_visible(False)
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)
