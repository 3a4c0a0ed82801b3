"""CIFAR-100: 32 × 32 colour images in a hundred classes."""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import TFDS


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) from ImageNet, at 480²: 91.3 % (GP); see `reference.fine_tuning`."""

    num_cells = 18
    filters = 512

    def task(self) -> Task.Params:
        """Return the task."""
        # UNKNOWN: cutout's side; a quarter of the image's, as 8 of 32 pixels in its paper.
        source = TFDS.Params(name="cifar100", **reference.resized(cutout=120))
        return reference.fine_tuning(self, source, classes=100)
