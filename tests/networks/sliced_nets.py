"""Networks with sliced layers for the sameness tests; their references join the weights.

See `sameness_nets`. The reference computes what the whole layers would: one table, one softmax over
all logits.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import layers
from tests.networks import mt_nets, sameness_nets
from tests.networks.sameness_nets import LENGTHS, TIED, Net, Sums, cross_entropy, dense, dropped

VOCABULARY, UNITS = 11, 6
CLIP, SMOOTHING = 0.4, 0.1  # some logits are larger
UNEQUAL = (4, 1, 6)


def joined(w: dict[str, tf.Tensor], path: str, count: int) -> tf.Tensor:
    """Return `layer/variable` of a layer in `count` slices, whole."""
    layer, _, variable = path.partition("/")
    return tf.concat([w[f"{layer}_{number}/{variable}"] for number in range(count)], 0)


def smoothed(logits: tf.Tensor, field: Any) -> tf.Tensor:
    plain = cross_entropy(logits, field["label"])
    spread = -tf.reduce_mean(tf.nn.log_softmax(logits), -1)
    return ((1 - SMOOTHING) * plain + SMOOTHING * spread) * field["real"]


def _layers(embedding: Any, softmax: Any, **fields: Any) -> list[Any]:
    return [
        layers.Embedding.Params(
            name="emb",
            vocabulary=VOCABULARY,
            units=UNITS,
            scale=True,
            slices=embedding,
            reads=("ids",),
        ),
        layers.Dense.Params(name="d0", units=8, activation="tanh"),
        layers.Dropout.Params(name="drop", rate=0.25),
        layers.Dense.Params(name="d1", units=UNITS, activation="tanh"),
        layers.SequenceSoftmax.Params(
            name="head",
            vocabulary=VOCABULARY,
            slices=softmax,
            label_smoothing=SMOOTHING,
            reads=("x", "label", "real"),
            **fields,
        ),
    ]


def _inner(w: Any, table: tf.Tensor, field: Any, draw: Any) -> tf.Tensor:
    x = tf.tanh(dense(w, "d0", tf.gather(table, field["ids"]) * UNITS**0.5))
    return tf.tanh(dense(w, "d1", dropped(x, 0.25, draw("drop"))))


def _sums(logits: tf.Tensor, field: Any) -> Sums:
    hits = sameness_nets.right(logits, field["label"], field["real"])
    return Sums({"loss": tf.reduce_sum(smoothed(logits, field))}, hits=hits)


def _tied(w: Any, field: Any, draw: Any) -> Sums:
    table = joined(w, "emb/table", 2)
    x = _inner(w, table, field, draw)
    return _sums(tf.matmul(x, table, transpose_b=True) + joined(w, "head/bias", 2), field)


def _unequal(w: Any, field: Any, draw: Any) -> Sums:
    x = _inner(w, joined(w, "emb/table", 2), field, draw)
    logits = tf.matmul(x, joined(w, "head/kernel", 3), transpose_b=True)
    return _sums(tf.clip_by_value(logits + joined(w, "head/bias", 3), -CLIP, CLIP), field)


WEIGHTS = {"loss": (1.0, float(sum(LENGTHS)))}
SLICED = Net(
    "sliced",
    lambda: _layers(2, 2, tie={"kernel": "emb/table"}),
    TIED.fields,
    _tied,
    WEIGHTS,
)
UNEQUALLY = Net(
    "sliced_unequal",
    lambda: _layers(2, UNEQUAL, logit_clip=CLIP, top_k=2),
    TIED.fields,
    _unequal,
    WEIGHTS,
)

# --- translation: tables, softmax and feed-forward parts ------------------------------------------

# The first rows, so that 2 and 3 micro-batches have equal sizes: each size is traced by itself.
ROWS = 6

_TABLES = ("source_embedding/embedding/table", "target_embedding/embedding/table", "softmax/bias")


def _packed(w: Any, field: Any, draw: Any) -> Sums:
    whole = {path: joined(w, path, 2) for path in (_TABLES[0], "softmax/bias")}
    return mt_nets.packed_reference(w | whole, field, draw)


def _shared(w: Any, field: Any, draw: Any) -> Sums:
    whole = {path: joined(w, path, 3) for path in _TABLES}
    return mt_nets.shared_reference(w | whole, field, draw)


def _everything(vocabulary: Any) -> dict[str, Any]:
    """Return the slices of all layers that can be divided."""
    tables = {"*_embedding": vocabulary, "softmax": vocabulary}
    return {**tables, "*coder_?": mt_nets.FEED_FORWARD_SLICES}


PACKED = Net(
    "sliced_packed_translation",
    mt_nets.packed_layers,
    lambda: {name: value[:ROWS] for name, value in mt_nets.packed().items()},
    _packed,
    {"loss": (1.0, float(sum(map(sum, mt_nets.TARGET_PARTS[:ROWS]))))},
    options={"slices": _everything((4, 9))},
)
SHARED = Net(
    "sliced_translation",
    lambda: mt_nets.shared_layers(num_layers=1),
    lambda: {name: value[:ROWS] for name, value in mt_nets.padded().items()},
    _shared,
    {"loss": (1.0, float(sum(mt_nets.TARGET_LENGTHS[:ROWS])))},
    options={"slices": _everything(3)},
)

NETS = {n.name: n for n in (SLICED, UNEQUALLY, PACKED, SHARED)}
