"""What a run saves besides its network, when it saves it, and how it continues from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe import errors, task
from lingvo_gpipe.run import checkpoints, log_directory
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.learner import Learner

# Fields on which the meaning of the best value depends: a metric of a part of some data.
_FIELDS_OF_BEST = ("eval.best", "eval.split", "input.records")


class RunState:
    """Everything that the checkpoints of a run hold, and the checkpoints.

    Attributes:
        checkpoints: the newest ones.
        best: the best one; None if `eval.best` is not set.
        position: int64 variable, number of mini-batches read.
    """

    def __init__(
        self,
        params: task.Task.Params,
        learner: Learner,
        logdir: Path,
        threads: tuple[int, int],
        *,
        evaluates: bool,
    ) -> None:
        """Open the run's checkpoints.

        Args:
            params: params of the task.
            learner: the network in training.
            logdir: log directory of the run.
            threads: thread counts between and inside operations.
            evaluates: whether the run evaluates.
        """
        self._params = params
        self._learner = learner
        self._evaluates = evaluates
        self._threads_now = threads
        self._best_directory = str(logdir / log_directory.BEST)
        with tf.device("CPU:0"):
            self.position = tf.Variable(0, dtype=tf.int64)
            self._threads = tf.Variable(threads, dtype=tf.int64)
            # The last step that was evaluated; -1: the run does not evaluate.
            self._evaluated = tf.Variable(0 if evaluates else -1, dtype=tf.int64)
        variables = {
            **learner.variables,
            keys.POSITION: self.position,
            keys.THREADS: self._threads,
            keys.EVALUATED: self._evaluated,
        }
        text = params.to_text()
        # One for both, in order: a checkpoint has the value of the best one.
        self._writer = checkpoints.Writer(background=params.train.async_checkpoints)
        resumed_from = str(logdir / log_directory.CHECKPOINTS)
        self.best: checkpoints.Best | None = None
        if params.eval.best is not None:
            self.best = checkpoints.Best(
                self._best_directory,
                variables,
                text,
                larger_is_better=task.highest_is_best(params.eval),
                writer=self._writer,
                resumed_from=resumed_from,
            )
        # A run without a best value saves the same keys.
        self._best_variables = (
            checkpoints.best_variables() if self.best is None else self.best.variables
        )
        self.checkpoints = checkpoints.Checkpoints(
            resumed_from,
            variables | self._best_variables,
            text,
            keep=params.train.keep_checkpoints,
            writer=self._writer,
        )

    @property
    def step(self) -> int:
        """Number of updates."""
        return int(self._learner.step.numpy())

    @property
    def is_evaluated(self) -> bool:
        """Whether the current step was evaluated."""
        return int(self._evaluated) == self.step

    @property
    def is_out_of_patience(self) -> bool:
        """Whether training ends because `eval.best` has not improved for too long."""
        patience = self._params.eval.patience
        if patience is None or self.best is None or not self._evaluates:
            return False
        return self.best.misses >= patience

    def save(self) -> str:
        """Begin to write a checkpoint of the current step; return the prefix of its files."""
        return self.checkpoints.save(self.step)

    def written(self) -> list[checkpoints.Written]:
        """Return the checkpoints that were completed since the last call.

        Raises:
            CheckpointError: one cannot be written.
        """
        return self._writer.finished()

    def wait(self) -> list[checkpoints.Written]:
        """Wait until all checkpoints are written; return and raise what `written` does."""
        return self._writer.wait()

    def close(self, report: Callable[[str], None]) -> None:
        """Wait until all checkpoints are written; report one that cannot be."""
        error = self._writer.close()
        if error is not None:
            report(str(error))

    def record_evaluation(self, value: float) -> None:
        """Record that the current step was evaluated, and keep it if it is the best.

        Args:
            value: value of `eval.best`; ignored if that is not set.
        """
        self._evaluated.assign(self.step)
        if self.best is not None:
            self.best.consider(value, self.step)

    def restore(self, change: task.Change | None, report: Callable[[str], None]) -> bool:
        """Restore the newest whole checkpoint of the run; return whether there is one.

        Args:
            change: how the params have changed since the newest checkpoint.
            report: receives each line that a user should read.
        """
        initial_best = {key: variable.numpy() for key, variable in self._best_variables.items()}
        restored = self.checkpoints.restore()
        if restored is None:
            return False
        for prefix, why in restored.torn:
            report(f"{prefix} is torn and set aside: {why}")
        report(f"restored step={restored.step}")
        if change is not None and change.touches(*_FIELDS_OF_BEST):
            for key, value in initial_best.items():
                self._best_variables[key].assign(value)
        self._restore_best_value(restored.step, report)
        self._evaluated.assign(max(int(self._evaluated), 0) if self._evaluates else -1)
        before = tuple(self._threads.numpy())
        if before != self._threads_now:
            report(
                f"thread counts (between, inside operations) were {before[0]}, {before[1]} and "
                f"are {self._threads_now[0]}, {self._threads_now[1]}: the last bits of results may "
                "differ"
            )
            self._threads.assign(self._threads_now)
        return True

    def _restore_best_value(self, step: int, report: Callable[[str], None]) -> None:
        """Take the value of `step` from the best checkpoint, if it was evaluated after saving."""
        try:
            kept = checkpoints.newest_text(self._best_directory)
        except checkpoints.UnreadableNowError:
            raise
        except errors.CheckpointError as error:
            report(f"{error}; the weights beside it stay until a better checkpoint is kept")
            return
        if kept is None or checkpoints.step_of(kept[0]) != step:
            return
        best, text = kept
        if task.change(text, self._params.to_text()).touches(*_FIELDS_OF_BEST):
            return
        with contextlib.suppress(errors.CheckpointError):
            if checkpoints.read_value(best, keys.EVALUATED) == step:
                saved = {key: checkpoints.read_value(best, key) for key in self._best_variables}
                for key, value in saved.items():
                    self._best_variables[key].assign(value)
                self._evaluated.assign(step)
