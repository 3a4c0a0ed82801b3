"""What a run saves besides its network, its checkpoints, the best one, and how it continues."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe import errors, task
from lingvo_gpipe.run import checkpoints, log_directory
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.learner import Learner

# Fields on which the meaning of the best value depends: a metric of a part of the data.
_FIELDS_OF_BEST = ("eval.best", "eval.split")


class RunState:
    """Everything that the checkpoints of a run hold, and the checkpoints.

    Attributes:
        checkpoints: the newest ones.
        position: int64 variable, number of mini-batches read.
    """

    def __init__(
        self, params: task.Task.Params, learner: Learner, logdir: Path, *, evaluates: bool
    ) -> None:
        """Open the run's checkpoints.

        Args:
            params: params of the task.
            learner: the network in training.
            logdir: log directory of the run.
            evaluates: whether the run evaluates.
        """
        self._params = params
        self._learner = learner
        self._evaluates = evaluates
        self._sign = 1.0 if task.highest_is_best(params.eval) else -1.0
        with tf.device("CPU:0"):
            self.position = tf.Variable(0, dtype=tf.int64)
            # The last step that was evaluated; -1: the run does not evaluate.
            self._evaluated = tf.Variable(0 if evaluates else -1, dtype=tf.int64)
            # Best value of `eval.best` so far, and evaluations since then.
            self._best_value = tf.Variable(-math.inf * self._sign, dtype=tf.float64)
            self._best_misses = tf.Variable(0, dtype=tf.int64)
        variables = {
            **learner.variables,
            keys.POSITION: self.position,
            keys.EVALUATED: self._evaluated,
            keys.BEST_VALUE: self._best_value,
            keys.BEST_MISSES: self._best_misses,
        }
        # One thread for both, in order: a checkpoint has the value of the best one.
        self._thread = checkpoints.WriterThread()

        def opened(name: str, keep: int) -> checkpoints.Checkpoints:
            return checkpoints.Checkpoints(
                str(logdir / name),
                variables,
                params.to_text(),
                thread=self._thread,
                parts=learner.saved_parts,
                keep=keep,
                resumed_from=str(logdir / log_directory.CHECKPOINTS),
            )

        self.checkpoints = opened(log_directory.CHECKPOINTS, params.train.keep_checkpoints)
        self._best = None if params.eval.best is None else opened(log_directory.BEST, 1)

    @property
    def step(self) -> int:
        """Number of updates."""
        return int(self._learner.step.numpy())

    @property
    def is_evaluated(self) -> bool:
        """Whether the current step was evaluated."""
        return int(self._evaluated) == self.step

    @property
    def best_value(self) -> float | None:
        """The best value of `eval.best` so far; None before the first."""
        value = float(self._best_value.numpy())
        return None if self._best is None or math.isinf(value) else value

    @property
    def is_out_of_patience(self) -> bool:
        """Whether training ends because `eval.best` has not improved for too long."""
        patience = self._params.eval.patience
        if patience is None or self._best is None or not self._evaluates:
            return False
        return int(self._best_misses.numpy()) >= patience

    def save(self) -> str:
        """Begin to write a checkpoint of the current step; return the prefix of its files."""
        path = self.checkpoints.save(self.step)
        if not self._params.train.async_checkpoints:
            self._thread.join()
        return path

    def check_written(self) -> None:
        """Raise the error of a checkpoint that could not be written.

        Raises:
            CheckpointError: there is one.
        """
        self._thread.check()

    def wait(self) -> None:
        """Wait until all checkpoints are written; raises what `check_written` does."""
        self._thread.join()

    def close(self, report: Callable[[str], None]) -> None:
        """Wait until all checkpoints are written; report one that cannot be."""
        error = self._thread.close()
        if error is not None:
            report(str(error))

    def record_evaluation(self, value: float) -> None:
        """Record that the current step was evaluated, and keep it if it is the best.

        Args:
            value: value of `eval.best`; ignored if that is not set.
        """
        self._evaluated.assign(self.step)
        if self._best is None:
            return
        if not value * self._sign > float(self._best_value.numpy()) * self._sign:  # NaN never is
            self._best_misses.assign_add(1)
            return
        self._best_value.assign(value)
        self._best_misses.assign(0)
        # To write it again, the only best checkpoint would be removed first.
        if not self._is_kept(self._best.directory):
            self._best.save(self.step)

    def _is_kept(self, directory: str) -> bool:
        """Return whether this run, before it was killed, kept the best one of this step."""
        try:
            best = checkpoints.newest_text(directory)
            if best is None or checkpoints.step_of(best[0]) != self.step:
                return False
            value = checkpoints.read_value(best[0], keys.BEST_VALUE)
            return best[1] == self._params.to_text() and bool(value == self._best_value.numpy())
        except errors.CheckpointError:
            return False

    def restore(self, change: task.Change | None, report: Callable[[str], None]) -> bool:
        """Restore the newest whole checkpoint of the run; return whether there is one.

        Args:
            change: how the params have changed since the newest checkpoint.
            report: receives each line that a user should read.
        """
        worst = float(self._best_value.numpy())
        restored = self.checkpoints.restore()
        if restored is None:
            return False
        for prefix, why in restored.torn:
            report(f"{prefix} is torn and set aside: {why}")
        report(f"restored step={restored.step}")
        if change is not None and change.touches(*_FIELDS_OF_BEST):
            self._best_value.assign(worst)
            self._best_misses.assign(0)
        if self._best is not None:
            self._restore_best_value(self._best.directory, restored.step, report)
        self._evaluated.assign(max(int(self._evaluated), 0) if self._evaluates else -1)
        return True

    def _restore_best_value(self, directory: str, step: int, report: Callable[[str], None]) -> None:
        """Take the value of the best checkpoint, if it was evaluated after `step` was saved."""
        try:
            best = checkpoints.newest_text(directory)
            if best is None or checkpoints.step_of(best[0]) < step:
                return
            change = task.change(best[1], self._params.to_text())
            if change.touches(*_FIELDS_OF_BEST):
                return
            saved = checkpoints.SavedValues(best[0])
            if checkpoints.step_of(best[0]) > step:
                if change.lines:  # so its update will not come again with the same numbers
                    self._best_value.assign(saved.read(keys.BEST_VALUE))
            elif saved.read(keys.EVALUATED) == step:
                self._evaluated.assign(step)
                self._best_value.assign(saved.read(keys.BEST_VALUE))
                self._best_misses.assign(saved.read(keys.BEST_MISSES))
        except checkpoints.DamagedError as error:
            report(f"{error}; the weights beside it stay until a better checkpoint is kept")
