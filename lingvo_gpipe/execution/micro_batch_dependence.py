"""Layers whose results depend on how a mini-batch is divided into micro-batches.

Batch norm normalises with its micro-batch, and random numbers are drawn for each. The results of
all other layers are those of their examples, so that the number of micro-batches changes a training
by rounding alone. Both are found in traced graphs, in layers of any origin; nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.execution.cell_programs import nested_variables
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, SpecNest


def reason(analysis: network.Analysis) -> str | None:
    """Return why results of training depend on the micro-batches; None: they do not.

    Layers of equal params and inputs are traced once, so this takes as long for a thousand equal
    layers as for one. A layer that mixes the examples of a micro-batch without adding moments of
    them is not found: no graph shows which axis counts examples.

    Args:
        analysis: of the network; its micro-batches may have any size.

    Returns:
        The name of the first such layer, and what it does, such as `drop draws random numbers for
        each micro-batch`.
    """
    alike: dict[type[base.Layer.Params], tuple[base.Layer.Params, list[SpecNest], set[str]]] = {}
    frozen_layers = [path.partition("/") for path in analysis.frozen_layers]
    for info in analysis.layers:
        if info.meta.undivided:
            return f"{info.name} {info.meta.undivided}"
        unnamed = info.params.copy()
        unnamed.name = ""
        inputs = [analysis.specs[v] for v in analysis.wiring.reads[info.index]]
        frozen = {below for name, _, below in frozen_layers if name == info.name}
        if alike.get(type(unnamed)) == (unnamed, inputs, frozen):
            continue
        dependence = _reason(analysis, info, inputs)
        if dependence is not None:
            return f"{info.name} {dependence}"
        alike[type(unnamed)] = unnamed, inputs, frozen
    return None


def _reason(
    analysis: network.Analysis, info: network.LayerInfo, inputs: Sequence[SpecNest]
) -> str | None:
    """Return what a layer does by micro-batch; None: nothing."""
    layer = info.params.instantiate()
    specs = {path: analysis.variables[path] for path in info.paths.values()}
    reasons: list[str] = []

    def compute(
        seed: tf.Tensor, step: tf.Tensor, variables: dict[str, tf.Tensor], reads: list[Nest]
    ) -> list[tf.Tensor]:
        theta, state = nested_variables(info, variables)
        ctx = Context(
            training=True,
            step=step,
            root_seed=seed,
            state=state,
            path=info.name,
            frozen=analysis.frozen_layers,
            collected=Collected(),
        )
        outputs = layer.run(theta, reads[0] if len(reads) == 1 else tuple(reads), ctx)
        results = tf.nest.flatten((outputs, ctx.collected.as_nest()))
        if ctx.collected.moments:
            reasons.append("takes statistics of each micro-batch")
        elif _depend_on(filter(tf.is_tensor, results), seed):
            reasons.append("draws random numbers for each micro-batch")
        return []

    tf.function(compute, autograph=False).get_concrete_function(
        tf.TensorSpec([2], tf.int32),
        tf.TensorSpec([], tf.int64),
        {path: tf.TensorSpec(spec.shape, spec.read_dtype) for path, spec in specs.items()},
        list(inputs),
    )
    return next(iter(reasons), None)


def _depend_on(results: Iterable[tf.Tensor], source: tf.Tensor) -> bool:
    """Return whether some results of a graph are computed from a tensor."""
    stack, seen = list(results), set[str]()
    while stack:
        tensor = stack.pop()
        if tensor.name == source.name:
            return True
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        if tensor.op.type == "IdentityN":  # custom gradients pass all their arguments through one
            stack.append(tensor.op.inputs[tensor.value_index])
        else:
            stack.extend(tensor.op.inputs)
    return False
