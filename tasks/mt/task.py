"""The task of translation: what any task has, how it decodes, and the modes decode and score."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe import input as input_lib
from lingvo_gpipe.tasks.mt import decoding, scores


class TranslationTask(task.Task):
    """A task whose model translates."""

    class Params(task.Task.Params):
        """Root of a translation task's tree."""

        decode: decoding.Decode = hyperparams.field(decoding.Decode(), "How it translates.")
        score: scores.Scoring = hyperparams.field(
            scores.Scoring(), "What --mode=score translates, and how it is scored."
        )

    def serving(self, source: Any) -> input_lib.Program:
        """Have the exported model search as this task decodes; see `Task.serving`."""
        found: input_lib.Program = source.serving(self.params.decode.search)
        return found


def _decode(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt import decode

    decode.run(job)


def _score(job: registry.Job) -> None:
    from lingvo_gpipe.tasks.mt import score

    score.run(job)


registry.add_mode("decode", _decode)
registry.add_mode("score", _score)
