"""Evaluation: a network's losses and metrics over a whole part of the data."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import checkpoint, errors, pipelining, summaries, task
from lingvo_gpipe import logdir as logdir_lib
from lingvo_gpipe.layers import base

_POLL_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        step: updates that the weights have had.
        values: name → number: metrics, then `loss`, then each loss of several as `loss/name`.
        others: name → vector or matrix, of metrics that are none.
        num_examples: how many were evaluated.
    """

    step: int
    values: dict[str, float]
    others: dict[str, Any]
    num_examples: int

    def line(self) -> str:
        """Return all numbers on one line, `eval step=100 accuracy=0.9861 loss=0.0543`."""
        numbers = " ".join(f"{name}={value:.4f}" for name, value in self.values.items())
        return f"eval step={self.step} {numbers}"


def evaluate(
    pipe: pipelining.PipeliningLayer,
    batches: Iterable[Mapping[str, Any]],
    *,
    step: int,
    metrics: tuple[str, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate a network on `batches`, each example counted alike whatever their sizes.

    Args:
        pipe: the network, with its present weights.
        batches: of any sizes.
        step: updates that the weights have had.
        metrics: names to tell; none: all.
        should_stop: asked between mini-batches.

    Returns:
        The evaluation; None where it was stopped.

    Raises:
        InputError: there is no batch.
    """
    totals: dict[str, np.floating[Any]] = {}
    weights: dict[str, np.floating[Any]] = {}
    sums: Any = None
    count = 0
    step_tensor = tf.constant(step, tf.int64)
    for batch in batches:
        if should_stop():
            return None
        result = pipe.evaluate(batch, step=step_tensor)
        given = pipe.loss_weights(batch)
        for name, mean in result.losses.items():
            wide = np.float64(given[name])
            weights[name] = weights.get(name, np.float64(0)) + wide
            totals[name] = totals.get(name, np.float64(0)) + wide * np.float64(mean)
        own = tf.nest.map_structure(_wide, result.sums)
        sums = own if sums is None else tf.nest.map_structure(np.add, sums, own)
        count += num_examples(pipe, batch)
    if count == 0:
        raise errors.InputError("there is no example to evaluate. Look at eval.split")
    means = {n: float(totals[n] / weights[n]) if weights[n] else 0.0 for n in totals}
    dtypes = tf.nest.map_structure(lambda tensor: tensor.dtype, result.sums)
    sums = tf.nest.map_structure(tf.constant, sums, dtypes)
    return _told(pipe, means, sums, metrics, step, count)


def _wide(tensor: tf.Tensor) -> Any:
    """Return a sum in a dtype in which millions of examples still add up exactly."""
    return np.asarray(tensor).astype(np.float64 if tensor.dtype.is_floating else np.int64)


def num_examples(pipe: pipelining.PipeliningLayer, batch: Mapping[str, Any]) -> int:
    """Return how many examples a mini-batch holds."""
    params = pipe.params
    name = next(name for name in batch if name not in params.unbatched)
    return int(tf.nest.flatten(batch[name])[0].shape[params.batch_dim])


def _told(
    pipe: pipelining.PipeliningLayer,
    means: dict[str, float],
    sums: dict[str, Any],
    metrics: tuple[str, ...],
    step: int,
    count: int,
) -> Evaluation:
    finished = {name: np.asarray(pipe.metrics[name].finish(sums[name])) for name in metrics or sums}
    values = {name: float(found) for name, found in finished.items() if found.ndim == 0}
    others = {name: found for name, found in finished.items() if found.ndim}
    coefficients = {loss.name: loss.coefficient for loss in pipe.analysis.losses}
    values["loss"] = sum(coefficients[name] * mean for name, mean in means.items())
    if len(means) > 1:
        values |= {f"loss/{name}": mean for name, mean in means.items()}
    return Evaluation(step, values, others, count)


def check_names(pipe: pipelining.PipeliningLayer, params: task.Eval) -> None:
    """Refuse names of metrics that the network does not give.

    Raises:
        ParamsError: names the nearest.
    """
    losses = [loss.name for loss in pipe.analysis.losses if not loss.training_only]
    known = [*pipe.metrics, "loss", *(f"loss/{name}" for name in losses if len(losses) > 1)]
    for path, names, allowed in (
        ("eval.metrics", params.metrics, list(pipe.metrics)),
        ("eval.best", () if params.best is None else (params.best,), known),
    ):
        for name in names:
            if name not in allowed:
                near = errors.nearest(name, allowed) or allowed
                raise errors.ParamsError(
                    f"{path} names {name!r}, which the network does not give; nearest "
                    f"{', '.join(map(repr, near)) or 'none: no layer gives a metric'}"
                )


def saved_keys(specs: Mapping[str, base.VariableSpec], train: task.Train) -> dict[str, str]:
    """Return path → the key under which checkpoints hold what evaluation uses.

    Averages stand for weights and statistics where training keeps them; frozen weights have none.

    Args:
        specs: path → spec of the network in training.
        train: of the task.
    """
    return {
        path: f"average/{path}"
        if train.average is not None and (spec.trainable or spec.is_state)
        else f"variables/{path}"
        for path, spec in specs.items()
    }


class Reader:
    """A network that takes its weights from checkpoints, for evaluation alone."""

    def __init__(self, params: Any, directory: str) -> None:
        """Make the network; its averages stand for its weights where training keeps them.

        Args:
            params: a `Task.Params`.
            directory: of checkpoints.
        """
        self._params = params
        self._input = params.input.instantiate()
        self.pipe: pipelining.PipeliningLayer = params.model.instantiate()
        self.pipe.build(self._input.element_spec(training=True))
        check_names(self.pipe, params.eval)
        keys = saved_keys(self.pipe.specs, params.train)
        objects = {keys[path]: variable for path, variable in self.pipe.by_path.items()}
        self._checkpoints = checkpoint.Checkpoints(directory, objects, read_only=True)

    def evaluate(
        self, which: int | str | None, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Restore a checkpoint and evaluate it.

        Args:
            which: as `Checkpoints.restore` takes it.
            should_stop: asked between mini-batches.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        restored = self._checkpoints.restore(which, subset=True)
        if restored is None:
            raise errors.CheckpointError(
                f"{self._checkpoints.directory} has no checkpoint. Train first, or name one by "
                "--checkpoint"
            )
        return evaluate(
            self.pipe,
            batches(self._input, self._params.eval),
            step=restored.step,
            metrics=self._params.eval.metrics,
            should_stop=should_stop,
        )


def batches(source: Any, params: task.Eval, most: int | None = None) -> Iterable[Any]:
    """Return the mini-batches of an evaluation.

    Args:
        source: an `input.Input`.
        params: of the task.
        most: how many at most; None: all, each example exactly once.
    """
    found = source.evaluation(params.split)
    return found if most is None else itertools.islice(found, most)


def run(
    params: Any,
    logdir: Path | None,
    *,
    which: str | None = None,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate one checkpoint and print the result on one line.

    Args:
        params: a `Task.Params`.
        logdir: of the run; None: `which` names the checkpoint.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.
        report: takes the line.
        should_stop: asked between mini-batches.

    Returns:
        The evaluation; None where it was stopped.
    """
    task.check(params)
    reader = Reader(params, str(which if logdir is None else logdir / logdir_lib.CHECKPOINTS))
    found = reader.evaluate(which, should_stop)
    if found is not None:
        report(found.line())
        if logdir is not None:
            _write(logdir, found)
    return found


def follow(
    params: Any,
    logdir: Path,
    *,
    report: Callable[[str], None] = logging.info,
    should_stop: Callable[[], bool] = lambda: False,
    wait: Callable[[float], None] = time.sleep,
) -> list[Evaluation]:
    """Evaluate each new checkpoint beside a training run, until its last one was evaluated.

    A checkpoint that is newer than the one at work is taken next; older ones are left out.

    Args:
        params: a `Task.Params`; the run is over with `train.max_steps`, or when it says so.
        logdir: of the run; it may not be there yet.
        report: takes a line per checkpoint.
        should_stop: asked between mini-batches and while waiting.
        wait: sleeps for some seconds.

    Returns:
        All evaluations.
    """
    task.check(params)
    directory = str(logdir / logdir_lib.CHECKPOINTS)
    reader = Reader(params, directory)
    found: list[Evaluation] = []
    while not should_stop():
        over = logdir_lib.is_over(logdir)
        newest = checkpoint.find(directory)[-1:]
        step = checkpoint.step_of(newest[0]) if newest else -1
        if newest and (not found or step > found[-1].step):
            try:
                told = reader.evaluate(newest[0], should_stop)
            except errors.CheckpointError:
                if os.path.exists(f"{newest[0]}.index"):
                    raise
                continue  # a newer one has taken its place meanwhile
            if told is None:
                break
            found.append(told)
            report(told.line())
            _write(logdir, told)
        elif over or step >= params.train.max_steps:
            break
        else:
            wait(_POLL_S)
    return found


def _write(logdir: Path, found: Evaluation) -> None:
    writer = summaries.Writer(logdir / "eval")
    writer.scalars(found.step, found.values)
    writer.close()
