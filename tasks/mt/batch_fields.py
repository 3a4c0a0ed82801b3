"""The fields of a mini-batch as arrays; `input` describes them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lingvo_gpipe.tasks.mt.text.batches import PlannedBatch, Units
from lingvo_gpipe.tasks.mt.text.records import Array, Split
from lingvo_gpipe.tasks.mt.text.vocabulary import BEGIN, END

_TOKEN_FIELDS = ("source", "target", "label")
_PACKED_FIELDS = ("source_segment", "source_position", "target_segment", "target_position")


def specs(rows: int | None, length: int | None, packing: bool) -> dict[str, tf.TensorSpec]:
    """Return the specs of the fields; with `packing` also those of packed rows."""
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields = {name: tf.TensorSpec([rows, length], tf.int32) for name in names}
    fields["weight"] = tf.TensorSpec([rows, length], tf.float32)
    fields["language"] = tf.TensorSpec([rows], tf.int32)
    return fields


def arrays(split: Split, units: Units, planned: PlannedBatch, packing: bool) -> dict[str, Array]:
    """Return the fields of a mini-batch.

    Args:
        split: split of the examples.
        units: units of the plan.
        planned: the mini-batch.
        packing: whether to include the fields of packed rows.
    """
    rows, length = planned.shape.rows, planned.shape.length
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields: dict[str, Array] = {name: np.zeros((rows, length), np.int32) for name in names}
    fields["weight"] = np.zeros((rows, length), np.float32)
    fields["language"] = np.zeros(rows, np.int32)
    fields["language"][: len(planned.units)] = units.languages[planned.units]
    fields["source"][len(planned.units) :, 0] = END
    fields["target"][len(planned.units) :, 0] = BEGIN
    for row, unit in enumerate(planned.units):
        source_start = target_start = 0
        for segment, number in enumerate(units.of(int(unit)), 1):
            source, target = split.example(int(number))
            source_end = source_start + len(source) + 1
            target_end = target_start + len(target) + 1
            source_slice = slice(source_start, source_end)
            target_slice = slice(target_start, target_end)
            ids = fields["source"][row, source_slice]
            ids[:-1], ids[-1] = source, END
            ids = fields["target"][row, target_slice]
            ids[0], ids[1:] = BEGIN, target
            ids = fields["label"][row, target_slice]
            ids[:-1], ids[-1] = target, END
            fields["weight"][row, target_slice] = 1.0
            if packing:
                for name, where in (("source", source_slice), ("target", target_slice)):
                    fields[f"{name}_segment"][row, where] = segment
                    fields[f"{name}_position"][row, where] = np.arange(where.stop - where.start)
            source_start, target_start = source_end, target_end
    return fields
