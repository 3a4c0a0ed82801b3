"""Which integers the fields of a mini-batch may hold: labels and ids that the layers take.

TensorFlow refuses an id outside a table on CPUs, after work was done, and reads zeros for it on
GPUs. Here the fields themselves are looked at, before a step costs anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from lingvo_gpipe import errors
from lingvo_gpipe.layers.base import ValueRange
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import wiring
from lingvo_gpipe.network.wired_layers import LayerInfo


@dataclasses.dataclass(frozen=True, slots=True)
class FieldRange:
    """The integers of a field that a layer takes.

    Attributes:
        field: name of the field.
        layer: name of the layer that reads it.
        values: what the layer takes; its `weights` is a field, or None.
    """

    field: str
    layer: str
    values: ValueRange

    def first_outside(self, fields: Mapping[str, Nest]) -> str | None:
        """Return a message for the first value of a mini-batch that is outside; None: all fit."""
        found = np.asarray(fields[self.field])
        size, weights = self.values.size, self.values.weights
        if not found.size or (found.min() >= 0 and found.max() < size):
            return None
        outside = (found < 0) | (found >= size)
        if weights is not None:
            outside &= np.broadcast_to(np.asarray(fields[weights]) != 0, found.shape)
        places = np.argwhere(outside)
        if not len(places):
            return None
        place = tuple(int(index) for index in places[0])
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        position = f", position {list(place[1:])}" if place[1:] else ""
        return (
            f"field {self.field!r}, row {place[0]}{position}: {found[place]}{more}, but layer "
            f"{self.layer} takes 0 to {size - 1} (its {self.values.setting}={size}). Correct the "
            f"data, or set {self.values.setting}"
        )


def check(ranges: Iterable[FieldRange], fields: Mapping[str, Nest]) -> None:
    """Refuse values of a mini-batch that no layer takes.

    Args:
        ranges: those of a network.
        fields: name → nest of tensors or arrays, with values; not while a graph is traced.

    Raises:
        InputError: naming field, row, value and layer.
    """
    for field_range in ranges:
        message = field_range.first_outside(fields)
        if message is not None:
            raise errors.InputError(message)


def of_fields(layers: Iterable[LayerInfo], routes: wiring.Wiring) -> tuple[FieldRange, ...]:
    """Return the ranges of fields that layers read directly, and whose weights are fields too.

    Args:
        layers: layers of the network.
        routes: which layer reads which value.
    """
    fields = set(routes.fields.values())
    ranges = []
    for layer in layers:
        versions = dict(zip(layer.params.reads, routes.reads[layer.index], strict=True))
        for name, values in layer.params.value_ranges().items():
            needed = {versions[n] for n in (name, values.weights) if n is not None}
            if needed <= fields:
                ranges.append(FieldRange(name, layer.name, values))
    return tuple(ranges)
