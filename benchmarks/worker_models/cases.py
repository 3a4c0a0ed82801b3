"""Networks over workers: many variables, long steps, a table that is tied."""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import digits
from lingvo_gpipe.params.mt import django
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image.model import convnet
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.model import transformer


class AmoebaNet(digits.AmoebaNet):
    """AmoebaNet-D (6, 16): 1,000 variables, slots counted."""

    num_cells = 6
    filters = 16


class MLP(registry.Model):
    """Dense layers between 512 and 1024 as in `support.blocks`; all images in a mini-batch."""

    def task(self) -> Task.Params:
        """Return the task."""
        task = digits.MLP().task()
        task.model.layers = convnet.mlp([512, *[1024, 512] * 4], classes=10, dropout=0.0)
        task.model.set(num_partitions=2, num_micro_batches=16)
        task.input.batch_size = 1437
        return task


class Transformer(django.Tiny):
    """T(2, 1024, 4) of 256 units with one table, 8,192 tokens to a mini-batch."""

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task, without averages."""
        task = super().task()
        sizes = transformer.TranslationTransformer(
            num_layers=2,
            hidden=1024,
            heads=4,
            vocabulary=django.VOCABULARY,
            units=256,
            tie="all",
            packed=True,
        )
        task.model.layers = transformer.translation_transformer(sizes)
        task.model.num_micro_batches = 16
        task.input.set(batch_size=8192, multiple_of=16)
        task.train.average = None
        return task
