"""Evaluation of checkpoints: one of them, or each new one while a training runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import logging

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.input import Input, synthetic
from lingvo_gpipe.run import (
    checkpoints,
    log_directory,
    restoring,
    summaries,
    worker_input,
    writers,
)
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.evaluation import Evaluation, batches, check_names, evaluate
from lingvo_gpipe.run.views.examples import Examples
from lingvo_gpipe.run.views.texts import EvaluationTexts
from lingvo_gpipe.task import Task

_POLL_S = 2.0


class CheckpointEvaluator:
    """A network for evaluation, which takes its weights from checkpoints.

    Attributes:
        pipe: the network.
    """

    def __init__(
        self,
        params: Task.Params,
        directory: str,
        report: Callable[[str], None] = logging.info,
    ) -> None:
        """Make the network; averages are used as weights if training keeps them.

        Args:
            params: params of the task, complete or not.
            directory: directory of the checkpoints.
            report: receives each line that a user should read.
        """
        self._input: Input = params.input.instantiate()
        params = self._params = task.complete(params, self._input)
        self._groups = task.groups_of(params, self._input.element_spec(training=True))
        self.pipe: pipelining.PipeliningLayer = self._groups.params.instantiate()
        self.pipe.build(self._groups.fields)
        check_names(self.pipe, params.eval)
        self._source = worker_input.source_of(self._input, self.pipe.executor, report)
        self._texts = EvaluationTexts(params, self.pipe, self._input, report)
        self._writers: dict[Path, summaries.Writer] = {}
        key_of = restoring.saved_keys(self.pipe.analysis.variables, params.train)
        variables = {key_of[path]: variable for path, variable in self.pipe.by_path.items()}
        self._checkpoints = checkpoints.Checkpoints(directory, variables, read_only=True)

    def check_assets(self, logdir: Path) -> None:
        """Refuse data whose ids have other meanings than in the data that the run trained on."""
        log_directory.check_assets(logdir, self._input.assets())

    def evaluate(
        self, which: int | str | None, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Restore a checkpoint and evaluate it.

        Args:
            which: as `Checkpoints.restore` takes it.
            should_stop: called between mini-batches.

        Raises:
            CheckpointError: there is no checkpoint, or it does not fit.
        """
        restored = restoring.restore_for_use(self._checkpoints, which, self._params)
        return evaluate(
            self.pipe,
            batches(self._source, self._params.eval),
            step=restored.step,
            groups=self._groups,
            metrics=self._params.eval.metrics,
            should_stop=should_stop,
            examples=Examples(self.pipe, self._input, self._params.eval.examples),
        )

    def write(
        self,
        logdir: Path,
        evaluation: Evaluation,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write the evaluation of the present weights into the folder of its run; see `folder_of`.

        Args:
            logdir: log directory of the run.
            evaluation: without texts, which are added to it.
            should_stop: called while texts are made; once it returns True, there are none.
        """
        folder = folder_of(logdir, self._params)
        if folder not in self._writers:
            self._writers[folder] = summaries.Writer(folder)
        classes = self._input.class_names
        shown = self._texts.added(evaluation, should_stop)
        writers.write_evaluation(self._writers[folder], folder, shown, classes)


def folder_of(logdir: Path, params: Task.Params) -> Path:
    """Return where evaluations of a run are written: `eval`, or `eval_SPLIT`.

    `eval_SPLIT` is for a split other than that of the run, which the newest checkpoint names. So
    no curve mixes two splits.

    Args:
        logdir: log directory of the run.
        params: params of the task, by which it is evaluated.
    """
    kept = None
    with contextlib.suppress(errors.CheckpointError):  # reported when it is restored
        kept = checkpoints.newest_text(str(logdir / log_directory.CHECKPOINTS))
    if kept is None or not task.change(kept[1], params.to_text()).touches("eval.split"):
        return logdir / writers.EVALUATIONS
    return logdir / f"{writers.EVALUATIONS}_{re.sub('[^A-Za-z0-9_.-]+', '_', params.eval.split)}"


def run(
    params: Task.Params,
    logdir: Path | None,
    *,
    which: str | None = None,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate one checkpoint and print the result on one line.

    Args:
        params: params of the task.
        logdir: log directory of the run; None: `which` names the checkpoint.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.
        report: receives the line.
        should_stop: called between mini-batches.

    Returns:
        The evaluation; None if it was stopped.
    """
    task.check(params)
    for line in synthetic.notices(params):
        report(line)
    directory = str(which if logdir is None else logdir / log_directory.CHECKPOINTS)
    evaluator = CheckpointEvaluator(params, directory, report)
    for folder in restoring.folders(logdir, which):
        evaluator.check_assets(folder)
    evaluation = evaluator.evaluate(which, should_stop)
    if evaluation is not None:
        report(evaluation.line())
        if logdir is not None:
            evaluator.write(logdir, evaluation, should_stop)
    return evaluation


def follow(
    params: Task.Params,
    logdir: Path,
    *,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
    wait: Callable[[float], None] = time.sleep,
) -> list[Evaluation]:
    """Evaluate each new checkpoint of a running training, until the last one was evaluated.

    After each evaluation the newest checkpoint is next; those in between are skipped. The best one
    by `eval.best` is kept in the run's folder `best`, unless the run itself keeps one there.

    Args:
        params: params of the task; the run is over at `train.max_steps` or when it records that.
        logdir: log directory of the run; it need not exist yet.
        report: receives a line per checkpoint.
        should_stop: called between mini-batches and while waiting.
        wait: sleeps for some seconds.

    Returns:
        All evaluations, without their vectors, matrices and examples.
    """
    task.check(params)
    directory = str(logdir / log_directory.CHECKPOINTS)
    evaluator = CheckpointEvaluator(params, directory, report)
    best = None
    if params.eval.best is not None:
        best = _BestKeeper(logdir / log_directory.BEST, params.eval, evaluator)
    evaluations: list[Evaluation] = []
    while not should_stop():
        over = log_directory.is_over(logdir)
        newest = checkpoints.newest(directory)
        step = -1 if newest is None else checkpoints.step_of(newest)
        if newest and (not evaluations or step > evaluations[-1].step):
            evaluator.check_assets(logdir)  # a run stores them before its first checkpoint
            try:
                evaluation = evaluator.evaluate(newest, should_stop)
            except errors.CheckpointError:
                if os.path.exists(f"{newest}.index"):
                    raise
                continue  # a newer one has taken its place meanwhile
            if evaluation is None:
                break
            evaluations.append(dataclasses.replace(evaluation, arrays={}, examples=()))
            report(evaluation.line())
            evaluator.write(logdir, evaluation, should_stop)
            if best is not None:
                best.consider(newest, evaluation, report)
        elif over or step >= params.train.max_steps:
            break
        else:
            wait(_POLL_S)
    return evaluations


class _BestKeeper:
    """Keeps the best checkpoint of a run that does not evaluate itself."""

    def __init__(self, directory: Path, params: task.Eval, evaluator: CheckpointEvaluator) -> None:
        """Start; a best checkpoint that already exists is evaluated at the first comparison.

        Args:
            directory: directory of the best checkpoint.
            params: params of the task.
            evaluator: evaluator of the run's checkpoints.
        """
        self._directory = str(directory)
        self._name = str(params.best)
        self._sign = 1.0 if task.highest_is_best(params) else -1.0
        self._evaluator = evaluator
        self._value: float | None = None

    def consider(self, prefix: str, evaluation: Evaluation, report: Callable[[str], None]) -> None:
        """Keep a checkpoint if it is better than all earlier ones."""
        value = self._sign * evaluation.number(self._name)
        if self._value is not None and not value > self._value:
            return
        try:
            if _keeps_best(prefix):
                return
            if self._value is None:
                self._value = self._value_of_present()
            if not value > self._value:
                return
            checkpoints.keep_only(prefix, self._directory)
        except errors.CheckpointError as error:
            if os.path.exists(f"{prefix}.index"):  # or a newer one has taken its place meanwhile
                report(str(error))
            return
        self._value = value

    def _value_of_present(self) -> float:
        """Return the value of the existing best checkpoint, which any process may have written."""
        best = checkpoints.newest(self._directory)
        evaluation = None if best is None else self._evaluator.evaluate(best)
        return -math.inf if evaluation is None else self._sign * evaluation.number(self._name)


def _keeps_best(prefix: str) -> bool:
    """Return whether the run of a checkpoint evaluates, and so keeps its best checkpoint itself.

    A run that does not evaluate has `eval/step` = -1, and may hold the best value of an earlier
    run.
    """
    return bool(
        checkpoints.read_value(prefix, keys.EVALUATED) >= 0
        and np.isfinite(checkpoints.read_value(prefix, keys.BEST_VALUE))
    )
