"""What the AmoebaNet recipes share, and what is known about the paper's.

Sources, by the names that the recipes use:
    GP    Huang et al. 2019, GPipe, arXiv 1811.06965v5: models, image sizes, mini-batch of Table 1.
    REF   github.com/tensorflow/tpu, models/official/amoeba_net: the published training program. Its
          library defaults (`amoeba_net_model.py`) and its command line's (`amoeba_net.py`) differ.
    REAL  Real et al. 2019, 1802.01548, to which GP leaves the hyper-parameters.

What none of them says is marked UNKNOWN where it is set, with how the value was chosen.
"""

from __future__ import annotations

from typing import Any, Protocol

from lingvo_gpipe import layers, optim, pipelining
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.image import Images
from lingvo_gpipe.tasks.image.model import amoebanet

# REF, both defaults. REAL: decay 0.9, ε 0.1.
RMS_PROP = optim.RMSProp.Params(decay=0.9, momentum=0.9, epsilon=1.0)
# Patterns of weights that do not fit another number of classes, or another image size.
HEADS = ("classifier/*", "*/auxiliary/*")


def train(
    rate: optim.WarmupStaircase.Params,
    *,
    max_steps: int,
    save_interval_steps: int,
    clip_norm: float | None = None,
) -> Train:
    """Return REF's training; its two sets of defaults differ only in the rate and the clipping."""
    return Train(
        optimizer=optim.Optimizer.Params(rule=RMS_PROP, learning_rate=rate),
        clip_norm=clip_norm,
        weight_decay=optim.WeightDecay.Params(kernel=4e-5),
        average=optim.Average.Params(decay=0.9999),
        max_steps=max_steps,
        save_interval_steps=save_interval_steps,
    )


def by_library(
    genotype: str, num_cells: int, filters: int, classes: int | None, *, max_steps: int
) -> list[layers.Layer.Params]:
    """Return the layers with REF's library defaults: drop-path to 0.7, slow batch norm."""
    return amoebanet.amoeba_net(
        amoebanet.AmoebaNet(
            genotype=genotype,
            num_cells=num_cells,
            filters=filters,
            classes=classes,
            drop_path_keep=0.7,
            drop_path_steps=max_steps,
            dropout=0.5,
            auxiliary_weight=0.4,
            label_smoothing=0.1,
            momentum=0.9997,
            epsilon=1e-3,
        )
    )


def by_command_line(
    genotype: str, num_cells: int, filters: int, classes: int | None
) -> list[layers.Layer.Params]:
    """Return the layers with REF's command-line defaults: no drop-path, fast batch norm."""
    return amoebanet.amoeba_net(
        amoebanet.AmoebaNet(
            genotype=genotype,
            num_cells=num_cells,
            filters=filters,
            classes=classes,
            dropout=0.5,
            auxiliary_weight=0.4,
            label_smoothing=0.1,
            momentum=0.9,
            epsilon=1e-5,
        )
    )


class Sized(Protocol):
    """A recipe of a family of AmoebaNets."""

    num_cells: int
    filters: int


def resized(**fields: Any) -> dict[str, Any]:
    """Return the fields of an input at 480² (GP, section 4): resize, flip, cutout, all at once.

    UNKNOWN: cutout's size (set by each recipe), and whether the aspect is kept (here it is not, as
    in REF's evaluation).
    """
    return {
        "batch_size": 128,
        "height": 480,
        "width": 480,
        "resize": True,
        "antialias": False,
        "mean": (0.5, 0.5, 0.5),  # pixels in [-1, 1]
        "std": (0.5, 0.5, 0.5),
        "flip": True,
        **fields,
    }


def fine_tuning(
    recipe: Sized, source: Images.Params, *, classes: int, split: str = "test"
) -> Task.Params:
    """Return the task of GP's section 4: B(18, 512) from ImageNet to another set, at 480².

    Known (GP): a new softmax, everything else restored; resize to 480², flip, cutout; the
    hyper-parameters of ImageNet; the mean of five runs, single crop.

    UNKNOWN: mini-batch, length, rate, cutout's size, drop-path, M. Chosen: 20,000 updates, which is
    what Kornblith et al. 2019 (1805.08974) give each of these sets; the first rate of ImageNet's
    recipe, which falls to a hundredth in stairs of 0.97; its drop-path.

    Args:
        recipe: its size.
        source: the input.
        classes: number of classes.
        split: evaluated split.
    """
    steps = 20_000
    rate = optim.WarmupStaircase.Params(
        peak=0.06, warmup_steps=500, decay=0.97, decay_steps=132.0, floor=1e-4
    )
    how = train(rate, max_steps=steps, save_interval_steps=1_000, clip_norm=10.0)
    how.start.without = HEADS
    return Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=by_library("B", recipe.num_cells, recipe.filters, classes, max_steps=steps),
            num_partitions=4,
            num_micro_batches=32,
            dtype="mixed_bfloat16",
        ),
        input=source,
        train=how,
        eval=Eval(split=split, best="accuracy"),
    )
