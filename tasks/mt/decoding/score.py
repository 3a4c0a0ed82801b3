"""`--mode=score`: translates a part of the data from a checkpoint, and scores it.

Prints a table of scores and writes the translations, the scores as a TSV, a bar plot and
TensorBoard's files to LOGDIR/score/. Each score is shown with that of the copied source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from lingvo_gpipe import errors, registry, task
from lingvo_gpipe.console.progress import Count
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.run import log_directory, restoring, summaries
from lingvo_gpipe.tasks.mt.decoding import translator
from lingvo_gpipe.tasks.mt.decoding.scoring import score_files, score_plot, scores
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.input import Translation
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_Item = TypeVar("_Item")
FOLDER = "score"
_MAX_SHOWN = 20  # with more languages, only the files list them


@dataclasses.dataclass(frozen=True, slots=True)
class PairSentences:
    """Sentences of a pair of languages that are to be translated.

    Attributes:
        pair: such as `de:en`.
        examples: number of the pair's examples in the training data.
        ids: ids of each source, ending in </s>.
        sources: their text.
        references: text of the targets.
    """

    pair: str
    examples: int
    ids: Sequence[list[int]]
    sources: Sequence[str]
    references: Sequence[str]


def sentences_to_translate(
    source: Translation,
    split: str,
    most: int | None = None,
    *,
    in_all: int | None = None,
    longest: int | None = None,
) -> list[PairSentences]:
    """Return the sentences of a split that are translated, pair by pair.

    Args:
        source: the input.
        split: its name; not the training split, whose text is not kept.
        most: maximum number of sentences of a pair, evenly spaced; None: all.
        in_all: maximum number of sentences of all pairs. They have equally many each, or some
            pairs, evenly spaced, have one; None: no maximum.
        longest: only those with at most this number of source tokens, with </s>; None: all.

    Raises:
        InputError: there is no such split, or it has no sentence of the input's pairs.
        ParamsError: it is the training split.
    """
    records = source.records
    trained = source.params.train_split
    if split == trained:
        others = [name for name in records.spans if name != trained]
        raise errors.ParamsError(
            f"split {split!r} is trained on, and its text is not stored. Score another split by "
            f"--params_override=score.split=NAME: {', '.join(others) or 'there is none'}"
        )
    records_split = records.split(split)
    examples = {span.pair: span.count for span in records.split(trained).spans}
    found = []
    for span in records_split.spans:
        if span.pair not in source.pairs:
            continue
        allowed = np.arange(span.count)
        if longest is not None:
            allowed = allowed[records_split.lengths[span.first :][: span.count, 0] < longest]
        if len(allowed):
            found.append((span, allowed))
    if in_all is not None:
        found = _spaced(found, in_all)
        most = min(most or in_all, max(1, in_all // max(1, len(found))))
    chosen: list[PairSentences] = []
    for span, allowed in found:
        places = _spaced(allowed.tolist(), most)
        lines = records.text(split, span.pair)
        sources = [lines[place][0] for place in places]
        references = [lines[place][1] for place in places]
        ids = [[*records_split.example(span.first + place)[0].tolist(), END] for place in places]
        chosen.append(
            PairSentences(span.pair, examples.get(span.pair, 0), ids, sources, references)
        )
    if not chosen:
        raise errors.InputError(
            f"{records.folder}: split {split!r} has no sentence of {', '.join(source.pairs)}. "
            "Use another score.split"
        )
    return chosen


def _spaced(items: list[_Item], most: int | None) -> list[_Item]:
    """Return at most `most` of the items, evenly spaced; None: all."""
    count = len(items) if most is None else min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def run(job: registry.Job) -> None:
    """Run `--mode=score`.

    Raises:
        UserError: sacreBLEU is not installed, or there is no checkpoint or nothing to score.
    """
    scores.sacrebleu()  # a missing package is reported before the translation
    if job.logdir is None and job.checkpoint is None:
        raise errors.ParamsError(
            "--mode=score needs --logdir=FOLDER, of the run whose newest checkpoint is scored, or "
            "--checkpoint"
        )
    params = cast("TranslationTask.Params", job.task)
    scores.check(params.score)
    for line in synthetic.notices(params):
        job.report(line)
    source = params.input.instantiate()
    params = task.complete(params, source)
    split = params.score.split or params.eval.split
    chosen = sentences_to_translate(source, split, params.score.max_sentences)
    num_sentences = sum(len(part.ids) for part in chosen)
    try:
        with Count("translating", "sentence", num_sentences) as bar:  # reading weights takes time
            decoder = translator.Decoder(params, logdir=job.logdir, checkpoint=job.checkpoint)
            source.records.check_vocabulary(decoder.vocabulary.hash)
            for folder in restoring.folders(job.logdir, job.checkpoint):
                log_directory.check_assets(folder, source.assets())
            both = decoder.translate, decoder.vocabulary
            texts = list(translations(*both, chosen, job.should_stop, bar.update))
    except translator.StoppedError:
        job.report("stopped: nothing is scored")
        return
    count = sum(len(text.references) for text in texts)
    with Count("scoring", "sentence", count) as bar:
        report = scores.score(texts, params.score, bar.update)
    for line in (*summary(report, decoder.step, split), *translator.notes(decoder.cut)):
        job.report(line)
    if job.logdir is None:
        return
    path = score_files.write(job.logdir / FOLDER, split, texts, report, decoder.step)
    job.report(f"wrote {path}, translations in {path.with_suffix('')}")
    _show(summaries.Writer(job.logdir / FOLDER), report, decoder.step, split)


def summary(report: scores.ScoreReport, step: int, split: str) -> Iterator[str]:
    """Yield the printed lines: the scores of all pairs on one line, then the table."""
    overall = report.row(scores.ALL).scores
    values = " ".join(f"{metric}={overall[metric].value:.2f}" for metric in scores.METRICS)
    yield f"score step={step} split={split} {values}"
    yield from score_files.table(report, len(report.languages) <= _MAX_SHOWN).splitlines()


def translations(
    translate: Callable[[Sequence[Sequence[int]], Callable[[int], None]], list[list[int]]],
    vocabulary: Vocabulary,
    chosen: Sequence[PairSentences],
    should_stop: Callable[[], bool],
    count: Callable[[int], object] = lambda _: None,
) -> Iterator[scores.PairTranslations]:
    """Translate all pairs together, so that groups have sentences of similar length.

    Args:
        translate: see `translator.Translator.translate`.
        vocabulary: of the ids.
        chosen: the sentences.
        should_stop: called after every token.
        count: called after every token with the number of sentences that it finished.

    Raises:
        StoppedError: `should_stop` returned True.
    """
    ids = [sentence for part in chosen for sentence in part.ids]

    def progress(finished: int) -> None:
        count(finished)
        if should_stop():
            raise translator.StoppedError

    texts = vocabulary.decode(translate(ids, progress))
    # A file holds one line for each sentence, but byte pieces may form line separators.
    lines = iter([" ".join(text.splitlines()) for text in texts])
    for part in chosen:
        hypotheses = [next(lines) for _ in part.ids]
        yield scores.PairTranslations(
            part.pair, part.examples, hypotheses, part.references, part.sources
        )


def _show(writer: summaries.Writer, report: scores.ScoreReport, step: int, split: str) -> None:
    """Write scores for TensorBoard."""
    writer.scalars(
        step,
        {
            f"{split}/{metric}/{row.name}": row.scores[metric].value
            for metric in scores.METRICS
            for row in (*report.groups, *report.languages)
        },
    )
    writer.text(step, f"{split}/scores", score_files.table(report))
    writer.png(step, f"{split}/bars", score_plot.draw(report))
    writer.close()
