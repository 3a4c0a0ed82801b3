"""Small translation models for the sameness tests, each with its reference in plain TensorFlow.

See `sameness_nets`. Dropout everywhere, shared tables and transparent attention; rows with padding
(`shared`) and rows with several sentences (`per_layer`).
"""

# ruff: noqa: ARG001 (one signature for all references)

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.tasks.mt.model import transformer
from tests.networks import sameness_nets
from tests.networks.sameness_nets import Net, Sums, dropped

UNITS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 6, 2, 4, 10, 13
FEED_FORWARD_SLICES = (7, 3)  # where a net has slices
S, T = 6, 5
CLIP = 1.0  # some logits of these nets are larger
RATES: dict[str, Any] = {
    "dropout": 0.2,
    "attention_dropout": 0.15,
    "relu_dropout": 0.25,
    "shares_dropout": 0.3,
}


def _layers(num_layers: int, **fields: Any) -> list[Any]:
    return transformer.translation_transformer(
        transformer.TranslationTransformer(
            num_layers=num_layers,
            hidden=HIDDEN,
            heads=HEADS,
            vocabulary=VOCABULARY,
            units=UNITS,
            head_dim=HEAD_DIM,
            ff_init_scale=1.0,
            logit_clip=CLIP,
            label_smoothing=0.1,
            **RATES,
            **fields,
        )
    )


def norm(w: Any, name: str, x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-6) * w[f"{name}/gamma"] + w[f"{name}/beta"]


def affine(w: Any, name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.einsum("btd,du->btu", x, w[f"{name}/kernel"]) + w[f"{name}/bias"]


def attend(
    w: Any, name: str, x: tf.Tensor, memory: tf.Tensor, allowed: tf.Tensor, draw: Any
) -> tf.Tensor:
    """Attend from x to memory where `allowed` [B, T, S]."""
    query, key, value = (
        tf.reshape(affine(w, f"{name}/{part}", source), (*source.shape[:2], HEADS, HEAD_DIM))
        for part, source in (("query", x), ("key", memory), ("value", memory))
    )
    scores = tf.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(HEAD_DIM)
    # A row that may attend to nothing is padding and has no effect.
    scores += tf.where(allowed, 0.0, tf.constant(-1e30, tf.float64))[:, tf.newaxis]
    shares = dropped(tf.nn.softmax(scores), RATES["attention_dropout"], draw(name))
    mixed = tf.einsum("bnts,bsnd->btnd", shares, value)
    return affine(w, f"{name}/output", tf.reshape(mixed, (*x.shape[:2], HEADS * HEAD_DIM)))


def branch(w: Any, name: str, x: tf.Tensor, y: tf.Tensor, draw: Any) -> tf.Tensor:
    return x + dropped(y, RATES["dropout"], draw(f"{name}_dropout"))


def joined_feed_forward(w: Any, layer: str, count: int) -> dict[str, tf.Tensor]:
    """Return the weights of a feed-forward part in slices, by the paths of the whole one."""
    names = [f"{layer}_{number}/feed_forward" for number in range(count)]
    axes = {"middle/kernel": 1, "middle/bias": 0, "output/kernel": 0}
    whole = {
        f"{layer}/feed_forward/{path}": tf.concat([w[f"{name}/{path}"] for name in names], axis)
        for path, axis in axes.items()
    }
    return whole | {f"{layer}/feed_forward/output/bias": w[f"{names[0]}/output/bias"]}


def feed_forward_in_slices(
    w: Any, layer: str, x: tf.Tensor, draw: Any, sizes: tuple[int, ...]
) -> tf.Tensor:
    """Return what the whole part returns, with the masks of the slices side by side."""
    name = f"{layer}/feed_forward"
    w = w | joined_feed_forward(w, layer, len(sizes))
    middle = tf.nn.relu(affine(w, f"{name}/middle", norm(w, f"{name}_norm", x)))
    parts = [
        dropped(part, RATES["relu_dropout"], draw(f"{layer}_{number}/feed_forward/dropout"))
        for number, part in enumerate(tf.split(middle, sizes, -1))
    ]
    y = affine(w, f"{name}/output", tf.concat(parts, -1))
    return branch(w, f"{layer}_end/feed_forward", x, y, draw)


def feed_forward(w: Any, layer: str, x: tf.Tensor, draw: Any) -> tf.Tensor:
    if f"{layer}_0/feed_forward/middle/kernel" in w:
        return feed_forward_in_slices(w, layer, x, draw, FEED_FORWARD_SLICES)
    name = f"{layer}/feed_forward"
    middle = tf.nn.relu(affine(w, f"{name}/middle", norm(w, f"{name}_norm", x)))
    middle = dropped(middle, RATES["relu_dropout"], draw(f"{name}/dropout"))
    return branch(w, name, x, affine(w, f"{name}/output", middle), draw)


def encode(w: Any, layer: str, x: tf.Tensor, allowed: tf.Tensor, draw: Any) -> tf.Tensor:
    y = norm(w, f"{layer}/attention_norm", x)
    y = attend(w, f"{layer}/attention", y, y, allowed, draw)
    return feed_forward(w, layer, branch(w, f"{layer}/attention", x, y, draw), draw)


def decode(
    w: Any, layer: str, x: tf.Tensor, memory: tf.Tensor, own: Any, other: Any, draw: Any
) -> tf.Tensor:
    y = norm(w, f"{layer}/attention_norm", x)
    y = attend(w, f"{layer}/attention", y, y, own, draw)
    x = branch(w, f"{layer}/attention", x, y, draw)
    y = norm(w, f"{layer}/memory_attention_norm", x)
    y = attend(w, f"{layer}/memory_attention", y, memory, other, draw)
    return feed_forward(w, layer, branch(w, f"{layer}/memory_attention", x, y, draw), draw)


def embed(w: Any, name: str, table: str, ids: tf.Tensor, position: Any, draw: Any) -> tf.Tensor:
    half = UNITS // 2
    rates = 10000.0 ** (-np.arange(half) / (half - 1))
    angles = tf.cast(position, tf.float64)[..., tf.newaxis] * rates
    x = tf.gather(w[table], ids) * np.sqrt(UNITS)
    x += tf.concat([tf.sin(angles), tf.cos(angles)], -1)
    return dropped(x, RATES["dropout"], draw(f"{name}/dropout"))


def mix(vector: tf.Tensor, states: list[tf.Tensor], name: str, draw: Any) -> tf.Tensor:
    shares = tf.nn.softmax(dropped(vector, RATES["shares_dropout"], draw(name)))
    return tf.einsum("n,nbsd->bsd", shares, tf.stack(states))


def head(w: Any, table: str, x: tf.Tensor, field: Any) -> Sums:
    logits = tf.einsum("btd,vd->btv", norm(w, "decoder_norm", x), w[table]) + w["softmax/bias"]
    logits = tf.clip_by_value(logits, -CLIP, CLIP)
    target = 0.9 * tf.one_hot(field["label"], VOCABULARY, dtype=tf.float64) + 0.1 / VOCABULARY
    each = -tf.reduce_sum(target * tf.nn.log_softmax(logits), -1)
    hits = sameness_nets.right(logits, field["label"], field["weight"])
    return Sums({"loss": tf.reduce_sum(each * field["weight"])}, hits=hits)


def causal(length: int) -> Any:
    return np.tril(np.ones((length, length), bool))


# --- rows with padding, shared transparent attention, softmax and target of one table -------------


def shared_layers(num_layers: int = 2) -> list[Any]:
    """Return the layers of `translation`."""
    return _layers(num_layers, tie="softmax", transparent="shared")


def shared_reference(w: Any, field: Any, draw: Any) -> Sums:
    source, target = field["source"], field["target"]
    tables = "source_embedding/embedding/table", "target_embedding/embedding/table"
    states = [embed(w, "source_embedding", tables[0], source, range(S), draw)]
    present = (source != 0)[:, tf.newaxis]
    num_layers = sum(path.startswith("decoder_") and path.endswith("query/bias") for path in w) // 2
    for n in range(num_layers):
        states.append(encode(w, f"encoder_{n}", states[-1], present, draw))
    memory = norm(w, "encoder_norm", mix(w["encoder_0/shares"], states, "encoder_0", draw))
    x = embed(w, "target_embedding", tables[1], target, range(T), draw)
    for n in range(num_layers):
        own = causal(T) & (target != 0)[:, tf.newaxis]
        x = decode(w, f"decoder_{n}", x, memory, own, present, draw)
    return head(w, tables[1], x, field)


# 9 rows, so that 3 micro-batches have equal sizes: each size is traced by itself.
SOURCE_LENGTHS = (6, 2, 4, 1, 6, 3, 5, 6, 1)
TARGET_LENGTHS = (2, 5, 1, 3, 5, 4, 1, 2, 5)


def padded() -> dict[str, tf.Tensor]:
    """Return a mini-batch of sentences that are padded."""
    rows = len(SOURCE_LENGTHS)
    source = sameness_nets.ids(rows, S, seed=31, below=VOCABULARY - 1) + 1
    target = sameness_nets.ids(rows, T, seed=32, below=VOCABULARY - 1) + 1
    label = sameness_nets.ids(rows, T, seed=33, below=VOCABULARY)
    there = tf.sequence_mask(SOURCE_LENGTHS, S, dtype=tf.int32)
    real = tf.sequence_mask(TARGET_LENGTHS, T, dtype=tf.int32)
    return {
        "source": source * there,
        "target": target * real,
        "label": label * real,
        "weight": tf.cast(real, tf.float64),
    }


SHARED = Net(
    "translation",
    shared_layers,
    padded,
    shared_reference,
    {"loss": (1.0, float(sum(TARGET_LENGTHS)))},
)

# --- rows of several sentences, transparent attention per decoder layer, one table ----------------


def packed_layers() -> list[Any]:
    """Return the layers of `packed_translation`."""
    return _layers(2, tie="all", transparent="per_layer", packed=True)


def packed_reference(w: Any, field: Any, draw: Any) -> Sums:
    source, target = field["source_segment"], field["target_segment"]
    table = "source_embedding/embedding/table"

    def together(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        return (queries[:, :, tf.newaxis] == keys[:, tf.newaxis]) & (keys != 0)[:, tf.newaxis]

    position = field["source_position"]
    states = [embed(w, "source_embedding", table, field["source"], position, draw)]
    for n in range(2):
        states.append(encode(w, f"encoder_{n}", states[-1], together(source, source), draw))
    x = embed(w, "target_embedding", table, field["target"], field["target_position"], draw)
    for n in range(2):
        memory = mix(w[f"decoder_{n}/mixture/shares"], states, f"decoder_{n}/mixture", draw)
        memory = norm(w, "decoder_0/memory_norm", memory)
        own = causal(T) & together(target, target)
        x = decode(w, f"decoder_{n}", x, memory, own, together(target, source), draw)
    return head(w, table, x, field)


def _segments(lengths: tuple[tuple[int, ...], ...], span: int) -> tuple[Any, Any]:
    """Return segments and positions [N, span] of rows with sentences of these lengths."""
    segment, position = np.zeros((2, len(lengths), span), np.int32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts):
            segment[row, start : start + length] = number + 1
            position[row, start : start + length] = range(length)
            start += length
    return tf.constant(segment), tf.constant(position)


# 9 rows, as above.
SOURCE_PARTS = ((3, 3), (2, 1), (6,), (1, 1, 2), (2, 4), (5, 1), (1, 2, 3), (4,), (2, 2))
TARGET_PARTS = ((2, 3), (1, 2), (4,), (1, 2, 1), (3, 2), (1, 1), (1, 1, 2), (5,), (2, 1))


def packed() -> dict[str, tf.Tensor]:
    """Return a mini-batch whose rows hold several sentences, then padding."""
    rows = len(SOURCE_PARTS)
    source_segment, source_position = _segments(SOURCE_PARTS, S)
    target_segment, target_position = _segments(TARGET_PARTS, T)
    there = tf.cast(source_segment > 0, tf.int32)
    real = tf.cast(target_segment > 0, tf.int32)
    return {
        "source": (sameness_nets.ids(rows, S, seed=34, below=VOCABULARY - 1) + 1) * there,
        "target": (sameness_nets.ids(rows, T, seed=35, below=VOCABULARY - 1) + 1) * real,
        "label": sameness_nets.ids(rows, T, seed=36, below=VOCABULARY) * real,
        "weight": tf.cast(real, tf.float64),
        "source_segment": source_segment,
        "source_position": source_position,
        "target_segment": target_segment,
        "target_position": target_position,
    }


PACKED = Net(
    "packed_translation",
    packed_layers,
    packed,
    packed_reference,
    {"loss": (1.0, float(sum(map(sum, TARGET_PARTS))))},
)

NETS = {n.name: n for n in (SHARED, PACKED)}
