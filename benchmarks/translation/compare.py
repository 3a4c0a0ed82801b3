r"""Puts scores of several systems side by side: a markdown table and a bar plot.

    python -m benchmarks.translation.compare --metric=BLEU --against=bilingual \
        --picture=benchmarks/translation/multi30k.png "untrained=runs/untrained" \
        "bilingual=runs/de,runs/fr,runs/cs" "multilingual=runs/multilingual"

Each system is NAME=LOGDIR of a run that `--mode=score` has scored, or several between commas, whose
pairs of languages are put together. All must have translated the same sentences: then resamples are
the same, and the columns of differences are a paired bootstrap's.

`--metric=loss` reads the loss per token instead, from each run's newest evaluation, which must be
of the checkpoint that was scored, and is of all sentences of the run's `eval.split`;
`--evaluations=eval_test` reads those by `--mode=eval --params_override=eval.split=test`. Its
intervals are of the languages of a group, drawn anew; those of BLEU and chrF are of the sentences
of each language.
"""

from __future__ import annotations

import argparse
import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.translation import curves
from lingvo_gpipe import errors
from lingvo_gpipe.run import writers
from lingvo_gpipe.tasks.mt.decoding import scores

LOSS = "loss"
RESAMPLES = 1_000
_BY_LANGUAGE = "language_log_perplexity/"
_WHOLE = "log_perplexity"


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A system's scores.

    Attributes:
        name: as it is told.
        report: its scores, of which groups are known.
        values: row → score by the wanted metric.
        copied: row → score of the copied source; empty for the loss.
        references: pair of languages → what its sentences were scored against.
    """

    name: str
    report: scores.Report
    values: Mapping[str, scores.Score]
    copied: Mapping[str, scores.Score]
    references: Mapping[str, Sequence[str]]


def read(name: str, logdirs: Sequence[Path], split: str, metric: str, evaluations: str) -> System:
    """Read what `--mode=score` and evaluations left in log directories.

    Raises:
        InputError: it is not there, or of different checkpoints.
    """
    texts: list[scores.Text] = []
    losses: dict[str, float] = {}
    for logdir in logdirs:
        own, step = scores.read(logdir / "score", split)
        texts += own
        if metric == LOSS:
            losses |= _losses(logdir / evaluations, [text.pair for text in own], step)
    report = scores.score(texts, scores.Scoring(resamples=RESAMPLES))
    rows = (*report.groups, *report.languages)
    references = {text.pair: text.references for text in texts}
    if metric == LOSS:
        return System(name, report, dict(_group_losses(report, losses)), {}, references)
    return System(
        name,
        report,
        {row.name: row.scores[metric] for row in rows},
        {row.name: row.copied[metric] for row in rows},
        references,
    )


def _losses(folder: Path, pairs: Sequence[str], step: int) -> dict[str, float]:
    """Return pair → loss per token in the newest evaluation of a folder."""
    found = curves.read(folder)
    losses = {}
    for pair in pairs:
        points = found.get(_BY_LANGUAGE + pair, found.get(_WHOLE) if len(pairs) == 1 else None)
        if not points or points[-1].step != step:
            raise errors.InputError(
                f"{folder} has no evaluation of {pair} at step {step}. Make it by --mode=eval "
                f"--logdir={folder.parent}"
            )
        losses[pair] = points[-1].value
    return losses


def _group_losses(
    report: scores.Report, losses: Mapping[str, float]
) -> Iterator[tuple[str, scores.Score]]:
    """Yield row → loss; a group's resamples are of its languages, alike for every system."""
    for group in report.groups:
        members = [r for r in report.languages if group.name in (r.group, scores.ALL)]
        names = sorted(row.name for row in members)
        values = np.array([losses[name] for name in names])
        random = np.random.default_rng(zlib.crc32(group.name.encode()))
        places = random.integers(len(values), size=(RESAMPLES, len(values)))
        yield group.name, scores.Score(float(values.mean()), values[places].mean(1))
    for row in report.languages:
        yield row.name, scores.Score(losses[row.name], np.full(RESAMPLES, losses[row.name]))


def check(systems: Sequence[System]) -> None:
    """Refuse systems that have not translated the same sentences, of the same groups.

    Raises:
        InputError: names the two.
    """
    first = systems[0]
    for other in systems[1:]:
        if other.references != first.references:
            raise errors.InputError(
                f"{first.name!r} and {other.name!r} have not translated the same sentences. Score "
                "both with the same score.split and score.max_sentences"
            )
        groups = [
            {row.name: row.group for row in system.report.languages} for system in (first, other)
        ]
        if groups[0] != groups[1]:
            raise errors.InputError(
                f"{first.name!r} and {other.name!r} have not the same languages in each resource "
                "group. Compare systems that were scored with the same training data"
            )


def table(systems: Sequence[System], rows: Sequence[str], against: str | None) -> list[list[str]]:
    """Return the rows of a markdown table, the head first.

    Args:
        systems: side by side.
        rows: names of pairs and groups.
        against: name of the system from which the others' differences are told; None: none are.
    """
    base = next((system for system in systems if system.name == against), None)
    others = [system for system in systems if base is not None and system is not base]
    copied = bool(systems[0].copied)
    # The loss is of all sentences, whichever were translated; it has no copied source.
    head = ["", "training", *(["sentences", "copied source"] if copied else [])]
    head += [system.name for system in systems]
    head += [f"{system.name} − {against}" for system in others]
    lines = [head, ["---"] * len(head)]
    for name in rows:
        row = systems[0].report.row(name)
        cells = [name, f"{row.examples:,}"]
        if copied:
            cells += [f"{row.sentences:,}", f"{systems[0].copied[name].value:.2f}"]
        cells += [_told(system.values[name]) for system in systems]
        if base is not None:
            cells += [_told(system.values[name] - base.values[name], "+") for system in others]
        lines.append(cells)
    return lines


def _told(score: scores.Score, sign: str = "") -> str:
    low, high = score.interval
    if low == high:
        return f"{score.value:{sign}.2f}"
    return f"{score.value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def draw(systems: Sequence[System], rows: Sequence[str], metric: str, path: Path) -> None:
    """Draw a bar for each row and system into a PNG, with intervals and the copied source."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(max(6.0, 1.4 * len(rows)), 4), dpi=110, layout="constrained")
    plot = picture.add_subplot()
    width = 0.8 / len(systems)
    places = np.arange(len(rows))
    for number, system in enumerate(systems):
        left = places - 0.4 + (number + 0.5) * width
        values = np.array([system.values[name].value for name in rows])
        ends = np.array([system.values[name].interval for name in rows]).T
        reach = np.maximum([values - ends[0], ends[1] - values], 0.0)
        plot.bar(left, values, width, yerr=reach, capsize=2, label=system.name)
    if systems[0].copied:
        copied = [systems[0].copied[name].value for name in rows]
        plot.hlines(copied, places - 0.4, places + 0.4, color="black", label="copied source")
    plot.set_xticks(places, rows)
    plot.set_ylabel(metric)
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)
    plot.legend(fontsize=8)
    picture.savefig(path, format="png", metadata={"Software": None})


def compare(given: Any) -> None:
    """Do what the arguments ask.

    Raises:
        InputError: scores are missing, or do not fit together.
    """
    systems = []
    for text in given.systems:
        name, _, logdirs = text.rpartition("=")
        folders = [Path(logdir) for logdir in logdirs.split(",")]
        systems.append(read(name, folders, given.split, given.metric, given.evaluations))
    check(systems)
    known = [system.name for system in systems]
    if given.against is not None and given.against not in known:
        raise errors.InputError(f"--against={given.against}: there are {', '.join(known)}")
    report = systems[0].report
    groups = [row.name for row in report.groups]
    pairs = [row.name for row in report.languages]
    rows = {"groups": groups, "pairs": [*pairs, scores.ALL], "both": [*groups, *pairs]}[given.rows]
    for line in table(systems, rows, given.against):
        print(f"| {' | '.join(line)} |")
    if given.metric != LOSS:
        print(f"\n{given.metric}|{report.row(scores.ALL).signatures[given.metric]}")
    if given.picture is not None:
        draw(systems, rows, given.metric, given.picture)


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="+", metavar="NAME=LOGDIR[,LOGDIR]")
    parser.add_argument("--split", default="test", help="part of the data that was scored")
    parser.add_argument("--metric", default="BLEU", choices=[*scores.METRICS, LOSS])
    parser.add_argument(
        "--evaluations", default=writers.EVALUATIONS, help="folder of the losses in each LOGDIR"
    )
    parser.add_argument("--rows", default="pairs", choices=["pairs", "groups", "both"])
    parser.add_argument("--against", help="system from which the others' differences are told")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    try:
        compare(parser.parse_args())
    except errors.UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
