"""`--mode=score`, and the sentences that evaluations translate and show.

The mode translates a split of the data from a checkpoint and scores it. It prints a table of scores
and writes the translations, the scores and TensorBoard's files to LOGDIR/score/. Each score is
shown with that of the copied source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from lingvo_gpipe import errors, pipelining, registry, task
from lingvo_gpipe.console.progress import Count
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.run import log_directory, tensorboard
from lingvo_gpipe.tasks.mt.decoding import scores, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.input import Translation
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_Item = TypeVar("_Item")
_Progress: TypeAlias = Callable[[int], object]
_Translate: TypeAlias = Callable[[Sequence[Sequence[int]], _Progress], list[list[int]]]
FOLDER = "score"
_MAX_PRINTED_PAIRS = 20  # with more, only the files list them
_MAX_SHOWN_PAIRS = 10
_HEADINGS = ("source", "translation", "reference")


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
    max_sentences: int | None = None,
    *,
    max_pairs: int | None = None,
) -> list[PairSentences]:
    """Return the sentences of a split that are translated, pair by pair.

    Args:
        source: the input.
        split: its name; not the training split, whose text is not kept.
        max_sentences: maximum number of sentences of a pair, evenly spaced; None: all.
        max_pairs: maximum number of pairs, evenly spaced; None: all.

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
    spans = [span for span in records_split.spans if span.pair in source.pairs and span.count]
    chosen = []
    for span in spaced(spans, max_pairs):
        places = spaced(range(span.count), max_sentences)
        lines = records.text(split, span.pair)
        chosen.append(
            PairSentences(
                span.pair,
                examples.get(span.pair, 0),
                [[*records_split.example(span.first + n)[0].tolist(), END] for n in places],
                [lines[n][0] for n in places],
                [lines[n][1] for n in places],
            )
        )
    if not any(part.ids for part in chosen):
        raise errors.InputError(
            f"{records.folder}: split {split!r} has no sentence of {', '.join(source.pairs)}. "
            "Use another score.split"
        )
    return chosen


def spaced(items: Sequence[_Item], most: int | None) -> list[_Item]:
    """Return at most `most` of the items, evenly spaced; None: all."""
    count = len(items) if most is None else min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def translations(
    translate: _Translate,
    vocabulary: Vocabulary,
    chosen: Sequence[PairSentences],
    progress: _Progress = lambda _: None,
) -> Iterator[scores.PairTranslations]:
    """Translate all pairs together, so that groups have sentences of similar length.

    Args:
        translate: see `translator.Translator.translate`.
        vocabulary: of the ids.
        chosen: the sentences.
        progress: called after every token with the number of sentences that it finished.
    """
    ids = [sentence for part in chosen for sentence in part.ids]
    texts = vocabulary.decode(translate(ids, progress))
    # A file holds one line for each sentence, but byte pieces may form line separators.
    lines = iter([" ".join(text.splitlines()) for text in texts])
    for part in chosen:
        hypotheses = [next(lines) for _ in part.ids]
        yield scores.PairTranslations(
            part.pair, part.examples, hypotheses, part.references, part.sources
        )


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
    for line in synthetic.notices(params):
        job.report(line)
    source = params.input.instantiate()
    params = task.complete(params, source)
    split = params.score.split or params.eval.split
    chosen = sentences_to_translate(source, split, params.score.max_sentences)
    count = sum(len(part.ids) for part in chosen)
    with Count("translating", "sentence", count) as bar:  # reading weights takes time
        decoder = translator.Decoder(params, logdir=job.logdir, checkpoint=job.checkpoint)
        source.records.check_vocabulary(decoder.vocabulary.hash)
        for folder in log_directory.folders(job.logdir, job.checkpoint):
            log_directory.check_assets(folder, source.assets())
        texts = list(translations(decoder.translate, decoder.vocabulary, chosen, bar.update))
    with Count("scoring", "sentence", count) as bar:
        report = scores.score(texts, bar.update)
    for line in (*summary(report, decoder.step, split), *translator.notes(decoder.cut)):
        job.report(line)
    if job.logdir is None:
        return
    path = scores.write(job.logdir / FOLDER, split, texts, report, decoder.step)
    job.report(f"wrote {path}, translations in {path.with_suffix('')}")
    _write_summaries(tensorboard.Writer(job.logdir / FOLDER), report, decoder.step, split)


def summary(report: scores.ScoreReport, step: int, split: str) -> Iterator[str]:
    """Yield the printed lines: the scores of all pairs on one line, then the table."""
    overall = report.row(scores.ALL).scores
    values = " ".join(f"{metric}={overall[metric].value:.2f}" for metric in scores.METRICS)
    yield f"score step={step} split={split} {values}"
    yield from scores.table(report, len(report.languages) <= _MAX_PRINTED_PAIRS).splitlines()


def _write_summaries(
    writer: tensorboard.Writer, report: scores.ScoreReport, step: int, split: str
) -> None:
    """Write scores for TensorBoard."""
    writer.scalars(
        step,
        {
            f"{split}/{metric}/{row.name}": row.scores[metric].value
            for metric in scores.METRICS
            for row in (*report.groups, *report.languages)
        },
    )
    writer.text(step, f"{split}/scores", scores.table(report))
    writer.close()


class ShownTranslations:
    """Translates a few sentences, the same ones each time: `translations/PAIR` → a table of them.

    Their sources are padded to one length, so that two graphs are traced, once in a run.
    """

    def __init__(
        self,
        pipe: pipelining.PipeliningLayer,
        source: Translation,
        settings: Decode,
        split: str,
    ) -> None:
        """Choose the sentences, evenly spaced over a split.

        Args:
            pipe: the network.
            source: its input.
            settings: how it decodes; `shown` is the number of sentences of each pair.
            split: where they are.

        Raises:
            UserError: the network cannot translate, or there is no such text.
        """
        self._vocabulary = source.vocabulary
        self._chosen = sentences_to_translate(
            source, split, settings.shown, max_pairs=_MAX_SHOWN_PAIRS
        )
        self._translator = translator.Translator(
            pipe,
            settings.copy().set(num_shapes=1),
            max_length=max(len(sentence) for part in self._chosen for sentence in part.ids),
            controls=len(self._vocabulary.targets),
        )

    def __call__(self) -> Mapping[str, str]:
        """Return the tables; see `task.Texts`."""
        translated = translations(self._translator.translate, self._vocabulary, self._chosen)
        return {
            f"translations/{part.pair}": tensorboard.markdown_table(
                _HEADINGS, zip(part.sources, part.hypotheses, part.references, strict=True)
            )
            for part in translated
        }
