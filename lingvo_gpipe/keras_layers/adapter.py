"""A Keras layer in a pipeline.

    params = keras_adapter.from_keras(keras.layers.Dense(10), reads=("x",), writes=("x",))

The Keras object is built without values; its variables are declared as our specs, and its call is
a pure function of what it is handed. Dropout and every other seed generator draw from `ctx.seed`.
A batch norm normalises with its micro-batch and gives moments; its moving statistics move once per
update, with its own momentum. Losses of `add_loss` and of activity regularizers are taken as means
over examples; weight regularizers count once per update. What hides state is refused with the
reason (`keras_function`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe.keras_layers import function, trace, variables
from lingvo_gpipe.keras_layers.config import class_name, policy_name, to_config
from lingvo_gpipe.keras_layers.trace import READ
from lingvo_gpipe.keras_layers.weights import keep
from lingvo_gpipe.layers import heads, normalization
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class KerasLayer(Layer):
    """Reads and writes what its Keras layer or operation does; made by `from_keras`.

    Its cost is counted on its traced graph, an estimate (`keras_cost`).
    """

    class Params(Layer.Params):
        config: dict[str, Any] = hyperparams.required(
            "The Keras layer or operation (keras_config.to_config)."
        )
        args: list[Any] = hyperparams.field(
            [{READ: "x"}], "Arguments of its call; {'read': name} stands for a name it reads."
        )
        kwargs: dict[str, Any] = hyperparams.field({}, "Keyword arguments of its call, likewise.")
        picks: tuple[int, ...] = hyperparams.field(
            (), "Which of the tensors that its call gives are written; empty: all."
        )
        masks: dict[str, str] = hyperparams.field(
            {}, "Name it reads or writes → name under which that tensor's Keras mask travels."
        )
        weights: str = hyperparams.field(
            "", "Name of the weights kept from a live layer (keras_weights); empty: fresh ones."
        )
        frozen: tuple[str, ...] = hyperparams.field((), "Paths of sublayers that are not trained.")
        examples: str = hyperparams.field(
            "", "Field of the mini-batch that counts examples for its losses; empty: the first."
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            traced = trace.trace(self, inputs)
            found = traced.function.variables
            return Meta(
                outputs=traced.outputs,
                variables=tuple(
                    variables.spec(path, variable, found, self.weights)
                    for path, variable in found.weights.items()
                ),
                flops_forward=traced.flops_forward,
                flops_backward=traced.flops_backward,
                activation_bytes=traced.activation_bytes,
                losses=tuple(
                    LossSpec(f"{_loss_stem(self)}/{kind}", 1.0, _weight(self))
                    for kind in traced.losses
                ),
            )

    params: Params

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._norms: dict[str, Layer] = {}

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        params = self.params
        given = inputs if len(params.reads) > 1 else (inputs,)
        traced = trace.known(params, tf.nest.map_structure(_spec_of, given))
        function = traced.function
        weights = {
            path: _at(ctx.state if path in function.variables.statistics else theta, path)
            for path in function.variables.weights
        }

        def is_frozen(path: str) -> bool:
            own = f"{ctx.path}/{path}" if path else ctx.path
            return not params.trainable or ctx.replace(path=own).is_frozen

        before = function.attributes()
        called = trace.call(
            params,
            function,
            given,
            weights,
            seed=ctx.fold,
            training=ctx.training,
            is_frozen=is_frozen,
        )
        function.check_attributes(before)
        examples = tf.shape(tf.nest.flatten(given)[0])[0]
        for kind in traced.losses:
            found = trace.losses(params, function, called, weights)[kind]
            dtype = self.policy.variable
            total = tf.add_n([tf.cast(loss, dtype) for loss in found] or [tf.zeros([], dtype)])
            # Times examples here, over all examples of the update there: their weighted mean,
            # and for what does not depend on the micro-batch the very thing, once.
            ctx.add_loss(f"{_loss_stem(params)}/{kind}", total * tf.cast(examples, dtype))
        for path, seen in called.statistics.items():
            momentum = function.momenta[path]
            self._norms[path] = normalization.BatchNorm.Params(momentum=momentum).instantiate()
            own = ctx.replace(path=f"{ctx.path}/{path}" if path else ctx.path)
            own.add_moments(_moments(seen, weights[f"{path}/moving_mean".removeprefix("/")]))
        return trace.written(params, called)

    def find(self, path: str) -> Layer:
        """See `Layer.find`; a batch norm among its sublayers stands for its moments."""
        return self._norms[path] if path and path in self._norms else super().find(path)

    def merge_moments(self, state: dict[str, tf.Tensor], moments: Any) -> dict[str, tf.Tensor]:
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
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return the Params of a live Keras layer (or operation).

    Args:
        live: the layer, built or not; it is left as it is.
        name: of the layer in the network; None: its own.
        reads: names of the stream it reads, those of masks last.
        writes: names it writes, those of masks last; one for each tensor it gives, or a single
            one for the whole nest.
        masks: name it reads or writes → name of that tensor's Keras mask, itself among `reads` or
            `writes`. Keras' `Embedding(mask_zero=True)` before an LSTM needs it.
        keep_weights: a built layer starts from its present weights (copied; see `keras_weights`).
            False, and where it is not built: from its own initializers, seeded by our rules.
        args: arguments of its call, `{"read": name}` for what it reads. None: each name is an
            argument, or all in one list where the layer's call takes a single one.
        kwargs: keyword arguments of its call.

    Raises:
        LayerError: it does not tell how it was made.
    """
    own_masks = dict(masks or {})
    tensors = [read for read in reads if read not in own_masks.values()]
    config = to_config(live)
    own_name = live.name if name is None else name
    if "name" in config["config"]:
        config["config"]["name"] = own_name
    weights = ""
    frozen: tuple[str, ...] = ()
    if isinstance(live, keras.layers.Layer) and live.built:
        found = variables.find(live).weights
        if found and keep_weights:
            weights = keep({path: v.numpy() for path, v in found.items()})
        frozen = _frozen(live)
    return KerasLayer.Params(
        name=own_name,
        reads=tuple(reads),
        writes=tuple(writes),
        dtype=policy_name(live),
        config=config,
        args=_default_args(live, tensors) if args is None else list(args),
        kwargs=dict(kwargs or {}),
        masks=own_masks,
        weights=weights,
        frozen=frozen,
    )


def _default_args(live: keras.Operation, tensors: Sequence[str]) -> list[Any]:
    marked: list[Any] = [{READ: read} for read in tensors]
    accepted = [
        p
        for name, p in inspect.signature(live.call).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and name not in ("training", "mask")
    ]
    # Keras' own convention: a call's `inputs` hold all of them.
    together = len(accepted) < len(marked) or accepted[0].name == "inputs"
    return [marked] if together and len(marked) > 1 else marked


def _frozen(live: keras.layers.Layer) -> tuple[str, ...]:
    """Return the paths of sublayers that were frozen by themselves, outermost ones alone."""
    found: list[str] = []
    for path, layer in variables.sublayers(live).items():
        inside = any(path.startswith(f"{outer}/") for outer in found)
        if path and not layer.trainable and not inside:
            found.append(path)
    return tuple(found)


def _loss_stem(params: Any) -> str:
    return params.name or class_name(params.config)


def _weight(params: Any) -> Callable[[dict[str, Any]], tf.Tensor]:
    """Return how many examples an update has, as a function of its fields."""

    def weight(fields: dict[str, Any]) -> tf.Tensor:
        name = params.examples or next(iter(fields))
        dtype = precision.policy(params.dtype).variable
        counted = {name: tf.nest.flatten(fields[name])[0]} if name in fields else fields
        return heads.weight_by(name, dtype, examples=0)(counted)

    return weight


def _moments(seen: function.Statistics, moving_mean: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return (count, Σ(x − μ₀), Σ(x − μ₀)²) around the moving mean μ₀, float64."""
    shift = tf.cast(seen.mean, tf.float64) - tf.cast(moving_mean, tf.float64)
    squares = tf.cast(seen.variance, tf.float64) + tf.square(shift)
    return {
        "count": seen.count,
        "sum": seen.count * shift,
        "sum_of_squares": seen.count * squares,
    }


def _at(nest: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a path of a nested dictionary."""
    value: Any = nest
    for part in path.split("/"):
        value = value[part]
    return value


def _spec_of(value: Any) -> tf.TensorSpec:
    return tf.TensorSpec(value.shape, value.dtype)
