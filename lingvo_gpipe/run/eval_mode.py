"""Evaluation of checkpoints: one of them, or each new one while a training runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from absl import logging

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.input import Input, synthetic
from lingvo_gpipe.run import (
    checkpoints,
    log_directory,
    restoring,
    tensorboard,
    worker_input,
)
from lingvo_gpipe.run.evaluation import (
    Evaluation,
    EvaluationTexts,
    check_names,
    evaluate,
)
from lingvo_gpipe.run.examples import Examples
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
        logdir: Path | None,
        report: Callable[[str], None] = logging.info,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the network; averages are used as weights if training keeps them.

        Args:
            params: params of the task, complete or not.
            logdir: log directory of the run, into which evaluations are written; None: they are
                not written.
            report: receives each line that a user should read.
            should_stop: called between mini-batches.
        """
        self._input: Input = params.input.instantiate()
        params = self._params = task.complete(params, self._input)
        self._groups = task.groups_of(params, self._input.element_spec(training=True))
        self.pipe: pipelining.PipeliningLayer = self._groups.params.instantiate()
        self.pipe.build(self._groups.fields)
        check_names(self.pipe, params.eval)
        self._source = worker_input.source_of(self._input, self.pipe.executor, report)
        self._texts = EvaluationTexts(params, self.pipe, self._input, report)
        self._logdir = logdir
        self._writers: dict[Path, tensorboard.Writer] = {}
        self._report = report
        self._should_stop = should_stop

    def evaluate(self, which: str | None) -> Evaluation | None:
        """Restore a checkpoint, evaluate it, report and write the result.

        Args:
            which: path of a checkpoint, or of a directory of them; None: the newest of the run.

        Returns:
            The evaluation; None if it was stopped.

        Raises:
            CheckpointError: there is no checkpoint, or it does not fit.
            TrainingError: the data is not that of the run.
        """
        logdir = self._logdir
        for folder in restoring.folders(logdir, which):
            log_directory.check_assets(folder, self._input.assets())
        restored = restoring.restore(
            self.pipe.by_path, self.pipe.analysis, self._params, logdir=logdir, which=which
        )
        found = evaluate(
            self.pipe,
            self._source.evaluation(self._params.eval.split),
            step=restored.step,
            groups=self._groups,
            metrics=self._params.eval.metrics,
            should_stop=self._should_stop,
            examples=Examples(self.pipe, self._input, self._params.eval.examples),
        )
        if found is None:
            return None
        self._report(found.line())
        if logdir is not None:
            folder = folder_of(logdir, self._params)
            if folder not in self._writers:
                self._writers[folder] = tensorboard.Writer(folder)
            shown = self._texts.added(found)
            tensorboard.write_evaluation(self._writers[folder], shown, self._input.class_names)
        return found


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
        return logdir / tensorboard.EVALUATIONS
    return (
        logdir / f"{tensorboard.EVALUATIONS}_{re.sub('[^A-Za-z0-9_.-]+', '_', params.eval.split)}"
    )


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
    return CheckpointEvaluator(params, logdir, report, should_stop).evaluate(which)


def follow(
    params: Task.Params,
    logdir: Path,
    *,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
    wait: Callable[[float], None] = time.sleep,
) -> list[Evaluation]:
    """Evaluate each new checkpoint of a running training, until the last one was evaluated.

    After each evaluation the newest checkpoint is next; those in between are skipped.

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
    evaluator = CheckpointEvaluator(params, logdir, report, should_stop)
    evaluations: list[Evaluation] = []
    while not should_stop():
        over = log_directory.is_over(logdir)
        newest = checkpoints.newest(str(logdir / log_directory.CHECKPOINTS))
        step = -1 if newest is None else checkpoints.step_of(newest)
        if newest and (not evaluations or step > evaluations[-1].step):
            try:
                evaluation = evaluator.evaluate(newest)
            except errors.CheckpointError:
                if os.path.exists(f"{newest}.index"):
                    raise
                continue  # a newer one has taken its place meanwhile
            if evaluation is None:
                break
            evaluations.append(dataclasses.replace(evaluation, arrays={}, examples=()))
        elif over or step >= params.train.max_steps:
            break
        else:
            wait(_POLL_S)
    return evaluations
