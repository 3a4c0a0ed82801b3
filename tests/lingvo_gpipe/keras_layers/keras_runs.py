"""Helpers of the adapter's tests: run Keras layers as pipeline layers, eagerly and separately."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, seeds
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Context


def spec(*shape: int, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(0.5, 2.0, shape), dtype)


def nest(meta: base.Meta, *, is_state: bool, seed: int = 1) -> dict[str, Any]:
    """Return a layer's theta or state, initialized as the pipeline does."""
    made: dict[str, Any] = {}
    for variable in meta.variables:
        if variable.is_state != is_state:
            continue
        *parents, last = variable.path.split("/")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
        own = seeds.variable_seed(seed, variable.path)
        node[last] = variable.initializer(variable.shape, variable.dtype, own)
    return made


def context(
    state: dict[str, Any], *, training: bool, step: int = 0, path: str = "layer", **more: Any
) -> Context:
    root = seeds.micro_batch_seed(seeds.base_seed(7), tf.constant(step, tf.int64), 0)
    return Context(
        training=training,
        step=tf.constant(step, tf.int64),
        root_seed=root,
        state=state,
        path=path,
        **more,
    )


def run(
    params: Any, *inputs: tf.Tensor, training: bool = False, step: int = 0, **more: Any
) -> tuple[Any, Context, base.Meta]:
    """Run a layer eagerly on its initial or copied weights."""
    meta = params.fprop_meta(*[spec(*x.shape, dtype=x.dtype) for x in inputs])
    ctx = context(nest(meta, is_state=True), training=training, step=step, **more)
    theta = nest(meta, is_state=False)
    outputs = params.instantiate().run(theta, inputs[0] if len(inputs) == 1 else inputs, ctx)
    return outputs, ctx, meta


def refused(params: Any, *inputs: tf.TensorSpec) -> str:
    with pytest.raises(errors.LayerError) as caught:
        params.fprop_meta(*inputs)
    return str(caught.value)
