"""ImageNet-2012 (1,281,167 training images, 1,000 classes): the models of the GPipe paper.

1,001 outputs, as in the reference: 0 is its background class, and labels are 1 to 1,000.
GP, REF, REAL: see `reference`.
"""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.params.image import reference
from lingvo_gpipe.task import Eval, Task
from lingvo_gpipe.tasks.image import TFDS

CLASSES = 1001
# TFDS has no labels of `test`; the 50,000 of `validation` are what papers report.
SPLIT = "validation"


class AmoebaNetB18x512(registry.Model):
    """AmoebaNet-B (18, 512) at 480², 557M parameters in four cells: 84.4 % top-1 (GP).

    Known (GP): the model, the image size, K = 4. "Hyper-parameters as REAL" is all that GP says of
    its training, and REAL states neither batch nor momentum nor warm-up: here they are REF's
    library defaults, which come from some of the same authors.

    UNKNOWN: mini-batch and M. Chosen: 128 images, as GP's Table 1, in 32 micro-batches, with REF's
    rate of 0.015 for 32 images scaled to them.
    """

    num_cells = 18
    filters = 512
    image_size = 480

    def task(self) -> Task.Params:
        """Return the task."""
        epoch = 10_009  # updates: 1,281,167 // 128
        steps = 100 * epoch
        rate = optim.WarmupStaircase.Params(
            peak=0.06, warmup_steps=3 * epoch, decay=0.97, decay_steps=2.4 * epoch, floor=1e-4
        )
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=reference.by_library(
                    "B", self.num_cells, self.filters, CLASSES, max_steps=steps
                ),
                num_partitions=4,
                num_micro_batches=32,
                dtype="mixed_bfloat16",
            ),
            input=_source(self.image_size, 128),
            train=reference.train(rate, max_steps=steps, save_interval_steps=epoch, clip_norm=10.0),
            eval=Eval(split=SPLIT, best="accuracy"),
        )


class _AmoebaNetD(registry.Model):
    """AmoebaNet-D at 224² in mini-batches of 128, as GP's Table 1.

    Known (GP): (L, D), image size, mini-batch, K. UNKNOWN: M (here 32), and every hyper-parameter:
    here REF's command-line defaults, its rate of 0.64 for 256 images scaled to 128.
    """

    num_cells = 18
    filters = 256
    image_size = 224
    num_partitions = 1
    num_micro_batches = 32
    _recompute = "full"

    def task(self) -> Task.Params:
        """Return the task."""
        epoch = 10_009  # updates: 1,281,167 // 128
        rate = optim.WarmupStaircase.Params(
            peak=0.32, warmup_steps=3 * epoch, decay=0.9, decay_steps=float(epoch), floor=1e-4
        )
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=reference.by_command_line("D", self.num_cells, self.filters, CLASSES),
                num_partitions=self.num_partitions,
                num_micro_batches=self.num_micro_batches,
                recompute=self._recompute,
                dtype="mixed_bfloat16",
            ),
            input=_source(self.image_size, 128),
            train=reference.train(rate, max_steps=48 * epoch, save_interval_steps=epoch),
            eval=Eval(split=SPLIT, best="accuracy"),
        )


class AmoebaNetD18x208(_AmoebaNetD):
    """AmoebaNet-D (18, 208), 82M parameters: "Naive-1" of Table 1, no micro-batches, all kept."""

    filters = 208
    num_micro_batches = 1
    _recompute = "never"


class AmoebaNetD18x416(_AmoebaNetD):
    """AmoebaNet-D (18, 416), 318M parameters: "Pipeline-1" of Table 1."""

    filters = 416


class AmoebaNetD18x544(_AmoebaNetD):
    """AmoebaNet-D (18, 544), 540M parameters: "Pipeline-2" of Table 1."""

    filters = 544
    num_partitions = 2


class AmoebaNetD36x544(_AmoebaNetD):
    """AmoebaNet-D (36, 544), 1.05B parameters: "Pipeline-4" of Table 1."""

    num_cells = 36
    filters = 544
    num_partitions = 4


class AmoebaNetD72x512(_AmoebaNetD):
    """AmoebaNet-D (72, 512), 1.84B parameters: "Pipeline-8" of Table 1."""

    num_cells = 72
    filters = 512
    num_partitions = 8


class AmoebaNetD18x256(_AmoebaNetD):
    """AmoebaNet-D (18, 256), of the speed table on TPUs (GP Table 2: K = 2, 4, 8; M = 1, 4, 32).

    GP adjusts the mini-batch to what fits; 128 here.
    """

    num_partitions = 4


class AmoebaNetD18x128(_AmoebaNetD):
    """AmoebaNet-D (18, 128), of the speed table on GPUs over PCIe (GP Table 3: M = 32)."""

    filters = 128
    num_partitions = 4


class AmoebaNetD6x256(registry.Model):
    """AmoebaNet-D (6, 256) at 224², REF's small fast recipe: 93 % top-5 in 35 epochs, it says.

    Known (REF, README.md): all but K and M, since it ran on one TPU's eight cores side by side.
    """

    num_cells = 6
    filters = 256
    image_size = 224

    def task(self) -> Task.Params:
        """Return the task."""
        epoch = 1_251  # updates: 1,281,167 // 1,024
        rate = optim.WarmupStaircase.Params(
            peak=2.56, warmup_steps=437, decay=0.88, decay_steps=float(epoch), floor=1e-4
        )
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=reference.by_command_line("D", self.num_cells, self.filters, CLASSES),
                num_partitions=4,
                num_micro_batches=32,
                dtype="mixed_bfloat16",
            ),
            input=_source(self.image_size, 1_024),
            train=reference.train(rate, max_steps=35 * epoch, save_interval_steps=epoch),
            eval=Eval(split=SPLIT, best="accuracy"),
        )


def _source(image_size: int, batch_size: int) -> TFDS.Params:
    """Return REF's input: `inception_preprocessing.py`, at its defaults."""
    return TFDS.Params(
        name="imagenet2012",
        batch_size=batch_size,
        height=image_size,
        width=image_size,
        label_offset=1,
        resize=True,
        antialias=False,
        mean=(0.5, 0.5, 0.5),  # pixels in [-1, 1]
        std=(0.5, 0.5, 0.5),
        central=0.875,
        random_crop=True,
        crop_area=(0.1, 1.0),
        crop_aspect=(3 / 4, 4 / 3),
        flip=True,
        brightness=32 / 255,
        saturation=(0.5, 1.5),
    )
