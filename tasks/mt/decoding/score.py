"""`--mode=score`: translates a part of the data from a checkpoint, and scores it.

Prints the table of `scores`, and leaves in LOGDIR/score/ the translations, the scores as a TSV, a
bar plot, and TensorBoard's files. Beside each score stands that of the copied source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lingvo_gpipe import errors, registry, task
from lingvo_gpipe.console.progress import Count
from lingvo_gpipe.run import log_directory, restoring, summaries
from lingvo_gpipe.tasks.mt.decoding import scores, translator
from lingvo_gpipe.tasks.mt.text import vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

FOLDER = "score"
_SHOWN = 20  # languages that are printed; the rest is in the files


class _StoppedError(Exception):
    """The user asked to stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The sentences of a pair of languages that are translated.

    Attributes:
        pair: such as `de:en`.
        examples: of the pair in the training data.
        ids: of each source, ending in </s>.
        sources: their text.
        references: text of the targets.
    """

    pair: str
    examples: int
    ids: Sequence[list[int]]
    sources: Sequence[str]
    references: Sequence[str]


def parts(source: Any, split: str, most: int | None = None) -> list[Part]:
    """Return what is translated of a split, pair by pair.

    Args:
        source: an `input.Translation`.
        split: its name; not the one that is trained on, whose text is not kept.
        most: sentences of a pair at most, spread evenly over it; None: all.

    Raises:
        InputError: there is no such split, or it has no sentence of the input's pairs.
        ParamsError: it is the one that is trained on.
    """
    records = source.records
    trained = source.params.train_split
    if split == trained:
        others = [name for name in records.splits if name != trained]
        raise errors.ParamsError(
            f"split {split!r} is trained on, and its text is not kept. Score another by "
            f"--params_override=score.split=NAME: {', '.join(others) or 'there is none'}"
        )
    found = records.split(split)
    examples = {span.pair: span.count for span in records.split(trained).spans}
    chosen = []
    for span in found.spans:
        if span.pair not in source.pairs or not span.count:
            continue
        count = span.count if most is None else min(most, span.count)
        places = (np.arange(count) * span.count // count).tolist()
        texts = records.text(split, span.pair)
        sources, references = ([side[place] for place in places] for side in texts)
        ids = [[*found.example(span.first + place)[0].tolist(), vocabulary.END] for place in places]
        chosen.append(Part(span.pair, examples.get(span.pair, 0), ids, sources, references))
    if not chosen:
        raise errors.InputError(
            f"{records.folder}: split {split!r} has no sentence of {', '.join(source.pairs)}. "
            "Give another score.split"
        )
    return chosen


def run(job: registry.Job) -> None:
    """Do what `--mode=score` asks.

    Raises:
        UserError: sacreBLEU is not installed, or there is no checkpoint or nothing to score.
    """
    scores.sacrebleu()  # before what takes long
    if job.logdir is None and job.checkpoint is None:
        raise errors.ParamsError(
            "--mode=score needs --logdir=FOLDER, of the run whose newest checkpoint is scored, or "
            "--checkpoint"
        )
    params = cast("TranslationTask.Params", job.task)
    scores.check(params.score)
    source = params.input.instantiate()
    params = task.complete(params, source)
    split = params.score.split or params.eval.split
    chosen = parts(source, split, params.score.max_sentences)
    decoder = translator.Decoder(params, logdir=job.logdir, checkpoint=job.checkpoint)
    source.records.check_vocabulary(decoder.vocabulary.hash)
    for folder in restoring.folders(job.logdir, job.checkpoint):
        log_directory.check_assets(folder, source.assets())
    try:
        texts = list(_translated(decoder, chosen, job.should_stop))
    except _StoppedError:
        job.report("stopped: nothing is scored")
        return
    count = sum(len(text.references) for text in texts)
    with Count("scoring", "sentence", count) as bar:
        report = scores.score(texts, params.score, bar.update)
    for line in (*told(report, decoder.step, split), *translator.notes(decoder.cut)):
        job.report(line)
    if job.logdir is None:
        return
    path = scores.write(job.logdir / FOLDER, split, texts, report, decoder.step)
    job.report(f"wrote {path}, translations in {path.with_suffix('')}")
    _show(summaries.Writer(job.logdir / FOLDER), report, decoder.step, split)


def told(report: scores.Report, step: int, split: str) -> Iterator[str]:
    """Yield the lines that are printed: all scores on one line, then the table."""
    whole = report.row(scores.ALL).scores
    values = " ".join(f"{metric}={whole[metric].value:.2f}" for metric in scores.METRICS)
    yield f"score step={step} split={split} {values}"
    yield from scores.table(report, len(report.languages) <= _SHOWN).splitlines()


def _translated(
    decoder: Any, chosen: Sequence[Part], should_stop: Callable[[], bool]
) -> Iterator[scores.Text]:
    """Translate everything at once, so that few sentences wait for longer ones."""
    ids = [sentence for part in chosen for sentence in part.ids]
    with Count("translating", "sentence", len(ids)) as bar:

        def progress(count: int) -> None:
            bar.update(count)
            if should_stop():
                raise _StoppedError

        found = decoder.vocabulary.decode(decoder.translate(ids, progress))
    # A file holds a line per sentence, but bytes can spell any separator.
    lines = iter([" ".join(text.splitlines()) for text in found])
    for part in chosen:
        hypotheses = [next(lines) for _ in part.ids]
        yield scores.Text(part.pair, part.examples, hypotheses, part.references, part.sources)


def _show(writer: summaries.Writer, report: scores.Report, step: int, split: str) -> None:
    """Put scores on TensorBoard."""
    writer.scalars(
        step,
        {
            f"{split}/{metric}/{row.name}": row.scores[metric].value
            for metric in scores.METRICS
            for row in (*report.groups, *report.languages)
        },
    )
    writer.text(step, f"{split}/scores", scores.table(report))
    writer.png(step, f"{split}/bars", scores.draw(report))
    writer.close()
