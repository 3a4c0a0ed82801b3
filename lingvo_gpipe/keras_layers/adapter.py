"""A Keras layer in a pipeline.

    params = keras_layers.from_keras(keras.layers.Dense(10), reads=("x",), writes=("x",))

The Keras object is built without values. Its variables are declared in the layer's Meta, and its
call is a pure function of tensors. Dropout and every other seed generator draw from `ctx.seed`. A
batch norm normalises with its micro-batch and adds moments; its moving statistics move once per
update, with its momentum. Losses of `add_loss` and of activity regularizers are means over
examples; weight regularizers count once per update. A layer that hides state is refused with the
reason (`function`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.keras_layers import trace, variables
from lingvo_gpipe.keras_layers.config import class_name, policy_name, to_config
from lingvo_gpipe.keras_layers.live import Live
from lingvo_gpipe.keras_layers.trace import READ
from lingvo_gpipe.layers import heads, normalization
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, Theta, ValueRange
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

_EMBEDDING = "keras.layers", "Embedding"
_MIXES = "compares the examples of a mini-batch with each other"


class KerasLayer(Layer):
    """Any nests of tensors that the Keras layer takes → the nests that it returns.

    `from_keras` makes it. Its cost is an estimate, counted on its traced graph (`trace`).
    """

    class Params(Layer.Params):
        config: dict[str, Any] | Live = hyperparams.required(
            "The Keras layer or operation itself, or what makes it again "
            "(keras_layers.config.to_config)."
        )
        args: list[Any] = hyperparams.field(
            [{READ: "x"}], "Arguments of the call; {'read': NAME} is the value of a name it reads."
        )
        kwargs: dict[str, Any] = hyperparams.field({}, "Keyword arguments of the call, likewise.")
        takes: dict[str, tuple[str, tuple[int | None, ...]]] = hyperparams.field(
            {},
            "Name it reads → dtype and shape of the keras.Input to which it is cast and reshaped.",
        )
        mixes: bool = hyperparams.field(
            False, "Whether what it writes depends on which examples are in a mini-batch together."
        )
        picks: tuple[int, ...] = hyperparams.field(
            (), "Which of the tensors that the call returns are written; empty: all."
        )
        masks: dict[str, str] = hyperparams.field(
            {}, "Name it reads or writes → name of that tensor's Keras mask."
        )
        frozen: tuple[str, ...] = hyperparams.field((), "Paths of sublayers that are not trained.")
        examples: str = hyperparams.field(
            "",
            "Field whose batch size counts the examples for its losses; empty: the first field.",
        )
        unread: bool = hyperparams.field(
            False, "Whether no layer reads what it writes: it has losses or statistics."
        )

        def compared(self) -> tuple[str, ...]:
            """See `Layer.Params.compared`; what such a layer writes may stay unread."""
            return self.reads if self.unread else ()

        def _inference(self) -> Layer.Params | None:
            return None if self.unread else super()._inference()

        def kind_name(self) -> str:
            """Return the name of the Keras class."""
            if isinstance(self.config, Live):
                return type(self.config.operation).__name__
            return class_name(self.config)

        def value_ranges(self) -> dict[str, ValueRange]:
            """Return the range of the ids of a Keras Embedding."""
            config, size = self.config, None
            if isinstance(config, Live):
                if type(config.operation) is keras.layers.Embedding:
                    size = config.operation.input_dim
            elif (config.get("module"), class_name(config)) == _EMBEDDING:
                size = config["config"]["input_dim"]
            read = [arg[READ] for arg in self.args if isinstance(arg, dict) and READ in arg]
            if size is None or len(read) != 1:
                return {}
            return {read[0]: ValueRange(size, "input_dim")}

        def gradient_sources(
            self, inputs: Sequence[SpecNest], writes: Collection[int]
        ) -> frozenset[str | int]:
            """Return the weights and inputs by which a loss has a gradient in Keras, not None.

            Args:
                inputs: see `fprop_meta`.
                writes: numbers of the names it writes by which a later loss has a gradient. The
                    losses that the layer adds count too.

            Returns:
                Paths of weights, and numbers of the names it reads.
            """
            traced = trace.trace(self, inputs)
            *written, activity = traced.sources
            sources = activity.union(*(written[number] for number in writes))
            if trace.REGULARIZATION in traced.losses:
                sources |= traced.function.regularized() - set(self.tie)
            return sources

        def _meta(self, *inputs: SpecNest) -> Meta:
            _check_squeeze(self, inputs)
            traced = trace.trace(self, inputs)
            declared = traced.function.variables
            live: dict[str, keras.Variable] = {}
            if isinstance(self.config, Live):
                live = variables.find(self.config.operation).weights
            return Meta(
                outputs=traced.outputs,
                variables=tuple(
                    variables.spec(path, declared, self.policy, live.get(path))
                    for path in declared.weights
                ),
                flops_forward=traced.flops_forward,
                flops_backward=traced.flops_backward,
                activation_bytes=traced.activation_bytes,
                losses=tuple(
                    _loss_spec(self, kind, is_sum=kind == trace.ACTIVITY and traced.adds_sums)
                    for kind in traced.losses
                ),
                undivided=_MIXES if self.mixes else traced.undivided,
            )

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        self._norms: dict[str, Layer] = {}

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        params = self.params
        values = trace.as_read(params, inputs if len(params.reads) > 1 else (inputs,))
        _check_squeeze(params, values)
        traced = trace.known(params, tf.nest.map_structure(_spec_of, values))
        function = traced.function
        weights = {
            path: _value_at(ctx.state if path in function.variables.statistics else theta, path)
            for path in function.variables.weights
        }

        def is_frozen(path: str) -> bool:
            return self._at(ctx, path).is_frozen

        called = trace.call(
            params,
            function,
            values,
            trace.CallSettings(weights, ctx.fold, ctx.training, is_frozen),
        )
        for kind in traced.losses:
            examples = tf.shape(tf.nest.flatten(values)[0])[0]
            losses = trace.losses(params, function, called, weights)[kind]
            dtype = self.policy.variable
            total = tf.add_n([tf.cast(loss, dtype) for loss in losses] or [tf.zeros([], dtype)])
            # A mean is multiplied by the number of examples of the micro-batch and divided by that
            # of the update, which is the weighted mean over micro-batches. A loss that is equal in
            # all of them, such as a penalty on a weight, counts once.
            if not (kind == trace.ACTIVITY and traced.adds_sums):
                total *= tf.cast(examples, dtype)
            ctx.add_loss(f"{_loss_stem(params)}/{kind}", total)
        for path, seen in called.statistics.items():
            # What the trace found about the layer, the same in every call: fprop stays pure.
            momentum = float(function.variables.norms[path].momentum)
            self._norms[path] = normalization.BatchNorm.Params(momentum=momentum).instantiate()
            moving_mean = weights[f"{path}/moving_mean".removeprefix("/")]
            # Keras computes no mean of x − mean, the rounding of its mean.
            means = seen.mean, tf.zeros_like(seen.mean)
            normalization.add_moments(
                self._at(ctx, path), seen.count, means, seen.variance, moving_mean
            )
        return trace.written(params, called)

    def _at(self, ctx: Context, path: str) -> Context:
        """Return the context of the sublayer at `path`; an empty path is the layer itself."""
        return ctx.replace(path=f"{ctx.path}/{path}") if path else ctx

    def find(self, path: str) -> Layer:
        """See `Layer.find`; the path of a batch norm inside finds what merges its moments."""
        return self._norms[path] if path and path in self._norms else super().find(path)

    def merge_moments(
        self, state: dict[str, tf.Tensor], moments: dict[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """See `Layer.merge_moments`; for a layer that is itself a batch norm."""
        return self._norms[""].merge_moments(state, moments)


def from_keras(
    live: keras.Operation,
    *,
    name: str | None = None,
    reads: Sequence[str] = ("x",),
    writes: Sequence[str] = ("x",),
    masks: Mapping[str, str] | None = None,
    keep_weights: bool = True,
    keras_updates: bool = False,
) -> KerasLayer.Params:
    """Return the Params of a live Keras layer (or operation).

    Each name that it reads becomes an argument of the call. If the call takes a single argument,
    all names become one list. For another call, set the fields `args` and `kwargs` of the result.

    Args:
        live: the layer, built or not; it is not changed.
        name: name of the layer in the network; None: its Keras name.
        reads: names in the stream that it reads, names of masks last.
        writes: names that it writes, names of masks last; one for each tensor that it returns, or
            a single name for the whole nest.
        masks: name that it reads or writes → name of that tensor's Keras mask, which must also be
            in `reads` or `writes`. Keras' `Embedding(mask_zero=True)` before an LSTM needs it.
        keep_weights: a built layer starts from its current weights. If False, or if it is not
            built, it starts from its Keras initializers with the seeds of the pipeline.
        keras_updates: whether a Keras optimizer updates its weights, which applies constraints.

    Raises:
        LayerError: the layer cannot be made again from its config, and has to be: it is not built,
            or `keep_weights` is False.
    """
    masks = dict(masks or {})
    tensors = [read for read in reads if read not in masks.values()]
    name = live.name if name is None else name
    config: dict[str, Any] | Live
    frozen: tuple[str, ...] = ()
    if isinstance(live, keras.layers.Layer) and not live.built:
        config = to_config(live)
        if "name" in config["config"]:
            config["config"]["name"] = name
    else:
        config = Live(live, name, keras_updates=keras_updates)
        if isinstance(live, keras.layers.Layer):
            frozen = _frozen(live)
            if not keep_weights:
                config = config.config
    return KerasLayer.Params(
        name=name,
        reads=tuple(reads),
        writes=tuple(writes),
        dtype=policy_name(live),
        config=config,
        args=_default_args(live, tensors),
        masks=masks,
        frozen=frozen,
    )


def to_keras(
    live: keras.layers.Layer,
    values: Mapping[str, variables.Value],
    *,
    name: str | None = None,
) -> None:
    """Assign values of a pipeline to the variables of a built Keras layer.

    Args:
        live: the layer that `from_keras` converted, or one like it.
        values: path in the network → variable or array, such as `by_path` of the pipeline.
        name: name of the layer in the network; None: its Keras name.

    Raises:
        LayerError: a value is missing, or has another shape.
    """
    variables.assign({live.name if name is None else name: live}, values)


def _default_args(live: keras.Operation, tensors: Sequence[str]) -> list[Any]:
    """Return the arguments of a call on `tensors`, as the field `args` holds them."""
    marked: list[Any] = [{READ: read} for read in tensors]
    accepted = [
        p
        for name, p in inspect.signature(live.call).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and name not in ("training", "mask")
    ]
    # Keras' convention: the argument `inputs` of a call is the list of all inputs.
    together = len(accepted) < len(marked) or accepted[0].name == "inputs"
    return [marked] if together and len(marked) > 1 else marked


def _frozen(live: keras.layers.Layer) -> tuple[str, ...]:
    """Return the paths of frozen sublayers; of nested ones only the outermost."""
    frozen: list[str] = []
    for path, layer in variables.sublayers(live).items():
        inside = any(path.startswith(f"{outer}/") for outer in frozen)
        if path and not layer.trainable and not inside:
            frozen.append(path)
    return tuple(frozen)


def _loss_stem(params: KerasLayer.Params) -> str:
    config = params.config
    return params.name or (
        config.operation.name if isinstance(config, Live) else class_name(config)
    )


def _loss_spec(params: KerasLayer.Params, kind: str, *, is_sum: bool) -> LossSpec:
    """Return the declaration of a loss that the layer adds: a mean over examples, or a sum."""
    name, dtype = f"{_loss_stem(params)}/{kind}", params.policy.variable
    if is_sum:
        return LossSpec(name, 1.0, lambda _: tf.ones([], dtype), of_batch=True)
    weight = heads.weight_by(params.examples, dtype, examples=True)
    return LossSpec(name, 1.0, weight, by_rows=True)


def _check_squeeze(params: KerasLayer.Params, inputs: Sequence[Nest]) -> None:
    """Refuse a squeeze that would also remove the dimension of the examples.

    Raises:
        LayerError: there is one example.
    """
    config = params.config
    operation = config.operation if isinstance(config, Live) else None
    is_squeeze = type(operation).__name__ == "Squeeze" and getattr(operation, "axis", 0) is None
    if is_squeeze and tf.nest.flatten(tuple(inputs))[0].shape[:1] == [1]:
        raise errors.LayerError(
            f"{params.name}: ops.squeeze without an axis removes the dimension of the examples, "
            "of which a micro-batch has one. Name the axis: ops.squeeze(x, axis=-1)"
        )


def _value_at(nest: Mapping[str, Nest], path: str) -> tf.Tensor:
    """Return the value at a path of a nested dictionary."""
    value: Nest = nest
    for part in path.split("/"):
        value = value[part]
    return value


def _spec_of(value: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(value.shape, value.dtype)
