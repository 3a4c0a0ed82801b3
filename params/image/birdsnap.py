"""Birdsnap: 47,386 + 2,443 photographs of 500 species.

TFDS lacks it: docs/image_models.md says how to lay it out.
"""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import ImageFolder


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) from ImageNet, at 480²: 83.6 % (GP); see `reference.fine_tuning`."""

    num_cells = 18
    filters = 512

    def task(self) -> Task.Params:
        """Return the task."""
        # UNKNOWN: cutout's side; a quarter of the image's.
        source = ImageFolder.Params(data_dir="data/birdsnap", **reference.resized(cutout=120))
        return reference.fine_tuning(self, source, classes=500)
