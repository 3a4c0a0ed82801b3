"""One trace of a Keras layer: its outputs, losses and cost, and the check that it is pure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.graphs import traced_flops, traced_memory
from lingvo_gpipe.keras_layers import config, variables
from lingvo_gpipe.keras_layers.function import Called, KerasFunction
from lingvo_gpipe.keras_layers.live import Live
from lingvo_gpipe.layers import base, trials
from lingvo_gpipe.nests import Nest, SpecNest, differentiable, is_differentiable

if TYPE_CHECKING:
    from lingvo_gpipe.keras_layers.adapter import KerasLayer

READ = "read"
REGULARIZATION, ACTIVITY = "regularization", "activity"


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A Keras layer, traced for inputs of fixed shapes.

    Attributes:
        function: the layer as a function.
        outputs: specs of the values that the layer writes.
        losses: kinds of losses that it adds.
        adds_sums: whether losses of activity are sums over examples, not means.
        undivided: see `base.Meta`.
        flops_forward: see `base.Meta`.
        flops_backward: see `base.Meta`.
        activation_bytes: see `base.Meta`.
        sources: for each value that it writes, and last for losses of activity: paths of weights
            and numbers of inputs by which TensorFlow has a gradient, not None.
    """

    function: KerasFunction
    outputs: SpecNest
    losses: tuple[str, ...]
    adds_sums: bool
    undivided: str
    flops_forward: int
    flops_backward: int
    activation_bytes: int
    sources: tuple[frozenset[str | int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallSettings:
    """What a call needs besides its arguments.

    Attributes:
        weights: path of a variable → value.
        seed: number of a seed generator → its int32 [2] seed in this call.
        training: argument `training` of the Keras call.
        is_frozen: path of a batch norm → whether it uses its moving statistics.
    """

    weights: Mapping[str, tf.Tensor]
    seed: Callable[[int], tf.Tensor]
    training: bool
    is_frozen: Callable[[str], bool]


def trace(params: KerasLayer.Params, inputs: Sequence[SpecNest]) -> Traced:
    """Build and trace the Keras layer of `params`, without a device.

    Args:
        params: params of the layer.
        inputs: a nest of `tf.TensorSpec` for each name that it reads.

    Raises:
        LayerError: it cannot be called on these inputs, or hides state.
    """
    if len(inputs) != len(params.reads):
        raise errors.LayerError(
            f"{base.describe(params)}: got {len(inputs)} inputs for the names {params.reads!r}"
        )
    for spec in tf.nest.flatten(tuple(inputs)):
        if not spec.shape.is_fully_defined():
            raise errors.LayerError(
                f"{base.describe(params)}: an input of shape {spec.shape}, expected known "
                "dimensions. Give the mini-batch's fields static shapes"
            )
    inputs = as_read(params, inputs)
    traces, key = _traces_of(params), _frozen((params, tuple(inputs)))
    if key not in traces:
        traces[key] = _traced(params, inputs)
    return traces[key]


def as_read(params: KerasLayer.Params, inputs: Sequence[Nest]) -> tuple[Nest, ...]:
    """Return inputs with the dtypes and ranks of the `keras.Input`s that the layer reads.

    Args:
        params: params of the layer.
        inputs: a nest of tensors or specs for each name that it reads.

    Raises:
        LayerError: one has another rank.
    """
    return tuple(
        _as_input(params, name, value, *params.takes[name]) if name in params.takes else value
        for name, value in zip(params.reads, inputs, strict=True)
    )


def _as_input(
    params: KerasLayer.Params, name: str, value: Nest, dtype: str, shape: Sequence[int | None]
) -> Nest:
    """Return a value as a model with an Input of this dtype and shape takes it."""
    found = value.shape.as_list()
    if len(found) == len(shape) + 1 and found[-1] == 1:
        found = found[:-1]
    elif len(found) == len(shape) - 1 and shape[-1] == 1:
        found = [*found, 1]
    elif len(found) != len(shape):
        raise errors.LayerError(
            f"{base.describe(params)}: {name!r} has shape {value.shape.as_list()}, but the model's "
            f"Input {list(shape)}. Reshape one of them"
        )
    wanted = tf.as_dtype(dtype)
    is_live = isinstance(params.config, Live) and params.config.policy == params.policy.name
    if wanted.is_floating and not is_live:
        wanted = value.dtype if value.dtype.is_floating else params.policy.compute
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(found, wanted)
    if len(found) != value.shape.rank:
        value = tf.reshape(value, [-1 if size is None else size for size in found])
    return tf.cast(value, wanted) if value.dtype != wanted else value


def known(params: KerasLayer.Params, inputs: Sequence[SpecNest]) -> Traced:
    """Return the trace for these inputs, or for inputs that differ only in their batch size.

    An export has batches of any size. Where the size is unknown, one example is traced.
    """
    traces = _traces_of(params)
    examples = tf.nest.map_structure(lambda s: (tuple(s.shape[1:]), s.dtype.name), tuple(inputs))
    key = _frozen((params, examples))
    if key not in traces:
        sized = tf.nest.map_structure(_with_known_batch, tuple(inputs))
        traces[key] = trace(params, sized)
    return traces[key]


def _with_known_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    batch = [1 if size is None else size for size in spec.shape[:1]]
    return tf.TensorSpec([*batch, *spec.shape[1:]], spec.dtype)


# Traces of layers that are made from configurations. A live layer keeps its own.
_of_configs: dict[Hashable, Traced] = {}
_MAX_TRACES = 4096
# What a trace found of a layer, for all that have its structure: the blocks of a Transformer.
_of_structures: dict[Hashable, Traced] = {}


def _traces_of(params: KerasLayer.Params) -> dict[Hashable, Traced]:
    """Return where the traces of a layer are kept."""
    for traces in (_of_configs, _of_structures):
        if len(traces) > _MAX_TRACES:
            traces.clear()
    return params.config.traces if isinstance(params.config, Live) else _of_configs


def _frozen(value: object) -> Hashable:
    """Return a nest of plain values as a hashable nest, in which 1, True and 1.0 differ."""
    if isinstance(value, hyperparams.Params):
        return _frozen({name: value.get(name) for name in value.fields()})
    if isinstance(value, Mapping):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return isinstance(value, tuple), tuple(map(_frozen, value))
    if isinstance(value, tf.TensorSpec):
        return tuple(value.shape), value.dtype.name
    if isinstance(value, Live):
        return value, variables.find(value.operation).described()
    return type(value), repr(value) if isinstance(value, float) else value


def _structure(
    params: KerasLayer.Params, function: KerasFunction, inputs: Sequence[SpecNest]
) -> Hashable:
    """Return what two layers have in common whose traces find the same; None: it is unknown."""
    made_of = params.config
    structure = made_of.structure if isinstance(made_of, Live) else config.without_names(made_of)
    if structure is None:
        return None
    numbers = {name: n for n, name in enumerate([*params.reads, *params.writes])}

    def numbered(value: object) -> object:
        if isinstance(value, Mapping):
            return {numbers.get(key, key): numbered(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [numbered(item) for item in value]
        return numbers.get(value, value) if isinstance(value, str) else value

    own = {"name", "config", "cost"}
    fields = {name: numbered(params.get(name)) for name in params.fields() if name not in own}
    return _frozen((structure, function.variables.described(), fields, tuple(inputs)))


def _traced(params: KerasLayer.Params, inputs: Sequence[SpecNest]) -> Traced:
    """Trace a layer, unless one of the same structure was traced."""
    name = base.describe(params)
    if isinstance(params.config, Live) and params.config.policy == params.policy.name:
        live = params.config
        function = KerasFunction(name, live.operation, keras_updates=live.keras_updates)
    else:
        settings = params.config.config if isinstance(params.config, Live) else params.config
        function = KerasFunction.from_config(
            name, settings, params.policy, lambda make: _symbolic(params, inputs, make)
        )
        function.freeze(params.frozen)
    structure = _structure(params, function, inputs)
    if structure is not None and structure in _of_structures:
        return dataclasses.replace(_of_structures[structure], function=function)
    traced = _run(params, function, inputs, training=True)
    before = function.attributes()
    if isinstance(function.made, keras.layers.Layer):
        _run(params, function, inputs, training=False)
    if function.changed_attribute(before) is not None:
        # An equal call may set the attribute again as it was, such as self.training = training.
        _run(params, function, inputs, training=True)
        function.check_attributes(before)
    if ACTIVITY in traced.losses:
        adds_sums, undivided = _adds(params, function, inputs)
        traced = dataclasses.replace(traced, adds_sums=adds_sums, undivided=undivided)
    if structure is not None:
        # Without the function, which holds the weights of the live layer.
        _of_structures[structure] = dataclasses.replace(traced, function=None)  # type: ignore[arg-type]
    return traced


def _adds(
    params: KerasLayer.Params, function: KerasFunction, inputs: Sequence[SpecNest]
) -> tuple[bool, str]:
    """Return `adds_sums` and `undivided` of `Traced`, by trying a few examples.

    Warns if examples together add another loss than apart, such as a router that balances its load.
    """
    with tf.init_scope():
        found: list[float] = []
        # The logarithm of a layer may need positive numbers, and small ones may add nothing.
        for is_positive, scale in ((False, 1.0), (True, 1.0), (False, 100.0)):
            once, others = _drawn(inputs, is_positive, scale)
            try:
                tried = _added(params, function, once, others)
            except errors.LayerError:  # it takes none of these
                continue
            if np.isfinite(tried).all():
                found, examples = tried, (once, others)
                if any(found):
                    break
        if not found:
            return True, "adds a loss that cannot be tried on drawn examples"
        one, two, *_ = found
        is_mean, is_sum = (np.isclose(two, n * one, rtol=1e-3) for n in (1, 2))
        if not (is_mean or is_sum):
            return True, "adds a loss that is neither a mean nor a sum over examples"

        def compares(one: float, two: float, other: float, together: float) -> bool:
            del two
            parts = (one + other) / (2 if is_mean else 1)
            is_finite = bool(np.isfinite([other, together]).all())
            return is_finite and not np.isclose(together, parts, rtol=1e-3, atol=1e-6)

        marked = _marked(params, function, *examples)
        if compares(*found) or any(compares(*tried) for tried in marked):
            warnings.warn(
                f"{base.describe(params)}: the loss that it adds compares examples with each "
                "other, or divides by how many have some label. If there are several "
                "micro-batches, each has its own, and the numbers are not those of Keras: "
                "num_micro_batches=1 has them",
                stacklevel=2,
            )
    return bool(is_sum and not is_mean), ""


def _drawn(
    inputs: Sequence[SpecNest], is_positive: bool, scale: float
) -> tuple[tuple[Nest, ...], tuple[Nest, ...]]:
    """Return the inputs of two examples, and those of two others."""
    random = np.random.default_rng(0)
    lowest = int(is_positive)

    def example(spec: tf.TensorSpec) -> tf.Tensor:
        shape = [2, *spec.shape[1:]]
        if not spec.dtype.is_floating:
            return tf.cast(random.integers(lowest, lowest + 2, shape), spec.dtype)
        drawn = random.uniform(0.05, 0.95, shape) if is_positive else random.normal(size=shape)
        return tf.cast(scale * drawn, spec.dtype)

    once, others = (tf.nest.map_structure(example, tuple(inputs)) for _ in range(2))
    return once, others


def _added(
    params: KerasLayer.Params,
    function: KerasFunction,
    once: tuple[Nest, ...],
    others: tuple[Nest, ...],
) -> list[float]:
    """Return the losses of activity of two examples, these twice, two others, and all four.

    Raises:
        LayerError: the layer does not take what is drawn.
    """
    twice, all_of_them = (
        tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), once, more)
        for more in (once, others)
    )
    losses_of: list[float] = []
    for training in (False, True):  # a router may add its loss in training alone
        losses_of = [
            sum(float(loss) for loss in _losses_of(params, function, values, training))
            for values in (once, twice, others, all_of_them)
        ]
        if any(losses_of):
            break
    return losses_of


def _losses_of(
    params: KerasLayer.Params, function: KerasFunction, inputs: Sequence[Nest], training: bool
) -> list[tf.Tensor]:
    """Return the losses of activity of some examples, by the present weights."""
    settings = CallSettings(
        {path: variables.value_of(v) for path, v in function.variables.weights.items()},
        seed=lambda n: tf.constant([0, n], tf.int32),
        training=training,
        is_frozen=lambda _: True,
    )
    return call(params, function, inputs, settings).losses


def _marked(
    params: KerasLayer.Params,
    function: KerasFunction,
    once: tuple[Nest, ...],
    others: tuple[Nest, ...],
) -> Iterator[list[float]]:
    """Yield what `_added` returns if one input of one of the others is a label treated apart."""
    graph = trials.graph_of(lambda: _losses_of(params, function, others, True))
    marks = [*trials.MARKS, *trials.compared_numbers(graph)]
    flat = tf.nest.flatten(others)
    for place, value in enumerate(flat):
        for mark in marks:
            if trials.may_hold(value.dtype, mark):
                row = tf.fill(tf.shape(value[:1]), tf.cast(mark, value.dtype))
                changed = [*flat[:place], tf.concat([row, value[1:]], 0), *flat[place + 1 :]]
                with contextlib.suppress(errors.LayerError, tf.errors.OpError):
                    yield _added(params, function, once, tf.nest.pack_sequence_as(others, changed))


def _run(
    params: KerasLayer.Params,
    function: KerasFunction,
    inputs: Sequence[SpecNest],
    *,
    training: bool,
) -> Traced:
    """Trace one call and its gradient, check that it is pure, and count its cost."""
    weights = {
        path: tf.TensorSpec(v.shape, v.dtype) for path, v in function.variables.weights.items()
    }
    everything = (inputs, weights)
    numbers = [n for n, spec in enumerate(inputs) for _ in tf.nest.flatten(spec)]
    labels: list[str | int] = [*numbers, *tf.nest.flatten({path: path for path in weights})]
    traces: list[Traced] = []

    def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
        read, weights = tf.nest.pack_sequence_as(everything, list(flat))
        by_label = [(n, t) for n, t in zip(labels, flat, strict=True) if is_differentiable(t.dtype)]
        sources = [tensor for _, tensor in by_label]
        # In a scope, the name of a layer may begin with "_".
        with tf.name_scope("layer"), tf.GradientTape() as tape:
            tape.watch(sources)
            settings = CallSettings(
                weights,
                seed=lambda n: tf.constant([0, n], tf.int32),
                training=training,
                is_frozen=lambda _: not params.trainable,
            )
            called = call(params, function, read, settings)
            outputs = written(params, called)
            kinds = tuple(k for k, v in losses(params, function, called, weights).items() if v)
        values = outputs if len(params.writes) > 1 else (outputs,)
        parts = [differentiable(part) for part in (*values, called.losses)]
        ends = [tensor for part in parts for tensor in part]
        graph = ends[0].graph if ends else None
        forward = graph.get_operations() if graph is not None else []
        gradients = _gradients(tape.gradient, ends, sources) if training else []
        backward = graph.get_operations()[len(forward) :] if graph is not None else []

        def sources_of(part: list[tf.Tensor]) -> frozenset[str | int]:
            # By the graph: a persistent tape records loops in another way, and so other costs.
            is_all = len(part) == len(ends)
            found = gradients if is_all else _gradients(tf.gradients, part, sources)
            return frozenset(
                label for (label, _), g in zip(by_label, found, strict=True) if g is not None
            )

        traces.append(
            Traced(
                function,
                tf.nest.map_structure(functools.partial(_output_spec, params), outputs),
                kinds,
                False,
                "",
                traced_flops.flops(forward, graph),
                traced_flops.flops(backward, graph),
                traced_memory.residual_bytes(forward, backward, graph),
                tuple(map(sources_of, parts)) if training else (),
            )
        )
        return [*tf.nest.flatten(outputs), *(g for g in gradients if g is not None)]

    traced = tf.function(compute, autograph=False)
    concrete = traced.get_concrete_function(
        *[tf.TensorSpec(s.shape, s.dtype) for s in tf.nest.flatten(everything)]
    )
    function.check_graph(concrete.graph)
    return traces[-1]


def call(
    params: KerasLayer.Params,
    function: KerasFunction,
    inputs: Sequence[Nest],
    settings: CallSettings,
) -> Called:
    """Call the function on the values of the names that the layer reads."""
    values = dict(zip(params.reads, inputs, strict=True))
    for read, mask in params.masks.items():
        if read in values and mask in values:
            values[read] = _masked(values[read], values[mask])
    return function.call(
        [_filled(arg, values) for arg in params.args],
        {key: _filled(arg, values) for key, arg in params.kwargs.items()},
        settings.weights,
        settings.seed,
        training=settings.training,
        is_frozen=settings.is_frozen,
    )


def written(params: KerasLayer.Params, called: Called) -> Nest:
    """Return the values of the names that the layer writes.

    Raises:
        LayerError: it returns another number of tensors, or no mask although `masks` names one.
    """
    flat = tf.nest.flatten(called.outputs)
    picks = params.picks or range(len(flat))
    if max(picks) >= len(flat):
        raise errors.LayerError(
            f"{base.describe(params)}: picks tensor {max(picks)}, but its call returns {len(flat)}"
        )
    mask_names = set(params.masks.values())
    tensors = [name for name in params.writes if name not in mask_names]
    whole = len(tensors) == 1 and not params.picks
    if whole:
        picks = (0,)
    if len(tensors) != len(picks):
        raise errors.LayerError(
            f"{base.describe(params)}: returns {len(picks)} tensors, but writes {len(tensors)} "
            f"names ({', '.join(tensors)}). Name one for each, or a single one for all"
        )
    values = {n: flat[pick] for n, pick in zip(tensors, picks, strict=not whole)}
    if whole:
        values = {tensors[0]: called.outputs}
    for name, pick in zip(tensors, picks, strict=not whole):
        mask_name = params.masks.get(name)
        if mask_name in params.writes:
            if called.masks[pick] is None:
                raise errors.LayerError(
                    f"{base.describe(params)}: returns no Keras mask with {name!r}, but writes one "
                    f"as {mask_name!r}. Remove it from masks and writes"
                )
            values[mask_name] = called.masks[pick]
    ordered = tuple(values[name] for name in params.writes)
    return ordered if len(ordered) > 1 else ordered[0]


def losses(
    params: KerasLayer.Params,
    function: KerasFunction,
    called: Called,
    weights: Mapping[str, tf.Tensor],
) -> dict[str, list[tf.Tensor]]:
    """Return the losses of a call by kind; only its owner adds the penalty of a tied weight."""
    untied = {path: w for path, w in weights.items() if path not in params.tie}
    penalties = function.regularization(untied) if params.trainable else []
    return {REGULARIZATION: penalties, ACTIVITY: called.losses}


def _symbolic(
    params: KerasLayer.Params,
    inputs: Sequence[SpecNest],
    make: Callable[[tf.TensorSpec], keras.KerasTensor],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the call, with `make(spec)` in place of each input."""
    values = {
        name: tf.nest.map_structure(make, spec)
        for name, spec in zip(params.reads, inputs, strict=True)
    }
    for read, mask in params.masks.items():
        if read in values and mask in values:
            values[read]._keras_mask = values[mask]
    config.refuse_code([params.args, params.kwargs], f"{base.describe(params)}: its arguments")
    return (
        [_filled(arg, values) for arg in params.args],
        {key: _filled(arg, values) for key, arg in params.kwargs.items()},
    )


def _filled(argument: Any, values: Mapping[str, Nest]) -> Any:
    """Return an argument of the call, with values in place of the names that it reads."""
    if isinstance(argument, dict):
        if set(argument) == {READ} and isinstance(argument[READ], str):
            if argument[READ] not in values:
                raise errors.LayerError(
                    f"an argument reads {argument[READ]!r}, which is not in reads; "
                    f"{errors.suggestion(argument[READ], values)}"
                )
            return values[argument[READ]]
        if isinstance(argument.get("class_name"), str):
            return config.to_constant(argument)
        return {key: _filled(item, values) for key, item in argument.items()}
    if isinstance(argument, list | tuple):
        items = [_filled(item, values) for item in argument]
        return tuple(items) if isinstance(argument, tuple) else items
    return argument


def _masked(value: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Return a copy of the tensor with a mask attached in Keras' way."""
    masked = tf.identity(value)
    masked._keras_mask = mask
    return masked


def _gradients(
    compute: Callable[..., list[tf.Tensor | None]],
    ends: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:
    """Return the gradient by each source; None: it has none."""
    if not ends or not sources:
        return [None] * len(sources)
    try:
        gradients = compute(ends, sources)
    except LookupError:  # an operation without a gradient costs nothing
        return [None] * len(sources)
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def _output_spec(params: KerasLayer.Params, tensor: tf.Tensor) -> tf.TensorSpec:
    if not tensor.shape.is_fully_defined():
        raise errors.LayerError(
            f"{base.describe(params)}: returns shape {tensor.shape}, which depends on its data. "
            "A pipeline needs known dimensions. Do that in the input pipeline"
        )
    return tf.TensorSpec(tensor.shape, tensor.dtype)
