"""The digits network, small and often saved, with an input that notes what the run is doing.

The notes go to the file that `LINGVO_GPIPE_FAULTS` names: a line "TIME PID WHAT" when a mini-batch
of training or of an evaluation is drawn, and when an evaluation has drawn its last one. TIME is of
the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from lingvo_gpipe import registry
from lingvo_gpipe.input import Batch, Repair
from lingvo_gpipe.params.image import digits
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import SklearnDigits

NOTES = "LINGVO_GPIPE_FAULTS"
TRAINING, EVALUATION, EVALUATED = "training", "evaluation", "evaluated"
STEPS = 60
SAVE_EVERY = 5
EVALUATE_EVERY = 10


class NotingDigits(SklearnDigits):
    """The digits; each mini-batch that is drawn is noted."""

    class Params(SklearnDigits.Params):
        """Params of NotingDigits."""

    def repair(self, split: str, seed: int | None) -> Repair:
        """Return what notes mini-batches as they are drawn."""
        del split

        def noted(batches: Iterator[Batch], counts: dict[str, int]) -> Iterator[Batch]:
            del counts
            for batch in batches:
                note(EVALUATION if seed is None else TRAINING)
                yield batch
            note(EVALUATED)

        return noted


def note(what: str) -> None:
    """Write a note, if there is a file for it."""
    if path := os.environ.get(NOTES):
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{time.monotonic():.4f} {os.getpid()} {what}\n")


class ConvNet(registry.Model):
    """`image.digits.ConvNet` with a checkpoint every 5 steps and an evaluation every 10."""

    def task(self) -> Task.Params:
        """Return the task."""
        task = digits.ConvNet().task()
        task.input = NotingDigits.Params(batch_size=task.input.batch_size, eval_batch_size=16)
        task.train.max_steps = STEPS
        task.train.save_interval_steps = SAVE_EVERY
        task.eval.interval_steps = EVALUATE_EVERY
        return task
