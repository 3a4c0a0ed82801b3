"""What one layer holds, or sends, by formula: cuts and the plan reckon with the same numbers.

A layer tells what its backward keeps (`Meta.activation_bytes`); its inputs and outputs are known
from their specs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import wiring


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a layer's tensors, in one micro-batch.

    Attributes:
        forward: the most that its forward holds at once.
        residual: what it leaves where its cell's forward is kept: TensorFlow differentiates a kept
            call by all that it is given, frozen weights too.
        kept: what a backward that computes the forward again keeps of it.
        beside: what is there besides while its own backward works.
    """

    forward: int
    residual: int
    kept: int
    beside: int


def activations(
    own: Any,
    meta: base.Meta,
    number: int,
    wiring: wiring.Wiring,
    specs: Sequence[Any],
    flowing: Sequence[bool],
) -> Activations:
    """Tell the bytes of a layer's tensors.

    Args:
        own: its Params.
        meta: its Meta, for the micro-batch in question.
        number: its index in the network.
        wiring: of the stream.
        specs: per version of the stream, a nest of specs.
        flowing: per layer, whether a gradient flows through it.
    """
    inputs = sum(base.spec_bytes(specs[v]) for v in wiring.reads[number])
    outputs = base.spec_bytes(meta.outputs)
    inside = meta.activation_bytes
    residual = outputs if own.recompute else inside
    again = inside if own.recompute and flowing[number] else 0
    # Of a layer through which no gradient flows, others read something; all else is let go.
    handed = sum(
        base.spec_bytes(specs[v])
        for v in wiring.writes[number]
        if any(flowing[reader] for reader in wiring.versions[v].consumers)
    )
    return Activations(
        forward=inputs + max(inside, outputs),
        residual=residual,
        kept=residual if flowing[number] else handed,
        beside=inputs + outputs + again,
    )


def link_costs(
    per_byte: float, wiring: wiring.Wiring, specs: Sequence[Any], flowing: Sequence[bool]
) -> list[float] | None:
    """Return what a cut behind each layer but the last costs by what it sends; None: nothing.

    It sends what layers before it make and others behind it read, in one micro-batch, and the
    gradient back. Fields go straight to their readers, whatever the cut.

    Args:
        per_byte: cost of a byte.
        wiring: of the stream.
        specs: per version of the stream, a nest of specs.
        flowing: per layer, whether a gradient flows through it.

    Raises:
        PartitionError: `per_byte` is no cost.
    """
    if not 0 <= per_byte < math.inf:
        raise errors.PartitionError(f"link_cost_per_byte={per_byte} is no cost. Use 0 or more")
    if per_byte == 0:
        return None
    sent = [0] * len(flowing)
    for version in wiring.versions:
        if version.producer >= 0 and version.consumers:
            leaves = tf.nest.flatten(specs[version.index])
            size = base.spec_bytes(leaves)
            if flowing[version.producer]:
                size += base.spec_bytes([leaf for leaf in leaves if leaf.dtype.is_floating])
            for place in range(version.producer, version.consumers[-1]):
                sent[place] += size
    return [per_byte * size for size in sent[:-1]]


def update(weights: Collection[tuple[int, int]]) -> int:
    """Return the most bytes that the update of a layer holds besides what is there before it.

    They are its weights' and slots' new values, and its largest weight once more, for what is
    computed on the way.

    Args:
        weights: of each trained one its bytes, and those of its slots and its average.

    >>> update([(4, 8), (10, 20)])
    52
    """
    return sum(map(sum, weights)) + max((size for size, _ in weights), default=0)
