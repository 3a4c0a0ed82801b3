"""Evaluation: a network's losses and metrics over a whole split of the data.

`evaluate` takes the weights that a network has, `run` those of a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.console.progress import Count
from lingvo_gpipe.input import Batches, Input, Reading, synthetic
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import parts
from lingvo_gpipe.run import checkpoints, log_directory, restoring, tensorboard, worker_input
from lingvo_gpipe.run.examples import Example, Examples
from lingvo_gpipe.task import Task, Texts

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        step: number of updates of the weights.
        values: name → number: metrics, then `loss`, then each loss of several as `loss/name`.
        arrays: name → vector or matrix, of metrics that are not a number.
        num_rows: rows of all mini-batches: examples, or the rows into which translation puts them.
        curves: `name/label` → number, of vectors whose elements have names.
        unread: number of examples that could not be read, by what was done (`left_out`).
        examples: the examples that are shown, with their predictions.
        texts: name in TensorBoard → Markdown.
    """

    step: int
    values: dict[str, float]
    arrays: dict[str, Array]
    num_rows: int
    curves: dict[str, float] = dataclasses.field(default_factory=dict)
    unread: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    texts: dict[str, str] = dataclasses.field(default_factory=dict)

    def number(self, name: str) -> float:
        """Return the value of the number that `eval.best` names.

        Raises:
            ParamsError: there is no number of this name.
        """
        if name not in self.values:
            raise errors.ParamsError(
                f"eval.best names {name!r}, which is not a single number, so checkpoints cannot be "
                f"compared. Name one of {', '.join(self.values)}"
            )
        return self.values[name]

    @property
    def numbers(self) -> dict[str, float]:
        """Name → number, of all that is shown as a curve."""
        return self.values | self.curves | self.unread

    def line(self) -> str:
        """Return all numbers on one line, `eval step=100 accuracy=0.9861 loss=0.0543`."""
        numbers = [f"{name}={value:.4f}" for name, value in self.values.items()]
        numbers += [f"{name}={count}" for name, count in self.unread.items() if count]
        return f"eval step={self.step} {' '.join(numbers)}"

    def lines(self) -> Iterator[str]:
        """Yield `line`, and a warning if a number is not finite."""
        yield self.line()
        names = [name for name, value in self.values.items() if not math.isfinite(value)]
        if names:
            yield (
                f"the evaluation of step {self.step} is not finite ({', '.join(names)}): its data, "
                "or a weight, holds a NaN or an infinity. No such evaluation is the best one"
            )


def evaluate(
    pipe: pipelining.PipeliningLayer,
    batches: Iterable[Mapping[str, Nest]],
    *,
    step: int,
    metrics: tuple[str, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Iterable[Mapping[str, Nest]]], Iterable[Mapping[str, Nest]]] = iter,
    examples: Examples | None = None,
) -> Evaluation | None:
    """Evaluate a network on `batches`; every example has equal weight, for any batch sizes.

    Args:
        pipe: the network, with its current weights.
        batches: mini-batches of any sizes.
        step: number of updates of the weights.
        metrics: names of the metrics to return; empty: all.
        should_stop: called between mini-batches.
        watch: yields the same mini-batches, and watches the time from one to the next.
        examples: chooses examples that are shown; None: none are.

    Returns:
        The evaluation; None if it was stopped.

    Raises:
        InputError: there is no batch.
    """
    totals: dict[str, np.float64] = {}
    weights: dict[str, np.float64] = {}
    sums: dict[str, Nest] | None = None
    count = 0
    step_tensor = tf.constant(step, tf.int64)
    with Count("evaluating", "mini-batch", _number_of(batches), passing=True) as counted:
        for batch in counted.over(watch(batches)):
            if should_stop():
                return None
            shown = examples if examples is not None and examples.reads_outputs(batch) else None
            result = pipe.evaluate(batch, step=step_tensor, outputs=shown is not None)
            if shown is not None:
                shown.add(batch, result.outputs)
            loss_weights = pipe.loss_weights(batch)
            for name, mean in result.losses.items():
                weight = np.float64(loss_weights[name])
                totals[name] = totals.get(name, np.float64(0)) + weight * np.float64(mean)
                weights[name] = weights.get(name, np.float64(0)) + weight
            wide = tf.nest.map_structure(_wide, result.sums)
            sums = wide if sums is None else tf.nest.map_structure(np.add, sums, wide)
            count += parts.num_examples(batch)
    if count == 0:
        raise errors.InputError("there is no example to evaluate. Check eval.split")
    means = {n: float(totals[n] / weights[n]) if weights[n] else 0.0 for n in totals}
    dtypes = tf.nest.map_structure(lambda tensor: tensor.dtype, result.sums)
    sums = tf.nest.map_structure(tf.constant, sums, dtypes)
    unread = dict(batches.counts) if isinstance(batches, Reading) else {}
    chosen = () if examples is None else examples.chosen()
    empty = Evaluation(step, {}, {}, count, unread=unread, examples=chosen)
    return _finished(pipe, means, sums, metrics, empty)


def _number_of(batches: Iterable[object]) -> int | None:
    """Return the number of mini-batches, where it is known before they are read."""
    number = int(batches.dataset.cardinality()) if isinstance(batches, Batches) else -1
    return number if number >= 0 else None


def _wide(tensor: tf.Tensor) -> Array:
    """Return a sum in a dtype in which millions of examples can be added exactly."""
    return np.asarray(tensor).astype(np.float64 if tensor.dtype.is_floating else np.int64)


def _finished(
    pipe: pipelining.PipeliningLayer,
    means: dict[str, float],
    sums: dict[str, Nest],
    metrics: tuple[str, ...],
    empty: Evaluation,
) -> Evaluation:
    """Return `empty` with the values of these mean losses and summed metrics."""
    finished = {
        name: np.asarray(pipe.analysis.metrics[name].finish(sums[name])) for name in metrics or sums
    }
    values = {name: float(result) for name, result in finished.items() if result.ndim == 0}
    arrays = {name: result for name, result in finished.items() if result.ndim}
    coefficients = {loss.name: loss.coefficient for loss in pipe.analysis.losses}
    values["loss"] = sum(coefficients[name] * mean for name, mean in means.items())
    if len(means) > 1:
        values |= {f"loss/{name}": mean for name, mean in means.items()}
    curves: dict[str, float] = {}
    for name, result in arrays.items():
        curves |= pipe.analysis.metrics[name].curves(result)
    return dataclasses.replace(empty, values=values, arrays=arrays, curves=curves)


def check_names(pipe: pipelining.PipeliningLayer, params: task.Eval) -> None:
    """Refuse names of metrics that the network does not have.

    Raises:
        ParamsError: names the nearest.
    """
    losses = [loss.name for loss in pipe.analysis.losses if not loss.training_only]
    vectors = {metric.name for metric in pipe.analysis.metrics.values() if metric.labels}
    numbers = [name for name in params.metrics or pipe.analysis.metrics if name not in vectors]
    known = [*numbers, "loss", *(f"loss/{name}" for name in losses if len(losses) > 1)]
    for path, names, allowed in (
        ("eval.metrics", params.metrics, list(pipe.analysis.metrics)),
        ("eval.best", () if params.best is None else (params.best,), known),
    ):
        for name in names:
            if name not in allowed:
                raise errors.ParamsError(
                    f"{path} names {name!r}, which the network does not compute; "
                    f"{errors.suggestion(name, allowed)}"
                )


def texts_of(
    params: Task.Params,
    pipe: pipelining.PipeliningLayer,
    source: Input,
    report: Callable[[str], None],
) -> Texts:
    """Return what makes the texts that a task shows of its weights, such as translations.

    Args:
        params: params of the task.
        pipe: the network.
        source: the input of the task.
        report: receives a line if this task can show none.
    """
    try:
        texts = params.instantiate().texts(pipe, source)
    except errors.UserError as error:
        report(f"evaluations show no texts: {error}")
        texts = None
    return texts or dict


# --- evaluation of checkpoints --------------------------------------------------------------------


def folder_of(logdir: Path, params: Task.Params) -> Path:
    """Return where evaluations of a run are written: `eval`, or `eval_SPLIT`.

    `eval_SPLIT` is for a split other than that of the run, which the newest checkpoint names. So
    no curve mixes two splits.

    Args:
        logdir: log directory of the run.
        params: params of the task, by which it is evaluated.
    """
    newest = None
    with contextlib.suppress(errors.CheckpointError):  # reported when it is restored
        newest = checkpoints.newest_text(str(logdir / log_directory.CHECKPOINTS))
    if newest is None or not task.change(newest[1], params.to_text()).touches("eval.split"):
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
    """Evaluate a checkpoint, report the result on one line and write it into the log directory.

    Averages are used as weights if training keeps them.

    Args:
        params: params of the task, complete or not.
        logdir: log directory of the run; None: `which` names the checkpoint, and nothing is
            written.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.
        report: receives each line that a user should read.
        should_stop: called between mini-batches.

    Returns:
        The evaluation; None if it was stopped.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit.
        TrainingError: the data is not that of the run.
    """
    task.check(params)
    for line in synthetic.notices(params):
        report(line)
    source: Input = params.input.instantiate()
    params = task.complete(params, source)
    pipe: pipelining.PipeliningLayer = params.model.instantiate()
    pipe.build(source.element_spec(training=True))
    check_names(pipe, params.eval)
    for folder in log_directory.folders(logdir, which):
        log_directory.check_assets(folder, source.assets())
    restored = restoring.restore(pipe.by_path, pipe.analysis, params, logdir=logdir, which=which)
    reader = worker_input.source_of(source, pipe.executor, report)
    evaluated = evaluate(
        pipe,
        reader.evaluation(params.eval.split),
        step=restored.step,
        metrics=params.eval.metrics,
        should_stop=should_stop,
        examples=Examples(pipe, source, params.eval.examples),
    )
    if evaluated is None:
        return None
    for line in evaluated.lines():
        report(line)
    if logdir is not None:
        texts = texts_of(params, pipe, source, report)()
        shown = dataclasses.replace(evaluated, texts=dict(texts))
        writer = tensorboard.Writer(folder_of(logdir, params))
        tensorboard.write_evaluation(writer, shown, source.class_names)
    return evaluated
