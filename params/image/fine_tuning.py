"""AmoebaNet-B (18, 512) from ImageNet to another set, at 480²: section 4 of the GPipe paper.

Known (GP): a new softmax, everything else restored; resize to 480², flip, cutout; the
hyper-parameters of ImageNet; the mean of five runs, single crop.

UNKNOWN: mini-batch, length, rate, cutout's size, whether the aspect is kept, drop-path, M. Chosen:
20,000 updates, which is what Kornblith et al. 2019 (1805.08974) give each of these sets; the first
rate of ImageNet's recipe, which falls to a hundredth in stairs of 0.97; its drop-path; cutout of a
quarter of the image's side, as 8 of 32 pixels in its paper; images are resized without regard to
their aspect, as in REF's evaluation. GP, REF: see `reference`.
"""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Eval, Task
from lingvo_gpipe.tasks.image import TFDS, ImageFolder, Images


class _FineTuned(registry.Model):
    """A recipe; `_source` and `_classes` say on which set."""

    num_cells = 18
    filters = 512
    _source: Images.Params
    _classes: int
    _split = "test"
    _cutout = 120

    def task(self) -> Task.Params:
        """Return the task."""
        steps = 20_000
        rate = optim.WarmupStaircase.Params(
            peak=0.06, warmup_steps=500, decay=0.97, decay_steps=132.0, floor=1e-4
        )
        train = reference.train(rate, max_steps=steps, save_interval_steps=1_000, clip_norm=10.0)
        train.start.without = reference.HEADS
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=reference.by_library(
                    "B", self.num_cells, self.filters, self._classes, max_steps=steps
                ),
                num_partitions=4,
                num_micro_batches=32,
                dtype="mixed_bfloat16",
            ),
            input=self._source.copy().set(
                batch_size=128,
                height=480,
                width=480,
                resize=True,
                antialias=False,
                mean=(0.5, 0.5, 0.5),  # pixels in [-1, 1]
                std=(0.5, 0.5, 0.5),
                flip=True,
                cutout=self._cutout,
            ),
            train=train,
            eval=Eval(split=self._split, best="accuracy"),
        )


class Cifar10(_FineTuned):
    """CIFAR-10, 50,000 + 10,000 images of ten classes: 99.0 % (GP)."""

    _source = TFDS.Params(name="cifar10")
    _classes = 10
    _cutout = 240  # half of the image's side, as 16 of 32 pixels in its paper


class Cifar100(_FineTuned):
    """CIFAR-100, 50,000 + 10,000 images of a hundred classes: 91.3 % (GP)."""

    _source = TFDS.Params(name="cifar100")
    _classes = 100


class Cars196(_FineTuned):
    """Stanford Cars, 8,144 + 8,041 photographs of 196 models: 94.6 % (GP)."""

    _source = TFDS.Params(name="cars196")
    _classes = 196


class OxfordPets(_FineTuned):
    """Oxford-IIIT Pets, 3,680 + 3,669 photographs of 37 breeds: 95.9 % (GP).

    GP's 3,369 test images look like a slip; TFDS has 3,669.
    """

    _source = TFDS.Params(name="oxford_iiit_pet")
    _classes = 37


class Food101(_FineTuned):
    """Food-101, 75,750 + 25,250 photographs of 101 dishes: 93.0 % (GP)."""

    _source = TFDS.Params(name="food101")
    _classes = 101
    _split = "validation"  # TFDS' name of the test set


class Aircraft(_FineTuned):
    """FGVC Aircraft, 6,667 + 3,333 photographs of 100 variants: 92.7 % (GP).

    TFDS lacks it: docs/image_models.md says how to lay it out.
    """

    _source = ImageFolder.Params(data_dir="data/aircraft")
    _classes = 100


class Birdsnap(_FineTuned):
    """Birdsnap, 47,386 + 2,443 photographs of 500 species: 83.6 % (GP).

    TFDS lacks it: docs/image_models.md says how to lay it out.
    """

    _source = ImageFolder.Params(data_dir="data/birdsnap")
    _classes = 500
