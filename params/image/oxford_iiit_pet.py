"""Oxford-IIIT Pets: 3,680 + 3,669 photographs of 37 breeds.

GP's 3,369 test images look like a slip; TFDS has 3,669.
"""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import TFDS


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) from ImageNet, at 480²: 95.9 % (GP); see `reference.fine_tuning`."""

    num_cells = 18
    filters = 512

    def task(self) -> Task.Params:
        """Return the task."""
        # UNKNOWN: cutout's side; a quarter of the image's.
        source = TFDS.Params(name="oxford_iiit_pet", **reference.resized(cutout=120))
        return reference.fine_tuning(self, source, classes=37)
