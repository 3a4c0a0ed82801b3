"""Texts of an evaluation, such as translations, which the task makes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe.input import Input
from lingvo_gpipe.run.evaluation import Evaluation
from lingvo_gpipe.task import Task, Texts


class EvaluationTexts:
    """Adds to evaluations the texts that a task shows."""

    def __init__(
        self,
        params: Task.Params,
        pipe: pipelining.PipeliningLayer,
        source: Input,
        report: Callable[[str], None],
    ) -> None:
        """Make nothing yet.

        Args:
            params: params of the task.
            pipe: the network.
            source: the input of the task.
            report: receives a line if this task can show none.
        """
        self._params = params
        self._pipe = pipe
        self._source = source
        self._report = report
        self._texts: Texts | None = None
        self._is_begun = False

    def added(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation with the texts of the network's present weights.

        Args:
            evaluation: without them.
        """
        if not self._is_begun:
            self._is_begun = True
            try:
                self._texts = self._params.instantiate().texts(self._pipe, self._source)
            except errors.UserError as error:
                self._report(f"evaluations show no texts: {error}")
        if self._texts is None:
            return evaluation
        begun = time.perf_counter()
        try:
            texts = dict(self._texts())
        except tf.errors.ResourceExhaustedError as error:  # training needs less than they
            reason = errors.without_graph_names(error.message).splitlines()[0]
            self._report(f"evaluations show no more texts: {reason}")
            self._texts = None
            return evaluation
        seconds = time.perf_counter() - begun
        return dataclasses.replace(evaluation, texts=texts, texts_s=seconds)
