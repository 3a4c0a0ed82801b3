r"""Compares the scores of several systems: a markdown table and a bar plot.

    python -m benchmarks.translation.compare --metric=BLEU --against=bilingual \
        --picture=benchmarks/translation/multi30k.png "untrained=runs/untrained" \
        "bilingual=runs/de,runs/fr,runs/cs" "multilingual=runs/multilingual"

Each system is NAME=LOGDIR of a run that `--mode=score` has scored, or several, separated by commas,
whose pairs of languages are combined. All must have translated the same sentences: then they have
the same resamples, and the intervals of differences are those of a paired bootstrap.

`--metric=loss` reads the loss per token instead, from each run's newest evaluation, which must be
of the scored checkpoint and covers all sentences of the run's `eval.split`.
`--evaluations=eval_test` reads the evaluations of `--mode=eval --params_override=eval.split=test`.
Intervals of the loss resample the languages of a group; those of BLEU and chrF resample the
sentences of each language.
"""

from __future__ import annotations

import argparse
import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.support import markdown, scalars
from lingvo_gpipe import errors
from lingvo_gpipe.run import tensorboard
from lingvo_gpipe.tasks.mt.decoding import scores

LOSS = "loss"
_BY_LANGUAGE = "language_log_perplexity/"
_WHOLE = "log_perplexity"


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A system's scores.

    Attributes:
        name: in tables and plots.
        report: its scores, with the groups of languages.
        values: row → score by the chosen metric.
        copied: row → score of the copied source; empty for the loss.
        references: pair of languages → reference translations.
    """

    name: str
    report: scores.ScoreReport
    values: Mapping[str, scores.Score]
    copied: Mapping[str, scores.Score]
    references: Mapping[str, Sequence[str]]


def read(name: str, logdirs: Sequence[Path], split: str, metric: str, evaluations: str) -> System:
    """Read the files of `--mode=score` and of evaluations in log directories.

    Raises:
        InputError: there are none, or they are of different checkpoints.
    """
    texts: list[scores.PairTranslations] = []
    losses: dict[str, float] = {}
    for logdir in logdirs:
        of_run, step = scores.read(logdir / "score", split)
        texts += of_run
        if metric == LOSS:
            losses |= _losses(logdir / evaluations, [text.pair for text in of_run], step)
    report = scores.score(texts)
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
    tags = scalars.read(folder)
    losses = {}
    for pair in pairs:
        points = tags.get(_BY_LANGUAGE + pair, tags.get(_WHOLE) if len(pairs) == 1 else None)
        if not points or points[-1].step != step:
            raise errors.InputError(
                f"{folder} has no evaluation of {pair} at step {step}. Make it by --mode=eval "
                f"--logdir={folder.parent}"
            )
        losses[pair] = points[-1].value
    return losses


def _group_losses(
    report: scores.ScoreReport, losses: Mapping[str, float]
) -> Iterator[tuple[str, scores.Score]]:
    """Yield row → loss; a group's resamples draw its languages, the same for every system."""
    for group in report.groups:
        members = [r for r in report.languages if group.name in (r.group, scores.ALL)]
        names = sorted(row.name for row in members)
        values = np.array([losses[name] for name in names])
        random = np.random.default_rng(zlib.crc32(group.name.encode()))
        places = random.integers(len(values), size=(scores.RESAMPLES, len(values)))
        yield group.name, scores.Score(float(values.mean()), values[places].mean(1))
    for row in report.languages:
        yield row.name, scores.Score(losses[row.name], np.full(scores.RESAMPLES, losses[row.name]))


def check(systems: Sequence[System]) -> None:
    """Refuse systems that did not translate the same sentences, in the same groups.

    Raises:
        InputError: names the two.
    """
    first = systems[0]
    for other in systems[1:]:
        if other.references != first.references:
            raise errors.InputError(
                f"{first.name!r} and {other.name!r} did not translate the same sentences. Score "
                "both with the same score.split and score.max_sentences"
            )
        groups = [
            {row.name: row.group for row in system.report.languages} for system in (first, other)
        ]
        if groups[0] != groups[1]:
            raise errors.InputError(
                f"{first.name!r} and {other.name!r} differ in the languages of a resource "
                "group. Compare systems that were scored with the same training data"
            )


def table(systems: Sequence[System], rows: Sequence[str], against: str | None) -> list[list[str]]:
    """Return the rows of a markdown table, the head first.

    Args:
        systems: one column for each.
        rows: names of pairs and groups.
        against: name of the system to which the others are compared; None: no comparison.
    """
    base = next((system for system in systems if system.name == against), None)
    others = [system for system in systems if base is not None and system is not base]
    copied = bool(systems[0].copied)
    # The loss covers all sentences, translated or not; it has no copied source.
    head = ["", "training", *(["sentences", "copied source"] if copied else [])]
    head += [system.name for system in systems]
    head += [f"{system.name} − {against}" for system in others]
    lines = [head]
    for name in rows:
        row = systems[0].report.row(name)
        cells = [name, f"{row.examples:,}"]
        if copied:
            cells += [f"{row.sentences:,}", f"{systems[0].copied[name].value:.2f}"]
        cells += [cell(system.values[name]) for system in systems]
        if base is not None:
            cells += [cell(system.values[name] - base.values[name], "+") for system in others]
        lines.append(cells)
    return lines


def cell(score: scores.Score, sign: str = "") -> str:
    """Return a score and its interval, as a table shows them."""
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


def compare(arguments: argparse.Namespace) -> None:
    """Print the table and draw the plot that the arguments ask for.

    Raises:
        InputError: scores are missing, or cannot be compared.
    """
    systems = []
    for text in arguments.systems:
        name, _, logdirs = text.rpartition("=")
        folders = [Path(logdir) for logdir in logdirs.split(",")]
        systems.append(
            read(name, folders, arguments.split, arguments.metric, arguments.evaluations)
        )
    check(systems)
    known = [system.name for system in systems]
    if arguments.against is not None and arguments.against not in known:
        raise errors.InputError(f"--against={arguments.against}: there are {', '.join(known)}")
    report = systems[0].report
    groups = [row.name for row in report.groups]
    pairs = [row.name for row in report.languages]
    rows = {"groups": groups, "pairs": [*pairs, scores.ALL], "both": [*groups, *pairs]}[
        arguments.rows
    ]
    print(markdown.table(table(systems, rows, arguments.against)))
    if arguments.metric != LOSS:
        print(f"\n{arguments.metric}|{report.row(scores.ALL).signatures[arguments.metric]}")
    if arguments.picture is not None:
        draw(systems, rows, arguments.metric, arguments.picture)


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="+", metavar="NAME=LOGDIR[,LOGDIR]")
    parser.add_argument("--split", default="test", help="part of the data that was scored")
    parser.add_argument("--metric", default="BLEU", choices=[*scores.METRICS, LOSS])
    parser.add_argument(
        "--evaluations", default=tensorboard.EVALUATIONS, help="folder of the losses in each LOGDIR"
    )
    parser.add_argument("--rows", default="pairs", choices=["pairs", "groups", "both"])
    parser.add_argument("--against", help="system to which the others are compared")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    try:
        compare(parser.parse_args())
    except errors.UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
