"""FGVC Aircraft: 6,667 + 3,333 photographs of 100 variants.

TFDS lacks it: docs/image_models.md says how to lay it out.
"""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import ImageFolder


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) from ImageNet, at 480²: 92.7 % (GP); see `reference.fine_tuning`."""

    num_cells = 18
    filters = 512

    def task(self) -> Task.Params:
        """Return the task."""
        # UNKNOWN: cutout's side; a quarter of the image's.
        source = ImageFolder.Params(data_dir="data/aircraft", **reference.resized(cutout=120))
        return reference.fine_tuning(self, source, classes=100)
