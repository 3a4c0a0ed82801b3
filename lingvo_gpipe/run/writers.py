"""TensorBoard's files of a run: training and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.layers.objectives import heads
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.run import summaries
from lingvo_gpipe.run.checkpoints import Written
from lingvo_gpipe.run.evaluation import Evaluation
from lingvo_gpipe.run.learner import Learner, UpdateResult
from lingvo_gpipe.run.views import confusion, example_grid, model_table, planned_rate
from lingvo_gpipe.schedule import drawing
from lingvo_gpipe.task import Task

EVALUATIONS = "eval"
"""Folder of a run, for its evaluations."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """An update and the time it took; values are copied from their devices when they are used.

    Attributes:
        result: result of the update.
        num_rows: number of rows of its mini-batches.
        unread: number of examples so far that could not be read, by what was done with them.
        input_s: seconds of waiting for the mini-batches.
        step_s: seconds of the update.
    """

    result: UpdateResult
    num_rows: int
    unread: Mapping[str, int]
    input_s: float
    step_s: float

    @property
    def loss(self) -> float:
        """Loss of the update."""
        return float(self.result.loss)

    def scalars(self) -> dict[str, float]:
        """Return the curves of the update, by name."""
        whole_s = self.input_s + self.step_s
        losses = self.result.losses
        values = {"loss": self.result.loss}
        values |= {f"loss/{name}": value for name, value in losses.items() if len(losses) > 1}
        values |= {name: v for name, v in self.result.scalars.items() if name != "finite"}
        weights = map(float, self.result.weights.values())
        return {
            **{name: float(value) for name, value in values.items()},
            **{name: float(count) for name, count in self.unread.items()},
            # Rows of translation mini-batches, including rows that only fill them.
            "examples_per_second": self.num_rows / whole_s,
            # Labelled examples, or tokens: rows that only fill a mini-batch have weight 0.
            "weight_per_second": max(weights, default=0.0) / whole_s,
            "input_wait_share": self.input_s / whole_s,
        }


class Writers:
    """TensorBoard's files of a run: training and evaluation side by side.

    Attributes:
        train: writes those of training.
    """

    def __init__(
        self, logdir: Path, learner: Learner, params: Task.Params, classes: tuple[str, ...]
    ) -> None:
        """Start with what is known of the run: params, model, schedule, learning rates.

        The schedule is a picture by estimated times.

        Args:
            logdir: log directory of the run.
            learner: the network in training.
            params: params of the run.
            classes: names of the classes; empty: unknown.
        """
        self.train = summaries.Writer(logdir / "train")
        self._classes = classes
        self._folder = logdir / EVALUATIONS
        self._eval = summaries.Writer(self._folder)
        self._learner = learner
        pipe = learner.pipe
        planned = step_plan.make(pipe.params, pipe.analysis.fields).timeline
        self._planned_bubble = planned.bubble_share
        step = int(learner.step.numpy())
        self.train.text(step, "params", params.to_text())
        stated = [pipe.params.costs, *(info.params.cost for info in pipe.analysis.layers)]
        unit = "FLOPs" if all(cost is None for cost in stated) else "of stated cost"
        self.train.png(step, "schedule", drawing.draw(planned, unit=unit))
        self.train.markdown(step, "model", model_table.table(pipe.analysis))
        if step == 0:
            rates = planned_rate.points(learner.updater.optimizer, params.train.max_steps)
            for planned_step, rate in rates.items():
                self.train.scalars(planned_step, {"learning_rate_planned": rate})

    def curves(self, report: StepReport) -> dict[str, float]:
        """Return the points of an update's curves, by name."""
        points = report.scalars()
        for name, total in report.result.sums.items():
            metric = self._learner.pipe.analysis.metrics[name]
            result = np.asarray(metric.finish(total))
            points |= metric.curves(result) if result.ndim else {name: float(result)}
        return points | {
            "bubble_share_planned": self._planned_bubble,
            "traces": float(self._learner.num_traces),
        }

    def update(self, step: int, curves: Mapping[str, float]) -> None:
        """Write the points of an update's curves."""
        self.train.scalars(step, curves)

    def checkpoints(self, written: Iterable[Written]) -> None:
        """Write what checkpoints cost."""
        for one in written:
            costs = {
                "checkpoint/waited_s": one.waited_s,
                "checkpoint/written_s": one.written_s,
                "checkpoint/mib": one.num_bytes / 2**20,
            }
            self.train.scalars(one.step, costs)

    def constants(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the data."""
        self.train.scalars(step, values)

    def pictures(self, step: int, samples: Mapping[str, tf.Tensor]) -> None:
        """Write samples of a mini-batch."""
        for name, images in samples.items():
            self.train.images(step, name, images)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation."""
        write_evaluation(self._eval, self._folder, evaluation, self._classes)

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self._eval.close()


def write_evaluation(
    writer: summaries.Writer, folder: Path, evaluation: Evaluation, classes: tuple[str, ...]
) -> None:
    """Write an evaluation to TensorBoard, and its results by class to `per_class.txt`.

    Args:
        writer: writer of the folder.
        folder: folder of the run's evaluations.
        evaluation: what is written.
        classes: names of the classes; empty: unknown.
    """
    # Class names come from folder names, which may not be UTF-8; curves and pictures need UTF-8.
    classes = tuple(
        name.encode(errors="surrogateescape").decode(errors="replace") for name in classes
    )
    writer.scalars(evaluation.step, evaluation.values | evaluation.curves | evaluation.unread)
    for name, text in evaluation.texts.items():
        writer.markdown(evaluation.step, name, text)
    if evaluation.texts:
        writer.scalars(evaluation.step, {"texts_s": evaluation.texts_s})
    if evaluation.examples:
        writer.png(evaluation.step, "examples", example_grid.draw(evaluation.examples, classes))
    for name, matrix in evaluation.arrays.items():
        if not name.endswith(heads.CONFUSION):
            continue
        lines = confusion.table(matrix, classes)
        prefix = name.removesuffix(heads.CONFUSION)
        writer.text(evaluation.step, f"{prefix}per_class", lines)
        writer.png(evaluation.step, name, confusion.draw(matrix, classes))
        path = folder / f"{prefix.replace('/', '_')}per_class.txt"
        partial = path.with_name(f"{path.name}.writing")
        try:
            partial.write_text(f"step {evaluation.step}\n{lines}\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            logging.warning("%s cannot be written: %s", path, error.strerror)
    writer.flush()
