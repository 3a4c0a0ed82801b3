"""The task of translation: any task's fields, decoding, and the modes decode and score."""

from __future__ import annotations

from typing import cast

from lingvo_gpipe import hyperparams, pipelining, registry, task
from lingvo_gpipe.input import Input
from lingvo_gpipe.input.serving import Program
from lingvo_gpipe.tasks.mt.decoding import decode, score
from lingvo_gpipe.tasks.mt.decoding.scores import Scoring
from lingvo_gpipe.tasks.mt.decoding.search import Decode
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

    def texts(self, pipe: pipelining.PipeliningLayer, source: Input) -> task.Texts | None:
        """Return translations of a few sentences of the split that is evaluated."""
        settings, split = self.params.decode, self.params.eval.split
        if not settings.shown or split == self.params.input.get("train_split"):
            return None  # the text of the training split is not kept
        return score.ShownTranslations(pipe, cast(Translation, source), settings, split)


registry.add_mode("decode", decode.run, tasks=TranslationTask.Params)
registry.add_mode("score", score.run, tasks=TranslationTask.Params)
