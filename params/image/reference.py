"""What the AmoebaNet recipes share, and what is known about the paper's.

Sources, by the names that the recipes use:
    GP    Huang et al. 2019, GPipe, arXiv 1811.06965v5: models, image sizes, mini-batch of Table 1.
    REF   github.com/tensorflow/tpu, models/official/amoeba_net: the published training program. Its
          library defaults (`amoeba_net_model.py`) and its command line's (`amoeba_net.py`) differ.
    REAL  Real et al. 2019, 1802.01548, to which GP leaves the hyper-parameters.

What none of them says is marked UNKNOWN where it is set, with how the value was chosen.
"""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import layers, optim
from lingvo_gpipe.task import Train
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
    return _layers(
        genotype=genotype,
        num_cells=num_cells,
        filters=filters,
        classes=classes,
        drop_path_keep=0.7,
        drop_path_steps=max_steps,
        momentum=0.9997,
        epsilon=1e-3,
    )


def by_command_line(
    genotype: str, num_cells: int, filters: int, classes: int | None
) -> list[layers.Layer.Params]:
    """Return the layers with REF's command-line defaults: no drop-path, fast batch norm."""
    return _layers(
        genotype=genotype,
        num_cells=num_cells,
        filters=filters,
        classes=classes,
        momentum=0.9,
        epsilon=1e-5,
    )


def _layers(**fields: Any) -> list[layers.Layer.Params]:
    return amoebanet.amoeba_net(
        amoebanet.AmoebaNet(dropout=0.5, auxiliary_weight=0.4, label_smoothing=0.1, **fields)
    )
