"""The task of translation: any task's fields, decoding, and the modes decode and score."""

from __future__ import annotations

from typing import cast

from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe.input import Input
from lingvo_gpipe.serving import Program
from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode
from lingvo_gpipe.tasks.mt.decoding.scores import Scoring
from lingvo_gpipe.tasks.mt.input import Translation


class TranslationTask(task.Task):
    """A task whose model translates."""

    class Params(task.Task.Params):
        """Root of a translation task's tree."""

        decode: Decode = hyperparams.field(Decode(), "How it translates.")
        score: Scoring = hyperparams.field(
            Scoring(), "What --mode=score translates, and how it is scored."
        )

    params: Params

    def serving(self, source: Input) -> Program:
        """Return a model that searches as this task decodes; see `Task.serving`."""
        return cast(Translation, source).serving(self.params.decode.search)


def _decode(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt.decoding import decode

    decode.run(job)


def _score(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt.decoding import score

    score.run(job)


def _scored_splits(params: task.Task.Params) -> tuple[str, ...]:
    return (cast(TranslationTask.Params, params).score.split or params.eval.split,)


registry.add_mode("decode", _decode)
registry.add_mode("score", _score, splits=_scored_splits)
