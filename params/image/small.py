"""AmoebaNets that two cores train in minutes, on images of about 32 × 32 pixels.

The cells, the wiring and the heads are the paper's; the stem keeps the image's size, widths and
depth are small, and Adam replaces RMSProp, whose ε of 1 is meant for long runs.
"""

from __future__ import annotations

from typing import Any, Protocol

from lingvo_gpipe import optim, pipelining
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.image import Images
from lingvo_gpipe.tasks.image.model import amoebanet

GENOTYPE = "D"
# With so few cells, each follows a reduction cell: none runs at the images' full size, where a cell
# would take most of the time.
NUM_CELLS = 2
FILTERS = 24
BATCH_SIZE = 128
# Of CIFAR-10's 50,000 training images, pixels in [0, 1].
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


class Sized(Protocol):
    """A recipe of a family of AmoebaNets."""

    num_cells: int
    filters: int


def cosine(peak: float, steps: int) -> optim.KerasLearningRate.Params:
    """Return a learning rate that falls from `peak` to 0 over `steps`, along a cosine."""
    return optim.KerasLearningRate.Params(
        name="CosineDecay", config={"initial_learning_rate": peak, "decay_steps": steps}
    )


def augmented(image_size: int) -> dict[str, Any]:
    """Return the fields of an input of images of `image_size`: shifts, mirrors, cutout."""
    return {
        "batch_size": BATCH_SIZE,
        "height": image_size,
        "width": image_size,
        "mean": MEAN,
        "std": STD,
        "flip": True,
        "pad": image_size // 8,
        "cutout": image_size // 4,
    }


def classifier(
    recipe: Sized,
    source: Images.Params,
    *,
    classes: int | None,
    steps: int,
    peak: float = 3e-3,
) -> Task.Params:
    """Return the task of an AmoebaNet with the small stem, in two cells.

    Args:
        recipe: its size.
        source: the input.
        classes: number of classes; None: as many as the data has.
        steps: updates, over which the learning rate falls along a cosine from `peak` to 0.
        peak: largest learning rate.
    """
    rate = optim.KerasLearningRate.Params(
        name="CosineDecay",
        config={
            "initial_learning_rate": 0.0,
            "warmup_target": peak,
            "warmup_steps": steps // 20,
            "decay_steps": steps - steps // 20,
        },
    )
    return Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=amoebanet.amoeba_net(
                amoebanet.AmoebaNet(
                    genotype=GENOTYPE,
                    num_cells=recipe.num_cells,
                    filters=recipe.filters,
                    classes=classes,
                    stem="small",
                    dropout=0.1,
                    auxiliary_weight=0.4,
                    label_smoothing=0.1,
                )
            ),
            num_partitions=2,
            num_micro_batches=4,
            recompute="never",
        ),
        input=source,
        train=Train(
            optimizer=optim.Optimizer.Params(
                name="AdamW", config={"weight_decay": 0.05}, learning_rate=rate
            ),
            clip_norm=5.0,
            max_steps=steps,
            save_interval_steps=156,  # two epochs of 10,000 images
        ),
        eval=Eval(best="accuracy"),
    )
