"""How fast is a training step of GPT-2 in bfloat16: ours, and one of plain Keras?

Tokens a second, and the share of the card's peak, of updates by Adam. Keras: a mini-batch of 8
rows. Ours: K=1, M=8 micro-batches of 8 rows; `never` by 1F1B, whose fused slots recompute nothing,
and `full` by GPipe. Each with and without XLA. `pytorch` measures the same in PyTorch.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import keras
import tensorflow as tf

from benchmarks.accelerator import gpt2
from benchmarks.accelerator.question import Answers, Setting, attempt, median_s
from benchmarks.support import networks
from lingvo_gpipe import layers, pipelining

DTYPE = "mixed_bfloat16"
PROGRAMS = ("never", "full", "keras", "never, XLA", "keras, XLA", "full, XLA")


def answers(setting: Setting) -> Answers:
    """Yield the speed of each program and size."""
    setting.devices(1)
    sizes = gpt2.sizes(setting.cpu)
    for name, program in setting.mine(list(itertools.product(sizes, PROGRAMS))):
        measured = of_keras if program.startswith("keras") else of_ours
        found = attempt(measured, sizes[name], program, setting.sized(0.0, 2.0))
        yield f"{name}, {program}", found
        keras.backend.clear_session()
        gc.collect()


def of_ours(size: gpt2.Gpt2, program: str, least_s: float) -> dict[str, Any]:
    """Return the speed of an update of ours."""
    policy, _, xla = program.partition(", ")
    rows = size.rows * gpt2.MICRO_BATCHES
    batch = ids(size, rows)
    batch["weight"] = tf.ones(batch["label"].shape)
    model = pipelining.PipeliningLayer.Params(
        layers=network(size),
        num_micro_batches=gpt2.MICRO_BATCHES,
        schedule="1f1b" if policy == "never" else "gpipe",
        recompute=policy,
        dtype=DTYPE,
        jit_compile=bool(xla),
    )
    updates = networks.learner_of(model, batch)
    step_s = median_s(lambda: float(updates.update([batch]).loss), least_s)
    return size.speed(step_s, rows, loss=float(updates.update([batch]).loss))


def network(size: gpt2.Gpt2) -> list[layers.Layer.Params]:
    """Return the layers of ours."""
    block = layers.TransformerLayer.Params(
        units=size.units, heads=size.heads, hidden=4 * size.units, activation="gelu", causal=True
    )
    table = layers.Embedding.Params(vocabulary=size.vocabulary, units=size.units)
    positions = layers.Embedding.Params(vocabulary=size.length, units=size.units)
    softmax = layers.SequenceSoftmax.Params(vocabulary=size.vocabulary)
    return [
        table.set(name="table", reads=("target",)),
        positions.set(reads=("position",), writes=("place",)),
        layers.Add.Params(reads=("x", "place"), writes=("x",)),
        *[block] * size.layers,
        layers.LayerNorm.Params(),
        softmax.set(reads=("x", "label", "weight"), tie={"kernel": "table/table"}),
    ]


def of_keras(size: gpt2.Gpt2, program: str, least_s: float) -> dict[str, Any]:
    """Return the speed of a step of plain Keras."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(DTYPE)
    try:
        model = keras_model(size)
    finally:
        keras.config.set_dtype_policy(before)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(1e-4)
    model.compile(optimizer=adam, loss=loss, jit_compile=program.endswith("XLA"))
    batch = ids(size, size.rows)
    label = batch.pop("label")
    step_s = median_s(lambda: float(model.train_on_batch(batch, label)), least_s)
    return size.speed(step_s, size.rows, loss=float(model.train_on_batch(batch, label)))


def keras_model(size: gpt2.Gpt2) -> keras.Model:
    """Return the same network in Keras."""
    table = keras.layers.ReversibleEmbedding(size.vocabulary, size.units)
    ids, position = (
        keras.Input((size.length,), dtype="int32", name=name) for name in ("target", "position")
    )
    x = table(ids) + keras.layers.Embedding(size.length, size.units)(position)
    for _ in range(size.layers):
        y = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(size.heads, size.units // size.heads)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * size.units, activation="gelu")(y)
        x = x + keras.layers.Dense(size.units)(y)
    logits = table(keras.layers.LayerNormalization()(x), reverse=True)
    return keras.Model({"target": ids, "position": position}, logits)


def ids(size: gpt2.Gpt2, rows: int) -> dict[str, tf.Tensor]:
    """Return random ids and labels, and positions, on the host."""
    shape = [rows, size.length]
    with tf.device("CPU:0"):
        target, label = (
            tf.random.stateless_uniform(shape, [seed, 1], 0, size.vocabulary, tf.int32)
            for seed in (1, 2)
        )
        position = tf.broadcast_to(tf.range(size.length), shape)
    return {"target": target, "label": label, "position": position}
