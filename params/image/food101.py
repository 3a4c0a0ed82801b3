"""Food-101: 75,750 + 25,250 photographs of 101 dishes; TFDS calls the latter `validation`."""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import TFDS


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) from ImageNet, at 480²: 93.0 % (GP); see `reference.fine_tuning`."""

    num_cells = 18
    filters = 512

    def task(self) -> Task.Params:
        """Return the task."""
        # UNKNOWN: cutout's side; a quarter of the image's.
        source = TFDS.Params(name="food101", **reference.resized(cutout=120))
        return reference.fine_tuning(self, source, classes=101, split="validation")
