"""Evaluation: a network's losses and metrics over a whole part of the data."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.input import Batches
from lingvo_gpipe.layers import heads
from lingvo_gpipe.run import checkpoint, confusion, log_directory, restoring, summaries

EVALUATIONS = "eval"  # folder of a run
_POLL_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        step: updates that the weights have had.
        values: name → number: metrics, then `loss`, then each loss of several as `loss/name`.
        others: name → vector or matrix, of metrics that are none.
        curves: `name/label` → number, of vectors whose elements have names.
        num_rows: of all mini-batches: examples, or the rows that translation makes of them.
        unread: how many could not be, by what became of them (`left_out`).
    """

    step: int
    values: dict[str, float]
    others: dict[str, Any]
    num_rows: int
    curves: dict[str, float] = dataclasses.field(default_factory=dict)
    unread: dict[str, int] = dataclasses.field(default_factory=dict)

    def number(self, name: str) -> float:
        """Return the number that `eval.best` names.

        Raises:
            ParamsError: it is none.
        """
        if name not in self.values:
            raise _no_number(name, self.values)
        return self.values[name]

    def line(self) -> str:
        """Return all numbers on one line, `eval step=100 accuracy=0.9861 loss=0.0543`."""
        numbers = [f"{name}={value:.4f}" for name, value in self.values.items()]
        numbers += [f"{name}={count}" for name, count in self.unread.items() if count]
        return f"eval step={self.step} {' '.join(numbers)}"


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
        count += num_rows(pipe, batch)
    if count == 0:
        raise errors.InputError("there is no example to evaluate. Look at eval.split")
    means = {n: float(totals[n] / weights[n]) if weights[n] else 0.0 for n in totals}
    dtypes = tf.nest.map_structure(lambda tensor: tensor.dtype, result.sums)
    sums = tf.nest.map_structure(tf.constant, sums, dtypes)
    found = _told(pipe, means, sums, metrics, step, count)
    unread = dict(batches.counts) if isinstance(batches, Batches) else {}
    return dataclasses.replace(found, unread=unread)


def _wide(tensor: tf.Tensor) -> Any:
    """Return a sum in a dtype in which millions of examples still add up exactly."""
    return np.asarray(tensor).astype(np.float64 if tensor.dtype.is_floating else np.int64)


def num_rows(pipe: pipelining.PipeliningLayer, batch: Mapping[str, Any]) -> int:
    """Return how many rows a mini-batch holds: examples, unless some are packed or only fill it."""
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
    curves: dict[str, float] = {}
    for name, result in others.items():
        curves |= pipe.metrics[name].curves(result)
    return Evaluation(step, values, others, count, curves)


def check_names(pipe: pipelining.PipeliningLayer, params: task.Eval) -> None:
    """Refuse names of metrics that the network does not give.

    Raises:
        ParamsError: names the nearest.
    """
    losses = [loss.name for loss in pipe.analysis.losses if not loss.training_only]
    vectors = {metric.name for metric in pipe.metrics.values() if metric.labels}
    numbers = [
        name
        for name in params.metrics or pipe.metrics
        if name not in vectors and not name.endswith(heads.CONFUSION)
    ]
    known = [*numbers, "loss", *(f"loss/{name}" for name in losses if len(losses) > 1)]
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


def check_best(pipe: pipelining.PipeliningLayer, name: str, sums: Mapping[str, Any]) -> None:
    """Refuse a best metric that is no number, as far as the sums of an update tell.

    Raises:
        ParamsError: names those that are.
    """
    found = {n: np.ndim(pipe.metrics[n].finish(total)) for n, total in sums.items()}
    if found.get(name):
        raise _no_number(name, [*(n for n, rank in found.items() if not rank), "loss"])


def _no_number(name: str, numbers: Iterable[str]) -> errors.ParamsError:
    told = ", ".join(numbers)
    return errors.ParamsError(
        f"eval.best names {name!r}, which is no single number, so that none is the best. Name one "
        f"of {told}"
    )


class Reader:
    """A network that takes its weights from checkpoints, for evaluation alone."""

    def __init__(self, params: Any, directory: str) -> None:
        """Make the network; its averages stand for its weights where training keeps them.

        Args:
            params: a `Task.Params`, complete or not.
            directory: of checkpoints.
        """
        self._input = params.input.instantiate()
        params = self._params = task.complete(params, self._input)
        self.pipe: pipelining.PipeliningLayer = params.model.instantiate()
        self.pipe.build(self._input.element_spec(training=True))
        check_names(self.pipe, params.eval)
        self._writers: dict[Path, summaries.Writer] = {}
        keys = restoring.saved_keys(self.pipe.specs, params.train)
        objects = {keys[path]: variable for path, variable in self.pipe.by_path.items()}
        self._checkpoints = checkpoint.Checkpoints(directory, objects, read_only=True)

    def check_assets(self, logdir: Path) -> None:
        """Refuse data whose ids mean something else than those that the run was trained on."""
        log_directory.check_assets(logdir, self._input.assets())

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
        restoring.warn_of_torn(restored)
        restoring.warn_of_change(self._params, restored)
        return evaluate(
            self.pipe,
            batches(self._input, self._params.eval),
            step=restored.step,
            metrics=self._params.eval.metrics,
            should_stop=should_stop,
        )

    def write(self, logdir: Path, found: Evaluation) -> None:
        """Put an evaluation into the folder of its run; see `folder_of`."""
        folder = folder_of(logdir, self._params)
        if folder not in self._writers:
            self._writers[folder] = summaries.Writer(folder)
        write(self._writers[folder], folder, found, self._input.class_names)


def folder_of(logdir: Path, params: Any) -> Path:
    """Return where evaluations of a run are written: `eval`, or `eval_SPLIT`.

    The second is for another split than the run's own, as its newest checkpoint has it, so that no
    curve is of two splits.

    Args:
        logdir: of the run.
        params: a `Task.Params`, by which it is evaluated.
    """
    newest = checkpoint.find(str(logdir / log_directory.CHECKPOINTS))[-1:]
    old = checkpoint.params_text(newest[0]) if newest else None
    if old is None or not task.change(old, params.to_text()).touches("eval.split"):
        return logdir / EVALUATIONS
    return logdir / f"{EVALUATIONS}_{re.sub('[^A-Za-z0-9_.-]+', '_', params.eval.split)}"


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
    reader = Reader(params, str(which if logdir is None else logdir / log_directory.CHECKPOINTS))
    for folder in restoring.folders(logdir, which):
        reader.check_assets(folder)
    found = reader.evaluate(which, should_stop)
    if found is not None:
        report(found.line())
        if logdir is not None:
            reader.write(logdir, found)
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

    A checkpoint that is newer than the one at work is taken next; older ones are left out. The
    best by `eval.best` is kept in the run's folder `best`, unless the run keeps its own there.

    Args:
        params: a `Task.Params`; the run is over with `train.max_steps`, or when it says so.
        logdir: of the run; it may not be there yet.
        report: takes a line per checkpoint.
        should_stop: asked between mini-batches and while waiting.
        wait: sleeps for some seconds.

    Returns:
        All evaluations, without their vectors and matrices.
    """
    task.check(params)
    directory = str(logdir / log_directory.CHECKPOINTS)
    reader = Reader(params, directory)
    best = (
        None
        if params.eval.best is None
        else _Best(logdir / log_directory.BEST, params.eval, reader)
    )
    found: list[Evaluation] = []
    while not should_stop():
        over = log_directory.is_over(logdir)
        newest = checkpoint.find(directory)[-1:]
        step = checkpoint.step_of(newest[0]) if newest else -1
        if newest and (not found or step > found[-1].step):
            reader.check_assets(logdir)  # which a run keeps before its first checkpoint
            try:
                told = reader.evaluate(newest[0], should_stop)
            except errors.CheckpointError:
                if os.path.exists(f"{newest[0]}.index"):
                    raise
                continue  # a newer one has taken its place meanwhile
            if told is None:
                break
            found.append(dataclasses.replace(told, others={}))
            report(told.line())
            reader.write(logdir, told)
            if best is not None:
                best.consider(newest[0], told, report)
        elif over or step >= params.train.max_steps:
            break
        else:
            wait(_POLL_S)
    return found


class _Best:
    """Keeps the best checkpoint of a run that does not evaluate itself."""

    def __init__(self, directory: Path, params: task.Eval, reader: Reader) -> None:
        """Begin; the reader evaluates the best one that is there already, once it matters."""
        self._directory = str(directory)
        self._name = str(params.best)
        self._sign = 1.0 if task.highest_is_best(params) else -1.0
        self._reader = reader
        self._value: float | None = None

    def consider(self, prefix: str, told: Evaluation, report: Callable[[str], None]) -> None:
        """Keep a checkpoint if it is better than all before."""
        value = self._sign * told.number(self._name)
        if self._value is not None and not value > self._value:
            return
        try:
            if _keeps_best(prefix):
                return
            if self._value is None:
                self._value = self._present()
            if not value > self._value:
                return
            checkpoint.keep_only(prefix, self._directory)
        except errors.CheckpointError as error:
            if os.path.exists(f"{prefix}.index"):  # or a newer one has taken its place meanwhile
                report(str(error))
            return
        self._value = value

    def _present(self) -> float:
        """Return the value of the one that is there, whoever has kept it."""
        for prefix in checkpoint.find(self._directory)[-1:]:
            if (told := self._reader.evaluate(prefix)) is not None:
                return self._sign * told.number(self._name)
        return -math.inf


def _keeps_best(prefix: str) -> bool:
    """Tell whether the run of a checkpoint evaluates, and so keeps its best one itself.

    One that does not says so (`eval/step` is -1), and hands on the value of a run that did.
    """
    return bool(
        checkpoint.read_value(prefix, "eval/step") >= 0
        and np.isfinite(checkpoint.read_value(prefix, "best/value"))
    )


def write(
    writer: summaries.Writer, folder: Path, found: Evaluation, classes: tuple[str, ...]
) -> None:
    """Put an evaluation on TensorBoard, and what it found per class into `per_class.txt`.

    Args:
        writer: of the folder.
        folder: of the run's evaluations.
        found: what is written.
        classes: their names; none: not known.
    """
    # Names of folders may be no UTF-8; curves and pictures need text that is.
    classes = tuple(
        name.encode(errors="surrogateescape").decode(errors="replace") for name in classes
    )
    writer.scalars(found.step, found.values | found.curves | found.unread)
    for name, matrix in found.others.items():
        if not name.endswith(heads.CONFUSION):
            continue
        lines = confusion.table(matrix, classes)
        prefix = name.removesuffix(heads.CONFUSION)
        writer.text(found.step, f"{prefix}per_class", lines)
        writer.png(found.step, name, confusion.draw(matrix, classes))
        path = folder / f"{prefix.replace('/', '_')}per_class.txt"
        partial = path.with_name(f"{path.name}.writing")
        try:
            partial.write_text(f"step {found.step}\n{lines}\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            logging.warning("%s cannot be written: %s", path, error.strerror)
    writer.flush()
