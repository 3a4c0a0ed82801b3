"""The task of translation: what any task has, how it decodes, and the modes decode and score."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe.input import Program
from lingvo_gpipe.tasks.mt.decoding import scores, translator


class TranslationTask(task.Task):
    """A task whose model translates."""

    class Params(task.Task.Params):
        """Root of a translation task's tree."""

        decode: translator.Decode = hyperparams.field(translator.Decode(), "How it translates.")
        score: scores.Scoring = hyperparams.field(
            scores.Scoring(), "What --mode=score translates, and how it is scored."
        )

    def serving(self, source: Any) -> Program:
        """Have the exported model search as this task decodes; see `Task.serving`."""
        found: Program = source.serving(self.params.decode.search)
        return found


def _decode(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt.decoding import decode

    decode.run(job)


def _score(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt.decoding import score

    score.run(job)


registry.add_mode("decode", _decode)
registry.add_mode("score", _score)
