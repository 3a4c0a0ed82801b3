"""Optimizers as pure functions: which slots a weight has, and how an update computes new values.

Any Keras optimizer is used by name. Keras writes an update as assignments to variables; here it
runs under Keras' own stateless scope, on a template whose variables lie in a graph that never runs
and so hold no memory, and the values that would have been assigned come out as tensors, bit-equal
to what `apply` leaves behind. Which layer an update belongs to, clipping, averages and guards are
`update`'s.
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base

# Arguments of Keras optimizers that would see one weight where they mean all.
_TAKEN = {
    "learning_rate": "set the optimizer's field learning_rate",
    "global_clipnorm": "set the update's field clip_norm, which spans all layers",
    "use_ema": "set the update's field average, which covers statistics too",
    "ema_momentum": "set the update's field average",
    "ema_overwrite_frequency": "averages are used for evaluation and never overwrite weights",
    "loss_scale_factor": "set the update's field loss_scale",
    "gradient_accumulation_steps": "accumulation is the trainer's",
    "name": "slots are named by their weight",
}
_WRAPPERS = {
    "LossScaleOptimizer": "set the update's field loss_scale",
    "MultiOptimizer": "set the field groups",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSpec:
    """A variable that an optimizer keeps for a weight, on the weight's device.

    Attributes:
        path: of the weight.
        slot: its name.
        shape: static.
        dtype: of the slot.
        initial: the value that fills it; None: it begins as a copy of the weight.
    """

    path: str
    slot: str
    shape: tuple[int, ...]
    dtype: tf.DType
    initial: float | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the slot."""
        count = 1
        for side in self.shape:
            count *= side
        return count * self.dtype.size


class Schedule(hyperparams.Configurable):
    """A learning rate by the number of the update; subclasses define `rate`."""

    class Params(hyperparams.Configurable.Params):
        """Params of a schedule."""

    @abc.abstractmethod
    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float32 scalar, of update `step` (int64 scalar, from 0)."""


class KerasSchedule(Schedule):
    """A schedule of `keras.optimizers.schedules`."""

    class Params(Schedule.Params):
        """Params of KerasSchedule."""

        name: str = hyperparams.required("Keras class, such as CosineDecay.")
        config: dict[str, Any] = hyperparams.field({}, "Arguments of that class.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        kinds = _classes(
            keras.optimizers.schedules, keras.optimizers.schedules.LearningRateSchedule
        )
        self._schedule = _make(kinds, params.name, dict(params.config), "learning rate schedule")

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float32 scalar, of update `step`."""
        return tf.cast(self._schedule(step), tf.float32)


class Rule(hyperparams.Configurable):
    """An update rule of one weight; subclasses define `slots` and `update`, both pure."""

    class Params(hyperparams.Configurable.Params):
        """Params of a rule."""

    @abc.abstractmethod
    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Tell the slots of the weight at `path`."""

    @abc.abstractmethod
    def update(
        self,
        path: str,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Mapping[str, tf.Tensor],
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots.

        Weights with slots of equal names, shapes and dtypes share one trace: `path` is that of the
        first, and nothing else may depend on it.

        Args:
            path: of the weight.
            weight: its value.
            gradient: of its shape and dtype.
            slots: values by slot name.
            rate: float32 scalar.
            step: int64 scalar, updates done before this one.
        """


class KerasRule(Rule):
    """The update rule of a Keras optimizer."""

    class Params(Rule.Params):
        """Params of KerasRule."""

        name: str = hyperparams.required("Class of keras.optimizers.")
        config: dict[str, Any] = hyperparams.field(
            {}, "Arguments of that class other than the learning rate."
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for argument in params.config:
            if argument in _TAKEN:
                raise errors.OptimizerError(
                    f"{params.name}: argument {argument!r} cannot be used here; {_TAKEN[argument]}"
                )
        if params.name in _WRAPPERS:
            raise errors.OptimizerError(
                f"{params.name} wraps other optimizers and cannot be used here; "
                f"{_WRAPPERS[params.name]}"
            )
        self._templates: dict[tuple[Any, ...], _Template] = {}
        self._initial: dict[tuple[Any, ...], dict[str, float | None]] = {}
        with tf.Graph().as_default():
            self._make()  # refuses a wrong name or argument now

    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Tell the slots of the weight at `path`, shapes from a template of its own shape."""
        slots = self._template(path, shape, dtype).slots
        if not slots:
            return ()
        initial = self._initial_values(path, len(shape), dtype)
        return tuple(
            SlotSpec(path, name, tuple(v.shape), tf.as_dtype(v.dtype), initial[name])
            for name, v in slots.items()
        )

    def update(
        self,
        path: str,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Mapping[str, tf.Tensor],
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots; see `Rule.update`."""
        template = self._template(path, tuple(weight.shape), weight.dtype)
        values = {id(template.slots[name]): value for name, value in slots.items()}
        values[id(template.step)] = step
        values[id(template.rate)] = tf.cast(rate, template.rate.dtype)
        variables = template.optimizer.variables
        (weight,), state = template.optimizer.stateless_apply(
            [values[id(v)] for v in variables], [gradient], [weight]
        )
        new = {id(v): value for v, value in zip(variables, state, strict=True)}
        return weight, {name: new[id(v)] for name, v in template.slots.items()}

    def _make(self) -> Any:
        """Make the Keras optimizer, its variables where the caller says."""
        kinds = _classes(keras.optimizers, keras.optimizers.Optimizer)
        config = dict(self.params.config, learning_rate=0.0)
        return _make(kinds, self.params.name, config, "optimizer")

    def _template(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> _Template:
        key = (self._path_read(path), shape, dtype)
        if key not in self._templates:
            # In a graph that never runs, variables of any size cost no memory.
            with tf.Graph().as_default():
                self._templates[key] = _Template(self._make(), key[0], shape, dtype)
        return self._templates[key]

    def _path_read(self, path: str) -> str:
        """Return what of `path` the rule may depend on: Muon alone chooses by name."""
        return path if issubclass(getattr(keras.optimizers, self.params.name), _BY_PATH) else ""

    def _initial_values(self, path: str, rank: int, dtype: tf.DType) -> dict[str, float | None]:
        """Learn from real variables on a shape of two per side with what each slot begins."""
        key = (self._path_read(path), rank, dtype)
        if key not in self._initial:
            with tf.init_scope(), tf.device("CPU:0"):
                template = _Template(self._make(), key[0], (2,) * rank, dtype)
                self._initial[key] = {
                    name: self._initial_value(name, slot, template.weight)
                    for name, slot in template.slots.items()
                }
        return self._initial[key]

    def _initial_value(self, name: str, slot: Any, weight: Any) -> float | None:
        values = slot.numpy()
        first = values.flat[0]
        if (values == first).all() and first != _UNLIKELY:
            return float(first)
        if values.shape == tuple(weight.shape) and (values == weight.numpy()).all():
            return None
        raise errors.OptimizerError(
            f"{self.params.name}: its slot {name!r} begins neither with one value nor as a copy "
            "of the weight; write it as a Rule"
        )


# Fills the weight of a template, so that a slot that begins as a copy of it shows.
_UNLIKELY = -7.28125
_BY_PATH = (keras.optimizers.Muon,)


class _Functional(keras.optimizers.Optimizer):
    """Comes between a Keras optimizer and its TensorFlow backend.

    The backend's versions of these reach for the `tf.Variable` below a Keras variable and refuse
    `stateless_apply`; Keras' own base class has them working on values alone.
    """

    assign = base_optimizer.BaseOptimizer.assign
    assign_add = base_optimizer.BaseOptimizer.assign_add
    assign_sub = base_optimizer.BaseOptimizer.assign_sub
    stateless_apply = base_optimizer.BaseOptimizer.stateless_apply
    _apply_weight_decay = base_optimizer.BaseOptimizer._apply_weight_decay
    _backend_update_step = base_optimizer.BaseOptimizer._backend_update_step
    _var_key = base_optimizer.BaseOptimizer._var_key


class _Template:
    """A Keras optimizer built for one weight of a shape and dtype."""

    def __init__(self, optimizer: Any, name: str, shape: tuple[int, ...], dtype: tf.DType) -> None:
        self.weight = keras.Variable(
            initializer=keras.initializers.Constant(_UNLIKELY),
            shape=shape,
            dtype=dtype.name,
            name=name.replace("/", "_") or "weight",
        )
        optimizer.build([self.weight])
        self.optimizer = optimizer
        self.step = optimizer.iterations
        self.rate = optimizer._learning_rate
        self.slots = dict(self._name_slots())

    def _name_slots(self) -> Iterable[tuple[str, Any]]:
        """Yield (slot name, Keras variable) in the order in which Keras made them.

        A slot is called like the optimizer's attribute that holds it (`momentums`): the names of
        the variables themselves repeat in Adafactor and are numbered by process in Nadam.
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


class Optimizer(hyperparams.Configurable):
    """An update rule, its learning rate, and groups of weights with rates of their own."""

    class Params(hyperparams.Configurable.Params):
        """Params of Optimizer."""

        name: str = hyperparams.field("Adam", "Class of keras.optimizers, such as SGD or AdamW.")
        config: dict[str, Any] = hyperparams.field(
            {}, "Arguments of that class other than the learning rate."
        )
        rule: Rule.Params | None = hyperparams.field(
            None, "A rule of one's own, in place of name and config."
        )
        learning_rate: float | Schedule.Params = hyperparams.required(
            "A constant, or a schedule such as KerasSchedule.Params(name, config)."
        )
        groups: tuple[tuple[str, float], ...] = hyperparams.field(
            (), "(pattern of weight paths, factor of their rate); the first that fits counts."
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        keras_rule = KerasRule.Params(name=params.name, config=params.config)
        self.rule: Rule = (params.rule or keras_rule).instantiate()
        given = params.learning_rate
        self._schedule = None if isinstance(given, float) else given.instantiate()

    def slots(self, specs: Iterable[base.VariableSpec]) -> dict[tuple[str, str], SlotSpec]:
        """Tell all slots of the weights of `specs` by (weight path, slot name).

        Specs that are tied, frozen or state have none. No variable is created.
        """
        return {
            (slot.path, slot.slot): slot
            for spec in specs
            if spec.is_trained and spec.tie is None
            for slot in self.rule.slots(spec.path, spec.shape, spec.dtype)
        }

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of update `step` (from 0), a float32 scalar tensor."""
        if self._schedule is None:
            return tf.constant(self.params.learning_rate, tf.float32)
        return self._schedule.rate(step)

    def factors(self, paths: Iterable[str]) -> dict[str, float]:
        """Return the factor of the rate of each weight.

        Raises:
            OptimizerError: a group's pattern fits no weight.
        """
        paths = list(paths)
        for pattern, _ in self.params.groups:
            if not fnmatch.filter(paths, pattern):
                near = errors.nearest(pattern.strip("*"), paths) or sorted(paths)[:3]
                raise errors.OptimizerError(
                    f"optimizer.groups: pattern {pattern!r} fits no weight; nearest "
                    f"{', '.join(near)}"
                )
        return {
            path: next(
                (f for pattern, f in self.params.groups if fnmatch.fnmatchcase(path, pattern)), 1.0
            )
            for path in paths
        }


def _classes(module: Any, kind: type) -> dict[str, type]:
    """List the classes of `module` that derive from `kind`, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and value is not kind
    }


def _make(kinds: Mapping[str, type], name: str, config: dict[str, Any], what: str) -> Any:
    """Make the Keras object `name` of `kinds` from its arguments."""
    if name not in kinds:
        near = errors.nearest(name, kinds)
        raise errors.OptimizerError(
            f"no Keras {what} {name!r}; "
            + (f"nearest {', '.join(near)}" if near else f"there are {', '.join(sorted(kinds))}")
        )
    kind = kinds[name]
    if what == "optimizer":
        kind = type(name, (kind, _Functional), {})
    try:
        return kind(**config)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in config.items())
        raise errors.OptimizerError(
            f"Keras {what} {name}({given}): {str(error).splitlines()[0]}"
        ) from error
