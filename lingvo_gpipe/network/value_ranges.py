"""Which integers the fields of a mini-batch may hold: labels and ids that the layers take.

TensorFlow refuses an id outside a table on CPUs, after work was done, and reads zeros for it on
GPUs. Here the fields themselves are looked at, before a step costs anything; where the step is part
of the caller's graph, in that graph. Fields on a worker are looked at there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

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

    def all_inside(self, fields: Mapping[str, Nest]) -> tf.Tensor | None:
        """Check the values on the worker that has the field; None: no worker has it."""
        value = fields[self.field]
        if not _is_on_worker(value):
            return None
        used = [name for name in (self.field, self.values.weights) if name is not None]
        specs = tuple((name, tf.TensorSpec.from_tensor(fields[name])) for name in used)
        with tf.device(value.device):
            all_inside = _all_inside_of(self, specs, value.device)
            return all_inside({name: fields[name] for name in used})

    def first_outside(self, fields: Mapping[str, Nest], first_row: int = 0) -> str | None:
        """Return a message for the first value of a mini-batch that is outside; None: all fit.

        Args:
            fields: of the mini-batch, or of a part of it.
            first_row: number of its first row in the mini-batch.
        """
        size, values = self.values.size, np.asarray(fields[self.field])
        if not values.size or (values.min() >= 0 and values.max() < size):
            return None
        places = np.argwhere(~self.inside(fields).numpy())
        if not len(places):
            return None
        position = [int(index) for index in places[0]]
        row = first_row + position.pop(0)
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        at = f", position {position}" if position else ""
        setting = self.values.setting
        why, way_out = f"its {setting}={size}", f"set {setting}"
        if not setting:
            why, way_out = f"it reads predictions of {size} classes", "the model that predicts them"
        return (
            f"field {self.field!r}, row {row}{at}: {values[tuple(places[0])]}{more}, "
            f"but layer {self.layer} takes 0 to {size - 1} ({why}). Correct the data, or {way_out}"
        )

    def inside(self, fields: Mapping[str, Nest]) -> tf.Tensor:
        """Return, as an operation, which values of a mini-batch the layer takes; bool [N, …]."""
        values, weights = fields[self.field], self.values.weights
        numbers = tf.cast(values, tf.int64)  # a size, or -1, may be beyond the dtype of the field
        inside = (numbers >= 0) & (numbers < self.values.size)
        if self.values.ignored is not None:
            inside |= numbers == self.values.ignored
        if weights is not None:
            inside |= tf.broadcast_to(~tf.cast(fields[weights], tf.bool), tf.shape(values))
        return inside


def check(ranges: Sequence[FieldRange], *parts: Mapping[str, Nest]) -> None:
    """Refuse values of a mini-batch that no layer takes.

    Args:
        ranges: those of a network.
        parts: consecutive parts of the mini-batch, each name → nest of tensors or arrays, with
            values; not while a graph is traced. Workers look at theirs at the same time.

    Raises:
        InputError: naming field, row, value and layer.
    """
    on_workers = [[field_range.all_inside(fields) for field_range in ranges] for fields in parts]
    first_rows = [0] * len(ranges)
    for fields, all_inside in zip(parts, on_workers, strict=True):
        for number, field_range in enumerate(ranges):
            if all_inside[number] is None or not bool(all_inside[number]):
                message = field_range.first_outside(fields, first_rows[number])
                if message is not None:
                    raise errors.InputError(message)
            first_rows[number] += fields[field_range.field].shape[0]


def asserted(
    ranges: Iterable[FieldRange], fields: Mapping[str, Nest], device: str = "CPU:0"
) -> dict[str, Nest]:
    """Return fields whose use in a graph fails with `InvalidArgumentError` if a value is outside.

    Kernels on GPUs and slices of a table would read zeros there.

    Args:
        ranges: those of a network.
        fields: name → nest of tensors of a graph.
        device: a CPU, which looks at them.
    """
    guarded = dict(fields)
    for field_range in ranges:
        name, values = field_range.field, fields[field_range.field]
        with tf.device(device):
            inside = field_range.inside(fields)
            first = tf.where(~inside)[:1]
            check = tf.debugging.Assert(
                tf.reduce_all(inside),
                [
                    f"field {name!r} has a value that layer {field_range.layer} does not take (0 "
                    f"to {field_range.values.size - 1}), at",
                    first,
                    "which is",
                    tf.gather_nd(values, first),
                ],
            )
        with tf.device(device), tf.control_dependencies([check]):
            guarded[name] = tf.identity(guarded[name])
    return guarded


@functools.cache
def _all_inside_of(
    field_range: FieldRange, specs: tuple[tuple[str, tf.TensorSpec], ...], device: str
) -> Callable[[dict[str, tf.Tensor]], tf.Tensor]:
    """Return a function of fields: whether all their values are inside.

    It is traced here: TensorFlow would warn the user of a function that is traced once for each of
    several ranges.
    """

    def all_inside(fields: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.reduce_all(field_range.inside(fields))

    with tf.device(device):
        return tf.function(all_inside, autograph=False).get_concrete_function(dict(specs))


def _is_on_worker(value: Nest) -> bool:
    return isinstance(value, tf.Tensor) and "/job:worker/" in value.device


def of_fields(
    layers: Iterable[LayerInfo],
    routes: wiring.Wiring,
) -> tuple[FieldRange, ...]:
    """Return the ranges of fields that layers read directly, and whose weights are fields too.

    Args:
        layers: layers of the network.
        routes: which layer reads which value.
    """
    fields = set(routes.fields.values())
    ranges_of_fields = []
    for layer in layers:
        versions = dict(zip(layer.params.reads, routes.reads[layer.index], strict=True))
        ranges = {**layer.params.value_ranges(), **layer.meta.value_ranges}
        for name, values in ranges.items():
            needed = {versions[n] for n in (name, values.weights) if n is not None}
            if needed <= fields:
                ranges_of_fields.append(FieldRange(name, layer.name, values))
    return tuple(ranges_of_fields)
