"""A folder of images of your own, `--data_dir=FOLDER`: FOLDER/train/cat/1.jpg."""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference, small
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import ImageFolder


class AmoebaNetSmall(registry.Model):
    """An AmoebaNet of some 0.2M parameters, with as many classes as the folder has.

    It has the weights of `image.cifar10.AmoebaNetSmallFolder` except its heads, so with
    `--checkpoint` it is fine-tuned from that one.
    """

    num_cells = small.NUM_CELLS
    filters = small.FILTERS
    image_size = 32

    def task(self) -> Task.Params:
        """Return the task."""
        source = ImageFolder.Params(
            data_dir="data/images", resize=True, **small.augmented(self.image_size)
        )
        task = small.classifier(self, source, classes=None, steps=240)
        task.train.start.without = reference.HEADS
        return task
