"""Scores as a table, and the files of `--mode=score`: translations, scores, a plot."""

from __future__ import annotations

import collections
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.console import units
from lingvo_gpipe.tasks.mt.decoding.scoring import score_plot
from lingvo_gpipe.tasks.mt.decoding.scoring.scores import (
    ALL,
    METRICS,
    PairTranslations,
    ScoreReport,
    ScoreRow,
)

_MAX_TEXT_BYTES = 2**30
_FILE_KINDS = ("hypothesis", "reference", "source")


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
                score = row.scores[metric]
                values = (score.value, *score.interval, row.copied[metric].value)
                cells += [f"{value:.4f}" for value in values]
                cells.append(row.signatures[metric])
            writer.writerow(cells)
    return buffer.getvalue()


def write(
    folder: Path, split: str, texts: Sequence[PairTranslations], report: ScoreReport, step: int
) -> Path:
    """Write the sentences and the scores of a split; return the path of the scores.

    SPLIT/SOURCE.TARGET.{hypothesis,reference,source} hold a line for each sentence, SPLIT.tsv the
    result of `tsv`, SPLIT.txt that of `table`, SPLIT.png that of `score_plot.draw`.

    Raises:
        InputError: the folder cannot be written.
    """
    path = folder / f"{split}.tsv"
    try:
        (folder / split).mkdir(parents=True, exist_ok=True)
        # Its presence means that the sentences are complete: it is removed before they change.
        path.unlink(missing_ok=True)
        for text in texts:
            sentences = (text.hypotheses, text.references, text.sources)
            for kind, lines in zip(_FILE_KINDS, sentences, strict=True):
                content = "".join(f"{line}\n" for line in lines)
                _path(folder, split, text.pair, kind).write_text(content, encoding="utf-8")
        (folder / f"{split}.txt").write_text(f"step {step}\n{table(report)}\n", encoding="utf-8")
        (folder / f"{split}.png").write_bytes(score_plot.draw(report))
        path.write_text(tsv(report, step), encoding="utf-8")
    except OSError as error:
        raise errors.InputError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Free disk space, "
            "or use another --logdir"
        ) from error
    return path


def read(folder: Path, split: str) -> tuple[list[PairTranslations], int]:
    """Return what `write` wrote: the translations of the pairs in SPLIT.tsv, and the step.

    Raises:
        InputError: the files do not exist, or are damaged.
    """
    path = folder / f"{split}.tsv"
    try:
        table = io.StringIO(regular_files.read_text(path), newline="")
        rows = [row for row in csv.DictReader(table, delimiter="\t") if row["kind"] == "pair"]
        entries = [(row["name"], int(row["training"]), int(row["sentences"])) for row in rows]
        texts = []
        for pair, examples, count in entries:
            paths = [_path(folder, split, pair, kind) for kind in _FILE_KINDS]
            sentences = [_lines(each) for each in paths]
            if {len(lines) for lines in sentences} != {count}:
                raise ValueError(f"files of {pair} do not have {count} lines each")
            texts.append(PairTranslations(pair, examples, *sentences))
        return texts, int(rows[0]["step"])
    except OSError as error:
        raise errors.InputError(
            f"{error.filename or path} cannot be read: {error.strerror}. Make it with --mode=score "
            f"--logdir={folder.parent}"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise errors.InputError(f"{path} is damaged: {error}. Score again") from error


def _lines(path: Path) -> list[str]:
    return regular_files.read_text(path, _MAX_TEXT_BYTES).split("\n")[:-1]


def _path(folder: Path, split: str, pair: str, kind: str) -> Path:
    return folder / split / f"{pair.replace(':', '.')}.{kind}"
