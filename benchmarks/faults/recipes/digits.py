"""The digits network, small and often saved, with an input that notes what the run is doing."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from benchmarks.faults import notes
from lingvo_gpipe import registry
from lingvo_gpipe.input import Batch, Batches
from lingvo_gpipe.params.image import digits
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import SklearnDigits

SAVE_EVERY = 5
EVALUATE_EVERY = 10


class NotingDigits(SklearnDigits):
    """The digits; each mini-batch that is drawn is noted."""

    class Params(SklearnDigits.Params):
        """Params of NotingDigits."""

    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the mini-batches of training; each that is drawn is noted."""
        return _Noted(super().batches(seed, position).dataset, notes.TRAINING)

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return the mini-batches of an evaluation; each that is drawn is noted."""
        return _Noted(super().evaluation(split, batch_size).dataset, notes.EVALUATION)


class _Noted(Batches):
    """Mini-batches that are noted as they are drawn."""

    def __init__(self, dataset: tf.data.Dataset, note: str) -> None:
        super().__init__(dataset)
        self._note = note

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read."""
        for batch in super().__iter__():
            notes.write(self._note)
            yield batch
        notes.write(notes.EVALUATED)


class ConvNet(registry.Model):
    """`image.digits.ConvNet` with a checkpoint every 5 steps and an evaluation every 10."""

    def task(self) -> Task.Params:
        """Return the task."""
        task = digits.ConvNet().task()
        task.input = NotingDigits.Params(batch_size=task.input.batch_size, eval_batch_size=16)
        task.train.max_steps = notes.STEPS
        task.train.save_interval_steps = SAVE_EVERY
        task.eval.interval_steps = EVALUATE_EVERY
        return task
