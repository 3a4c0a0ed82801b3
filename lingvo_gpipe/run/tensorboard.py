"""TensorBoard's files of a run: curves, texts and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.plan import describe, step_plan
from lingvo_gpipe.run import pictures
from lingvo_gpipe.run.learner import Learner, UpdateResult
from lingvo_gpipe.schedule import drawing
from lingvo_gpipe.task import Task

if TYPE_CHECKING:
    from lingvo_gpipe.run.evaluation import Evaluation

EVALUATIONS = "eval"
"""Folder of a run, for its evaluations."""
_MARKDOWN_SIGNS = {ord(sign): f"&#{ord(sign)};" for sign in "&<>\\`*_~{}[]()#+!|:-."}


class Writer:
    """Writes one folder of TensorBoard; several in one logdir are shown side by side.

    If curves cannot be written (a full disk), this is logged once and the run continues without
    them.
    """

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which is created when the first value is written."""
        self._folder = folder
        self._writer: tf.summary.SummaryWriter = None
        self._is_broken = False
        self._do(self._open)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Write scalars under their names."""

        def write() -> None:
            for name, value in values.items():
                tf.summary.scalar(name, value)

        self._write(step, write)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text unchanged, in a fixed-width block."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step, lambda: tf.summary.text(name, block))

    def markdown(self, step: int, name: str, text: str) -> None:
        """Write a text in Markdown, such as a table."""
        self._write(step, lambda: tf.summary.text(name, text))

    def png(self, step: int, name: str, picture: bytes) -> None:
        """Write a picture from the bytes of its PNG file."""
        self._write(step, lambda: tf.summary.image(name, tf.io.decode_png(picture)[tf.newaxis]))

    def images(self, step: int, name: str, images: tf.Tensor) -> None:
        """Write images, uint8 [n, H, W, C], side by side."""
        self._write(step, lambda: tf.summary.image(name, images, max_outputs=len(images)))

    def flush(self) -> None:
        """Flush what was written to the disk."""
        self._do(lambda: self._writer.flush())

    def close(self) -> None:
        """Write what is left and close the file."""
        self._do(lambda: self._writer.close())

    def _open(self) -> None:
        self._writer = tf.summary.create_file_writer(str(self._folder))

    def _write(self, step: int, write: Callable[[], object]) -> None:
        def within() -> None:
            with self._writer.as_default(step=step):
                write()

        self._do(within)

    def _do(self, action: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            action()
        except tf.errors.OpError as error:
            self._is_broken = True
            reason = errors.without_graph_names(error.message).splitlines()[0]
            logging.warning("TensorBoard receives no more curves of this run: %s", reason)


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


class RunWriters:
    """TensorBoard's files of a run: training and evaluation side by side.

    Attributes:
        train: writes those of training.
    """

    def __init__(
        self, logdir: Path, learner: Learner, params: Task.Params, classes: tuple[str, ...]
    ) -> None:
        """Write what is known before training: params, model and schedule.

        The schedule is a picture by estimated times.

        Args:
            logdir: log directory of the run.
            learner: the network in training.
            params: params of the run.
            classes: names of the classes; empty: unknown.
        """
        self.train = Writer(logdir / "train")
        self._eval = Writer(logdir / EVALUATIONS)
        self._classes = classes
        self._learner = learner
        pipe, step = learner.pipe, int(learner.step.numpy())
        planned = step_plan.make(pipe.params, pipe.analysis.fields).timeline
        self._planned_bubble = planned.bubble_share
        self.train.text(step, "params", params.to_text())
        costs = [info.params.cost for info in pipe.analysis.layers]
        unit = "FLOPs" if all(cost is None for cost in costs) else " of stated cost"
        self.train.png(step, "schedule", drawing.draw(planned, unit=unit))
        self.train.text(step, "model", describe.describe_network(pipe.params, pipe.analysis.fields))

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

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation."""
        write_evaluation(self._eval, evaluation, self._classes)

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self._eval.close()


def write_evaluation(writer: Writer, evaluation: Evaluation, classes: tuple[str, ...]) -> None:
    """Write an evaluation to TensorBoard.

    Args:
        writer: writer of the folder.
        evaluation: what is written.
        classes: names of the classes; empty: unknown.
    """
    # Class names come from folder names, which may not be UTF-8; curves and pictures need UTF-8.
    classes = tuple(
        name.encode(errors="surrogateescape").decode(errors="replace") for name in classes
    )
    step = evaluation.step
    writer.scalars(step, evaluation.numbers)
    for name, text in evaluation.texts.items():
        writer.markdown(step, name, text)
    if evaluation.examples:
        writer.png(step, "examples", pictures.of_examples(evaluation.examples, classes))
    writer.flush()


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or warn: the run does not need it."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        logging.warning("%s cannot be written: %s", path, error.strerror)


def markdown_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Return a table in Markdown; texts are shown as they are, whatever signs they hold.

    Args:
        headings: headings of its columns.
        rows: as many texts in each.
        numbers: columns that are aligned to the right.

    >>> print(markdown_table(["layer", "size"], [["a_b", "3"]], numbers=[1]))
    | layer | size |
    | --- | ---: |
    | a&#95;b | 3 |
    """
    rules = ["---:" if column in numbers else "---" for column in range(len(headings))]
    lines = [[markdown_text(text) for text in row] for row in (headings, *rows)]
    lines.insert(1, rules)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(text: str) -> str:
    """Return a text on one line, without signs that Markdown reads."""
    return " ".join(text.split()).translate(_MARKDOWN_SIGNS)
