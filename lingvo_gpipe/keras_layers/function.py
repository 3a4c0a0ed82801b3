"""A Keras layer or operation as a pure function of tensors, or the reason why it is not pure.

The layer is called by `__call__` in a stateless scope. `stateless_call` would skip dtype policies,
masks and activity regularizers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from lingvo_gpipe import errors, precision
from lingvo_gpipe.graphs import purity
from lingvo_gpipe.keras_layers import variables
from lingvo_gpipe.keras_layers.config import first_line, from_config
from lingvo_gpipe.nests import Nest

_SEED = "seed_generator_state"

Arguments: TypeAlias = Callable[
    [Callable[[tf.TensorSpec], keras.KerasTensor]], tuple[list[Any], dict[str, Any]]
]
"""Positional and keyword arguments of a call, with the result of a function for each input."""


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """What a batch norm computed in a call.

    Attributes:
        count: number of positions, float64.
        mean: [C] mean over the positions.
        variance: [C] biased variance over the positions.
    """

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
    """What one call returned.

    Attributes:
        outputs: nest of tensors.
        masks: for each flat output, its Keras mask or None.
        statistics: path of a batch norm that normalised with its batch → its statistics.
        losses: from `add_loss` and activity regularizers, each a mean over examples.
    """

    outputs: Nest
    masks: list[tf.Tensor | None]
    statistics: dict[str, Statistics]
    losses: list[tf.Tensor]


class _Scope(keras.StatelessScope):
    """A stateless scope that remembers which variables were written."""

    def __init__(self, values: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=values, collect_losses=True, initialize_variables=False)
        self.written: dict[int, Any] = {}

    def add_update(self, update: Any) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


class KerasFunction:
    """A Keras layer or operation as a function of its inputs and weights.

    Attributes:
        name: name of the layer, for errors.
        made: the Keras object; a call leaves it as it was.
        variables: its variables.
    """

    def __init__(
        self,
        name: str,
        made: keras.Operation,
        *,
        is_live: bool = True,
        keras_updates: bool = False,
    ) -> None:
        """Wrap a built layer or an operation.

        Args:
            name: see the class.
            made: see the class.
            is_live: it is its user's, not made from a configuration.
            keras_updates: see `hidden_state`.

        Raises:
            LayerError: it hides state.
        """
        self.name = name
        self.made = made
        self.variables = variables.find(made)
        reason = hidden_state(made, keeps_adapted=is_live, keras_updates=keras_updates)
        if reason is not None:
            raise self._refused(reason)

    @classmethod
    def from_config(
        cls, name: str, config: dict[str, Any], policy: precision.Policy, arguments: Arguments
    ) -> KerasFunction:
        """Make a layer from its configuration, and build it without values.

        Args:
            name: see the class.
            config: result of `config.to_config`.
            policy: precision policy.
            arguments: make → positional and keyword arguments of the call, with `make(spec)` in
                place of each input.

        Raises:
            LayerError: it cannot be made, cannot be called with these arguments, or hides state.
        """
        args, kwargs = arguments(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name))

        def build() -> keras.Operation:
            made = from_config(config, policy)
            made(*args, **kwargs)
            return made

        with _explained(name, "be called on its inputs"):
            made = without_values(build)
        return cls(name, made, is_live=False)

    def call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        weights: Mapping[str, tf.Tensor],
        seed: Callable[[int], tf.Tensor],
        *,
        training: bool,
        is_frozen: Callable[[str], bool],
    ) -> Called:
        """Call it on tensors.

        Args:
            args: arguments of the Keras call; masks are attached to their tensors.
            kwargs: keyword arguments of the Keras call.
            weights: path → value.
            seed: number of a seed generator → its int32 [2] seed in this call.
            training: argument `training` of the Keras call.
            is_frozen: path of a batch norm → whether it uses its moving statistics.

        Raises:
            LayerError: it wrote or stored state other than that of batch norms and seed generators.
        """
        declared = self.variables
        values = [(variable, weights[path]) for path, variable in declared.weights.items()]
        values += [(v, tf.cast(seed(n), v.dtype)) for n, v in enumerate(declared.seeds)]
        if isinstance(self.made, keras.layers.Layer):
            kwargs = {"training": training, **kwargs}
        norms = declared.norms
        with (
            _explained(self.name, "be traced"),
            _watched(norms, is_frozen) as seen,
            _Scope(values) as scope,
        ):
            outputs = self.made(*args, **kwargs)
        self._check_written(scope, seen)
        masks = [getattr(t, "_keras_mask", None) for t in tf.nest.flatten(outputs)]
        # Masks are removed from the outputs: an attached mask would be lost at a cut.
        outputs = (
            tf.nest.map_structure(copied, outputs)
            if any(mask is not None for mask in masks)
            else outputs
        )
        return Called(outputs, masks, self._statistics(scope, seen), self._losses(scope))

    def freeze(self, paths: Sequence[str]) -> None:
        """Freeze sublayers by path.

        Raises:
            LayerError: there is no such sublayer.
        """
        if not paths:
            return
        known = variables.sublayers(self.made)
        for path in paths:
            if path not in known:
                near = errors.suggestion(path, known)
                raise self._refused(f"no sublayer {path!r} to freeze; {near}")
            known[path].trainable = False

    def regularization(self, weights: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Return the penalty of every regularized weight in `weights`."""
        return [
            tf.reduce_sum(v.regularizer(tf.cast(weights[path], v.dtype)))
            for path, v in self.variables.weights.items()
            if path in weights and v.trainable and v.regularizer is not None
        ]

    def regularized(self) -> frozenset[str]:
        """Return the paths of the regularized weights."""
        return frozenset(
            path
            for path, v in self.variables.weights.items()
            if v.trainable and v.regularizer is not None
        )

    def attributes(self) -> dict[tuple[str, str], Any]:
        """Return the attributes of the layer and its sublayers, for `check_attributes`."""
        if not isinstance(self.made, keras.layers.Layer):
            return {}
        return {
            (path, name): _shallow(value)
            for path, layer in variables.sublayers(self.made).items()
            for name, value in variables.own_attributes(layer).items()
        }

    def changed_attribute(self, before: dict[tuple[str, str], Any]) -> tuple[str, str] | None:
        """Return path and name of an attribute that has changed, or holds a symbolic tensor."""
        for key, value in self.attributes().items():
            known = before.get(key, _shallow(None))
            if not _alike(known, value) or any(map(tf.is_symbolic_tensor, value)):
                return key
        return None

    def check_attributes(self, before: dict[tuple[str, str], Any]) -> None:
        """Refuse a layer whose call changed an attribute or stored a tensor in one.

        Raises:
            LayerError: naming the attribute.
        """
        changed = self.changed_attribute(before)
        if changed is None:
            return
        path, name = changed
        where = f" of {path}" if path else ""
        raise self._refused(
            f"its call stores a value in the attribute {name!r}{where}, which a pipeline "
            "would lose. Return it as an output"
        )

    def check_graph(self, graph: tf.Graph) -> None:
        """Refuse a layer whose traced call reads variables or has stateful operations.

        Raises:
            LayerError: naming the variable or operation.
        """
        variables = [v.name for v in graph.variables]
        if variables:
            raise self._refused(
                f"its call reads the variable {variables[0].partition(':')[0]!r}, which Keras does "
                "not list among the layer's variables. Make it by self.add_weight in build"
            )
        for op in graph.get_operations():
            if op.type == "Placeholder" and op.outputs[0].dtype == tf.resource:
                raise self._refused(
                    "its call reads a table or another resource. Do that in the input pipeline"
                )
        for op in graph.get_operations():
            if not purity.is_pure(op):
                advice = (
                    "Draw by keras.random, with a keras.random.SeedGenerator that the layer holds"
                    if "andom" in op.type or "Normal" in op.type
                    else "Use pure operations"
                )
                raise self._refused(f"its call has the stateful operation {op.type}. {advice}")

    def _refused(self, reason: str) -> errors.LayerError:
        return errors.LayerError(f"{self.name}: {reason}")

    def _statistics(self, scope: _Scope, seen: _Seen) -> dict[str, Statistics]:
        """Return each batch norm's statistics, which its momentum of 0 made those of its batch."""
        statistics = {}
        for path, calls in seen.items():
            norm = self.variables.norms[path]
            if len(calls) > 1:
                raise self._refused(
                    f"its batch norm {path or self.made.name} is called {len(calls)} times in one "
                    "call (as by TimeDistributed), so its moving statistics would move as often. "
                    "Call it once, on all time steps, or use one for each call"
                )
            inputs, mask = calls[0]
            statistics[path] = Statistics(
                _count(inputs, mask, norm.axis),
                scope.get_current_value(norm.moving_mean),
                scope.get_current_value(norm.moving_variance),
            )
        return statistics

    def _losses(self, scope: _Scope) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        for loss in scope.losses:
            if tf.is_symbolic_tensor(loss) and loss.graph is not graph:
                raise self._refused(
                    "it adds a loss inside a loop or branch, where it cannot be collected. Add it "
                    "outside"
                )
        return [tf.reduce_sum(loss) for loss in scope.losses]

    def _check_written(self, scope: _Scope, seen: _Seen) -> None:
        expected = {id(v) for v in self.variables.seeds}
        for path in seen:
            norm = self.variables.norms[path]
            expected |= {id(norm.moving_mean), id(norm.moving_variance)}
        names = {id(v): path for path, v in self.variables.weights.items()}
        for key, variable in scope.written.items():
            if key in expected:
                continue
            if key not in names and _SEED in variable.name:
                raise self._refused(
                    "its call draws by keras.random without a seed, so every step would "
                    "draw the same numbers. Give the layer a keras.random.SeedGenerator attribute "
                    "and pass it as seed="
                )
            raise self._refused(
                f"its call writes its variable {names.get(key, variable.path)!r}. A pipeline "
                "changes moving statistics of batch norms alone. Change it in a callback"
            )


def copied(tensor: tf.Tensor) -> tf.Tensor:
    """Return a copy without a mask, with the logits by which Keras' losses compute."""
    copy = tf.identity(tensor)
    logits = getattr(tensor, "_keras_logits", None)
    if logits is not None:
        copy._keras_logits = logits
    return copy


_Seen: TypeAlias = "dict[str, list[tuple[Any, Any]]]"
"""Path of a batch norm → inputs and mask of each of its calls that used the batch."""


@contextlib.contextmanager
def _watched(
    norms: Mapping[str, keras.layers.BatchNormalization], is_frozen: Callable[[str], bool]
) -> Iterator[_Seen]:
    """Let batch norms record their inputs, and write mean and variance of their batch."""
    seen: _Seen = {}

    def watching(path: str, norm: keras.layers.BatchNormalization) -> Callable[..., tf.Tensor]:
        original = norm.call

        @functools.wraps(original)
        def call(
            inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
        ) -> tf.Tensor:
            uses_batch = bool(training) and norm.trainable and not is_frozen(path)
            if uses_batch:
                seen.setdefault(path, []).append((inputs, mask))
            return original(inputs, training=uses_batch, mask=mask)

        return call

    momenta = {path: norm.momentum for path, norm in norms.items()}
    for path, norm in norms.items():
        norm.call, norm.momentum = watching(path, norm), 0.0
    try:
        yield seen
    finally:
        for path, norm in norms.items():
            del norm.call
            norm.momentum = momenta[path]


@contextlib.contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turn the exceptions of a Keras layer into an error that names the layer."""
    try:
        with warnings.catch_warnings():
            # When a model is cut into layers, the model has already issued this warning.
            warnings.filterwarnings("ignore", message=".*does not support masking")
            yield
    except errors.UserError:
        raise
    except Exception as error:  # whatever a Keras layer raises
        raise errors.LayerError(
            f"{name}: the Keras layer cannot {what}: {first_line(error)}"
        ) from error


def without_values(make: Callable[[], keras.Operation]) -> keras.Operation:
    """Return what a function makes, with variables that have no values where that is possible."""
    try:
        with variables.without_values():
            return make()
    except (ValueError, errors.LayerError) as error:
        if "stateless scope" not in str(error):
            raise
        # A variable made from an array has a value from the start.
        with tf.init_scope():
            return make()


def hidden_state(
    made: keras.Operation, *, keeps_adapted: bool = False, keras_updates: bool = False
) -> str | None:
    """Return why a Keras layer cannot be a pure function, as far as is known without calling it.

    Args:
        made: the layer.
        keeps_adapted: whether a `Normalization` keeps what it has adapted to, as a built one does
            when it is converted.
        keras_updates: whether a Keras optimizer updates its variables, and applies constraints.
    """
    if not isinstance(made, keras.layers.Layer):
        return None
    if made.metrics_variables:
        return "its call updates a metric. Compute the metric in a separate layer"
    for path, layer in variables.sublayers(made).items():
        reason = _reason(layer)
        if keeps_adapted and isinstance(layer, keras.layers.Normalization):
            reason = None
        if reason is not None:
            return (f"its sublayer {path} " if path else "it ") + reason
    for path, variable in variables.find(made).weights.items():
        if getattr(variable, "constraint", None) is not None and not keras_updates:
            return (
                f"its variable {path} has the constraint {type(variable.constraint).__name__}, "
                "which only Keras optimizers apply after an update. Make it without the constraint"
            )
    return None


def _reason(layer: keras.layers.Layer) -> str | None:
    """Return why a layer itself hides state, without its sublayers."""
    if getattr(layer, "stateful", False):
        return (
            "is stateful: it carries state from batch to batch, and micro-batches have no such "
            "order. Make it with stateful=False"
        )
    if layer.quantization_mode not in (None, "int8", "int4"):
        return (
            f"is quantized to {layer.quantization_mode}, which a pipeline cannot train. Call "
            'enable_lora and then quantize("int8") or quantize("int4")'
        )
    if getattr(layer, "synchronized", False) or getattr(layer, "renorm", False):
        return (
            "is a batch norm with synchronized or renorm, whose statistics cannot be summed over "
            "micro-batches. Make it without these"
        )
    adapted = {"Normalization": "input_mean", "Discretization": "bin_boundaries"}
    field = adapted.get(type(layer).__name__)
    if field is not None and getattr(layer, field, None) is None:
        return (
            "must adapt to data before it can be called. Make it with known statistics "
            f"({field.removeprefix('input_')}=…)"
        )
    return None


def _count(inputs: tf.Tensor, mask: tf.Tensor | None, axis: int) -> tf.Tensor:
    """Return the number of positions that a batch norm averaged over, float64."""
    positions = tf.size(inputs, tf.int64) // tf.shape(inputs, tf.int64)[axis]
    if mask is None:
        return tf.cast(positions, tf.float64)
    present = tf.broadcast_to(mask, tf.shape(inputs)[:-1])
    return tf.reduce_sum(tf.cast(present, tf.float64))


def _shallow(value: object) -> tuple[Any, ...]:
    """Return the value of an attribute, or the items of a container, as a tuple."""
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | tuple | set) else (value,)


def _alike(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    plain = (bool, int, float, str, type(None))
    return len(before) == len(after) and all(
        a is b or (isinstance(a, plain) and type(a) is type(b) and a == b)
        for a, b in zip(before, after, strict=True)
    )
