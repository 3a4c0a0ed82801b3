"""The best checkpoint of a run by a metric, in a separate directory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.run.checkpoints import files, keys, values, writing
from lingvo_gpipe.run.checkpoints.store import Checkpoints


class Best:
    """Keeps the checkpoint with the best value of a metric in a separate directory.

    Attributes:
        variables: best value and number of misses, to be saved with the checkpoints of the run.
    """

    def __init__(
        self,
        directory: str,
        variables: Mapping[str, packing.Variable],
        params_text: str,
        *,
        larger_is_better: bool = True,
        writer: writing.Writer | None = None,
        resumed_from: str | None = None,
    ) -> None:
        """Open the directory of the best checkpoint.

        Args:
            directory: directory of only this checkpoint, such as `best` in the log directory.
            variables: as in `Checkpoints`.
            params_text: as in `Checkpoints`.
            larger_is_better: False for losses.
            writer: as in `Checkpoints`.
            resumed_from: as in `Checkpoints`.
        """
        self._params_text = params_text
        self._sign = 1.0 if larger_is_better else -1.0
        self.variables = best_variables(worst=-math.inf * self._sign)
        self._checkpoints = Checkpoints(
            directory,
            {**variables, **self.variables},
            params_text,
            keep=1,
            writer=writer,
            resumed_from=resumed_from,
        )

    @property
    def value(self) -> float:
        """The best value so far; infinite before the first."""
        return float(self.variables[keys.BEST_VALUE].numpy())

    @property
    def misses(self) -> int:
        """Number of values since the best one, to compare with the patience of early stopping."""
        return int(self.variables[keys.BEST_MISSES].numpy())

    def consider(self, value: float, step: int) -> bool:
        """Save if `value` is better than all before (NaN never is); return whether it is."""
        if not value * self._sign > self.value * self._sign:
            self.variables[keys.BEST_MISSES].assign_add(1)
            return False
        self.variables[keys.BEST_VALUE].assign(value)
        self.variables[keys.BEST_MISSES].assign(0)
        # To write it again, the only best checkpoint would be removed first.
        if not self._is_kept(step):
            self._checkpoints.save(step)
        return True

    def _is_kept(self, step: int) -> bool:
        """Return whether a run that was killed after `step` already kept it, with equal value."""
        best = files.newest(self._checkpoints.directory)
        if best is None or files.step_of(best) != step:
            return False
        with contextlib.suppress(errors.CheckpointError):
            if files.params_text(best) == self._params_text:
                return bool(values.read_value(best, keys.BEST_VALUE) == self.value)
        return False


def best_variables(worst: float = -math.inf) -> dict[str, tf.Variable]:
    """Return the variables of a best value by key; a run without a best value also saves them.

    Args:
        worst: the value before the first.
    """
    with tf.device("CPU:0"):
        return {
            keys.BEST_VALUE: tf.Variable(worst, dtype=tf.float64),
            keys.BEST_MISSES: tf.Variable(0, dtype=tf.int64),
        }
