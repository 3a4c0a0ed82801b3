"""The update rule of any Keras optimizer, by its name.

Keras writes an update as assignments to variables. Here it runs in Keras' own stateless scope, on a
template whose variables are in a graph that never runs, so that they use no memory. The values that
would have been assigned come out as tensors, bit-equal to what `apply` leaves in the variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import keras_objects
from lingvo_gpipe.optim.rule import Rule, RuleInputs, Shape, SlotSpec

# Arguments of Keras optimizers that would see one weight where they mean all.
_REFUSED_ARGUMENTS = {
    "learning_rate": "set the optimizer's field learning_rate",
    "global_clipnorm": "set the update's field clip_norm, which spans all layers",
    "use_ema": "set the update's field average, which covers statistics too",
    "ema_momentum": "set the update's field average",
    "ema_overwrite_frequency": "averages are used for evaluation and never overwrite weights",
    "loss_scale_factor": "set the update's field loss_scale",
    "gradient_accumulation_steps": "set the field train.accumulate",
    "name": "slots are named by their weight",
}
_WRAPPERS = {
    "LossScaleOptimizer": "set the update's field loss_scale",
    "MultiOptimizer": "set the field groups",
}
# Fills the weight of a template, so that a slot that begins as a copy of it is recognised.
_UNLIKELY = -7.28125

_TemplateKey: TypeAlias = "tuple[str, Shape, tf.DType]"
# Keras class and its arguments → slots of weights. A search for the largest network plans hundreds
# with the same few shapes, each by a rule of its own, and Keras takes milliseconds for a template.
_SLOTS: dict[tuple[type | None, str], dict[_TemplateKey, tuple[SlotSpec, ...]]] = {}


class KerasRule(Rule):
    """The update rule of a Keras optimizer."""

    class Params(Rule.Params):
        """Params of KerasRule."""

        name: str = hyperparams.required("Class of keras.optimizers.")
        config: dict[str, Any] = hyperparams.field(
            {}, "Arguments of that class other than the learning rate."
        )

    params: Params

    def __init__(self, params: KerasRule.Params) -> None:
        super().__init__(params)
        for argument in params.config:
            if argument in _REFUSED_ARGUMENTS:
                raise errors.ParamsError(
                    f"{params.name}: argument {argument!r} cannot be used here; "
                    f"{_REFUSED_ARGUMENTS[argument]}"
                )
        if params.name in _WRAPPERS:
            raise errors.ParamsError(
                f"{params.name} wraps other optimizers and cannot be used here; "
                f"{_WRAPPERS[params.name]}"
            )
        self._template = functools.cache(self._new_template)
        self._initial_values = functools.cache(self._new_initial_values)
        key = (self._keras_class, repr(params.config))
        if key not in _SLOTS:
            with tf.Graph().as_default():
                self._make()  # refuses a wrong name or argument now
            _SLOTS[key] = {}
        self._slots = _SLOTS[key]

    @property
    def _keras_class(self) -> type | None:
        keras_class: type | None = getattr(keras.optimizers, self.params.name, None)
        return keras_class

    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Return the slots of the weight at `path`, by a template of the same shape."""
        key = (self._significant_path(path), shape, dtype)
        if key not in self._slots:
            self._slots[key] = self._new_slots(*key)
        return tuple(dataclasses.replace(slot, path=path) for slot in self._slots[key])

    def update(self, inputs: RuleInputs) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots; see `Rule.update`."""
        weight = inputs.weight
        path = self._significant_path(inputs.path)
        template = self._template(path, tuple(weight.shape), weight.dtype)
        values = {id(template.slots[name]): value for name, value in inputs.slots.items()}
        values[id(template.step)] = inputs.step
        values[id(template.rate)] = tf.cast(inputs.rate, template.rate.dtype)
        variables = template.optimizer.variables
        (weight,), state = template.optimizer.stateless_apply(
            [values[id(v)] for v in variables], [inputs.gradient], [weight]
        )
        new = {id(v): value for v, value in zip(variables, state, strict=True)}
        return weight, {name: new[id(v)] for name, v in template.slots.items()}

    def _new_slots(
        self, path: str, shape: tuple[int, ...], dtype: tf.DType
    ) -> tuple[SlotSpec, ...]:
        slots = self._template(path, shape, dtype).slots
        if not slots:
            return ()
        initial = self._initial_values(path, len(shape), dtype)
        return tuple(
            SlotSpec(path, name, tuple(v.shape), tf.as_dtype(v.dtype), initial[name])
            for name, v in slots.items()
        )

    def _make(self) -> keras.optimizers.Optimizer:
        """Make the Keras optimizer, its variables in the caller's graph and device scope."""
        return keras_objects.make(
            keras.optimizers,
            keras.optimizers.Optimizer,
            self.params.name,
            dict(self.params.config, learning_rate=0.0),
            mixin=_Functional,
        )

    def _new_template(self, path: str, shape: Shape, dtype: tf.DType) -> _Template:
        # In a graph that never runs, variables of any size use no memory.
        with tf.Graph().as_default(), _rate_in(dtype):
            return _Template(self._make(), path, shape, dtype)

    def _significant_path(self, path: str) -> str:
        """Return the part of `path` that the rule may depend on: only Muon chooses by name."""
        kind = self._keras_class
        return path if kind and issubclass(kind, keras.optimizers.Muon) else ""

    def _new_initial_values(self, path: str, rank: int, dtype: tf.DType) -> dict[str, float | None]:
        """Return what each slot begins as, from real variables of shape [2, 3, …]."""
        with tf.init_scope(), tf.device("CPU:0"):
            template = _Template(self._make(), path, tuple(range(2, 2 + rank)), dtype)
            return {
                name: self._initial_value(name, slot, template.weight)
                for name, slot in template.slots.items()
            }

    def _initial_value(
        self, name: str, slot: keras.Variable, weight: keras.Variable
    ) -> float | None:
        values = slot.numpy()
        first = values.flat[0]
        if (values == first).all() and first != _UNLIKELY:
            return float(first)
        if values.shape == tuple(weight.shape) and (values == weight.numpy()).all():
            return None
        raise errors.ParamsError(
            f"{self.params.name}: its slot {name!r} begins neither with one value nor as a copy "
            "of the weight; write it as a Rule"
        )


class _Functional(keras.optimizers.Optimizer):
    """Comes between a Keras optimizer and its TensorFlow backend.

    The backend's versions of these methods use the `tf.Variable` of a Keras variable and refuse
    `stateless_apply`. Those of Keras' own base class work on values alone.
    """

    assign = BaseOptimizer.assign
    assign_add = BaseOptimizer.assign_add
    assign_sub = BaseOptimizer.assign_sub
    stateless_apply = BaseOptimizer.stateless_apply
    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    _backend_update_step = BaseOptimizer._backend_update_step
    _var_key = BaseOptimizer._var_key


@contextlib.contextmanager
def _rate_in(dtype: tf.DType) -> Iterator[None]:
    """Let Keras keep the learning rate of an optimizer made here in float64, if `dtype` is that."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64" if dtype == tf.float64 else before)
    try:
        yield
    finally:
        keras.config.set_floatx(before)


class _Template:
    """A Keras optimizer built for one weight of a shape and dtype."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        name: str,
        shape: Shape,
        dtype: tf.DType,
    ) -> None:
        *scopes, last = name.split("/")
        if last == "table":  # of an embedding, which Muon finds by this word
            scopes.append("embedding")
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            self.weight = keras.Variable(
                initializer=keras.initializers.Constant(_UNLIKELY),
                shape=shape,
                dtype=dtype.name,
                name=last or "weight",
            )
        optimizer.build([self.weight])
        self.optimizer = optimizer
        self.step = optimizer.iterations
        self.rate = optimizer._learning_rate
        self.slots = dict(self._named_slots())

    def _named_slots(self) -> Iterable[tuple[str, keras.Variable]]:
        """Yield (slot name, Keras variable) in the order in which Keras made them.

        A slot is named by the optimizer's attribute that holds it (`momentums`): the names of the
        variables themselves repeat in Adafactor and are numbered by process in Nadam.
        """
        attributes = {}
        for name, value in vars(self.optimizer).items():
            if name in ("_variables", "_trainable_variables"):
                continue
            for held in value if isinstance(value, list) else [value]:
                attributes[id(held)] = name.lstrip("_")
        for variable in self.optimizer.variables:
            if variable is not self.step and variable is not self.rate:
                yield attributes[id(variable)], variable
