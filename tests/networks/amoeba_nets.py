"""Small AmoebaNets for the sameness tests, each with its reference in plain TensorFlow.

They have an auxiliary head, drop-path in the middle of its schedule, dropout and label smoothing.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.tasks.image.model import amoebanet
from tests.networks import amoeba_reference, sameness_nets

STEP = 5  # the update that the sameness tests compute
CLASSES = 3
N = 9  # examples: 2 micro-batches are ragged, 3 are not (each size is traced separately)
KEEP, STEPS = 0.6, 8
DROPOUT, SMOOTHING, AUXILIARY = 0.4, 0.1, 0.4
MOMENTUM, EPSILON = 0.8, 1e-3


def amoeba_net(
    genotype: str, num_cells: int, filters: int, classes: int | None, **fields: Any
) -> list[Any]:
    """Return the layers of an AmoebaNet."""
    params = amoebanet.AmoebaNet(
        genotype=genotype, num_cells=num_cells, filters=filters, classes=classes, **fields
    )
    return amoebanet.amoeba_net(params)


def _smoothed(logits: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
    target = tf.one_hot(label, CLASSES, dtype=logits.dtype) * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return -tf.reduce_sum(target * tf.nn.log_softmax(logits))


def first_half(network: list[Any]) -> list[Any]:
    """Return stem, reduction_0, normal_0, which has the auxiliary head, and the classifier."""
    stem, reduction, normal, *_, classifier = network
    classifier.reads = (normal.name, "label")
    return [stem, reduction, normal, classifier]


def _net(
    genotype: str, num_cells: int, filters: int, stem: Any, side: int, *, half: bool = False
) -> sameness_nets.Net:
    def reference(weights: Any, field: Any, draw: Any) -> sameness_nets.Sums:
        def drop(path: str, x: tf.Tensor) -> tf.Tensor:
            keep = 1.0 - STEP / STEPS * (1.0 - KEEP)
            kept = tf.random.stateless_uniform([x.shape[0], 1, 1, 1], draw(path)) < keep
            return x * tf.cast(kept, x.dtype) / keep

        o = amoeba_reference.Plain(weights, EPSILON, drop)
        last = "normal_0" if half else None
        outputs = amoeba_reference.network(
            o, genotype, num_cells, filters, stem, field["image"], last
        )
        behind = f"normal_{2 * num_cells // 3 - 1}"
        auxiliary = amoeba_reference.auxiliary(o, f"{behind}/auxiliary", outputs[behind])
        features = tf.reduce_mean(tf.nn.relu(list(outputs.values())[-1]), [1, 2])
        features = sameness_nets.dropped(features, DROPOUT, draw("classifier/dropout"))
        logits = sameness_nets.dense(weights, "classifier/softmax", features)
        return sameness_nets.Sums(
            {
                "auxiliary": _smoothed(auxiliary, field["label"]),
                "loss": _smoothed(logits, field["label"]),
            },
            o.norm_inputs,
            sameness_nets.right(logits, field["label"]),
        )

    name = f"amoeba_{genotype.lower()}_{stem}"

    def layers() -> list[Any]:
        network = amoeba_net(
            genotype,
            num_cells,
            filters,
            CLASSES,
            stem=stem,
            drop_path_keep=KEEP,
            drop_path_steps=STEPS,
            dropout=DROPOUT,
            auxiliary_weight=AUXILIARY,
            label_smoothing=SMOOTHING,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            top_k=2,
        )
        return first_half(network) if half else network

    return sameness_nets.Net(
        name,
        layers,
        lambda: {
            "image": sameness_nets.data(N, side, side, 3, seed=21),
            "label": sameness_nets.ids(N, seed=22, below=CLASSES),
        },
        reference,
        {"loss": (1.0, N), "auxiliary": (AUXILIARY, N)},
        momentum=MOMENTUM,
    )


NETS = {
    net.name: net
    for net in (
        # The smallest images that leave the auxiliary head its five pixels. A cell takes seconds to
        # trace: one of each kind.
        _net("A", 2, 4, "small", 11, half=True),
        _net("B", 2, 4, "small", 11, half=True),
        _net("D", 2, 4, "small", 11, half=True),
    )
}
# All cells, and twice as large: for single points.
IMAGENET = _net("D", 2, 8, "imagenet", 67)
