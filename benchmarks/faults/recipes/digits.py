"""The digits network, small and often saved, with an input that notes what the run is doing."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.faults import notes
from lingvo_gpipe import registry
from lingvo_gpipe.input import Batch, Repair
from lingvo_gpipe.params.image import digits
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import SklearnDigits

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
                notes.write(notes.EVALUATION if seed is None else notes.TRAINING)
                yield batch
            notes.write(notes.EVALUATED)

        return noted


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
