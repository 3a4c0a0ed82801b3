"""The update of all weights: weight decay, loss scale, clipping, guard, optimizer, averages.

One never-inlined program per layer computes its new weights and slots from the old ones. Layers
whose weights have equal shapes share one trace, and the programs hold no variable: they are read
before and assigned after, on their devices. A layer's program waits for its own gradients alone,
unless clipping or the guard asks for the norm over all layers; then one scalar per layer travels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base
from lingvo_gpipe.optim import optimizer

# A scale beyond this gains nothing, and doubling it without end would overflow.
_LARGEST_SCALE = 2.0**40


class WeightDecay(hyperparams.Configurable):
    """L2 decay by a weight's group: adds coefficient · ½‖w‖² to the loss of an update."""

    class Params(hyperparams.Configurable.Params):
        """Params of WeightDecay."""

        kernel: float = hyperparams.field(0.0, "Coefficient of kernels and tables.")
        bias: float = hyperparams.field(0.0, "Coefficient of biases.")
        norm: float = hyperparams.field(0.0, "Coefficient of normalisations' scale and offset.")


class LossScale(hyperparams.Configurable):
    """Scale by which losses are multiplied, so that float16 gradients do not vanish."""

    class Params(hyperparams.Configurable.Params):
        """Params of LossScale."""

        initial: float = hyperparams.field(2.0**15, "Scale of the first update.")
        dynamic: bool = hyperparams.field(
            True, "Halves the scale after an update that is not finite, which changes nothing."
        )
        growth_steps: int = hyperparams.field(2000, "Finite updates after which it doubles.")


class Average(hyperparams.Configurable):
    """Exponential moving average of weights and statistics, used for evaluation."""

    class Params(hyperparams.Configurable.Params):
        """Params of Average."""

        decay: float = hyperparams.field(0.9999, "Share of the old average in the new one.")
        warmup: bool = hyperparams.field(
            True, "Uses min(decay, (1+t)/(10+t)) at update t, so that early averages follow."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """What a program must know of a weight; equal tuples of them share one program."""

    shape: tuple[int, ...]
    dtype: tf.DType
    slots: tuple[tuple[str, tuple[int, ...]], ...]
    decay: float
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """The weights of one layer on one device."""

    device: str
    paths: tuple[str, ...]
    weights: tuple[_Weight, ...]


class Updater(hyperparams.Configurable):
    """Holds slots, averages and the loss scale, and updates the weights of a network.

    Attributes:
        optimizer: the rule, its rate and groups.
        slots: {(weight path, slot name): variable}, each on its weight's device.
        averages: {path: variable} of weights and statistics; empty without `average`.
    """

    class Params(hyperparams.Configurable.Params):
        """Params of Updater."""

        optimizer: optimizer.Optimizer.Params = hyperparams.required("Update rule and its rate.")
        clip_norm: float | None = hyperparams.field(
            None, "Largest global norm of the gradient, weight decay included; None: any."
        )
        weight_decay: WeightDecay.Params = hyperparams.field(
            WeightDecay.Params(), "L2 decay by weight group (decoupled decay: the optimizer's)."
        )
        loss_scale: LossScale.Params | None = hyperparams.field(
            None, "Scaling of losses for float16; None: none."
        )
        finite_guard: bool = hyperparams.field(
            True, "An update whose gradient or statistics are not finite changes nothing."
        )
        average: Average.Params | None = hyperparams.field(
            None, "Exponential moving average of weights and statistics; None: none."
        )

    def __init__(
        self,
        params: Any,
        *,
        variables: Mapping[str, tf.Variable],
        specs: Mapping[str, base.VariableSpec],
        device_of: Callable[[str], str],
        layer_of: Callable[[str], str],
        state: Mapping[str, tf.Variable] | None = None,
    ) -> None:
        """Create the slots and averages of a network's variables.

        Args:
            params: own Params.
            variables: the weights to update by path.
            specs: at least theirs, by path.
            device_of: path → device of the variable.
            layer_of: path → name of its top-level layer.
            state: statistics by path; they are assigned and averaged, and have no slots.

        Raises:
            OptimizerError: params do not fit the weights, or there is none.
        """
        super().__init__(params)
        _check(params)
        if not variables:
            raise errors.OptimizerError(
                "there is nothing to train: every weight is frozen, or the network has none. Look "
                "at model.frozen and the layers' trainable"
            )
        self._weights = dict(variables)
        self._state = dict(state or {})
        self._device_of = device_of
        self.optimizer: optimizer.Optimizer = params.optimizer.instantiate()
        factors = self.optimizer.factors(self._weights)
        own = {path: self.optimizer.rule.slots(path, *_form(v)) for path, v in variables.items()}
        self.slots = {
            (path, slot.slot): self._create(path, slot) for path in own for slot in own[path]
        }
        self.averages: dict[str, tf.Variable] = {}
        if params.average is not None:
            for path, variable in (self._weights | self._state).items():
                self.averages[path] = _on(device_of(path), variable.read_value)
        weights = {
            path: _Weight(
                *_form(variable),
                slots=tuple((slot.slot, slot.shape) for slot in own[path]),
                decay=getattr(params.weight_decay, specs[path].group),
                factor=factors[path],
            )
            for path, variable in variables.items()
        }
        self._rows = _rows(weights, device_of, layer_of)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._scale: dict[str, tf.Variable] = {}
        if params.loss_scale is not None:
            self._scale = {
                "scale": tf.Variable(params.loss_scale.initial, dtype=tf.float32),
                "good_steps": tf.Variable(0, dtype=tf.int64),
                "skipped": tf.Variable(0, dtype=tf.int64),
            }

    @property
    def objects(self) -> dict[str, tf.Variable]:
        """Everything a checkpoint must hold of it, by key; named by weight paths alone."""
        return {
            **{f"slots/{path}/{slot}": v for (path, slot), v in self.slots.items()},
            **{f"average/{path}": v for path, v in self.averages.items()},
            **{f"loss_scale/{name}": v for name, v in self._scale.items()},
        }

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The scale of the next update's losses, a float32 scalar; None without scaling."""
        return self._scale["scale"].read_value() if self._scale else None

    @property
    def num_traces(self) -> int:
        """Traces of update programs so far."""
        return sum(p.experimental_get_tracing_count() for p in self._programs.values())

    def apply(
        self,
        gradients: Mapping[str, tf.Tensor],
        state: Mapping[str, tf.Tensor] | None = None,
        *,
        step: tf.Tensor,
        loss_scale: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Update all weights, slots, statistics and averages; eagerly or inside a `tf.function`.

        Args:
            gradients: of every weight by path, in its dtype, times `loss_scale` if that is given.
            state: new values of statistics by path.
            step: integer scalar, updates done before this one.
            loss_scale: what the losses were multiplied by.

        Returns:
            Scalars: learning_rate, gradient_norm (before clipping, weight decay included),
            weight_decay_loss, finite; with loss scaling also loss_scale (the next one's) and
            skipped_updates.

        Raises:
            OptimizerError: a weight has no gradient, or a gradient or statistic no variable.
        """
        state = dict(state or {})
        _check_names("gradient", gradients, self._weights, complete=True)
        _check_names("statistic", state, self._state, complete=False)
        step = tf.cast(step, tf.int64)
        rate = self.optimizer.rate(step)
        inverse = None if loss_scale is None else 1.0 / tf.cast(loss_scale, tf.float32)
        dense = {path: tf.convert_to_tensor(g) for path, g in gradients.items()}
        theta = {path: _read(v) for path, v in self._weights.items()}

        norm, decay_loss = self._norms(theta, dense, inverse)
        finite = tf.math.is_finite(norm)
        finite = self._finite_state(state, finite)
        guard = finite if self.params.finite_guard else None
        clip = None
        if self.params.clip_norm is not None:
            limit = tf.constant(self.params.clip_norm, norm.dtype)
            clip = tf.where(norm > limit, limit / norm, tf.ones_like(norm))
        keep = self._keep(step)

        scalars = {"rate": rate, "step": step, "inverse": inverse, "clip": clip}
        scalars |= {"finite": guard, "keep": keep}
        # On each device one after the other, or the new values of all would be there at once.
        done: dict[str, list[tf.Operation]] = {}
        for row in self._rows:
            with tf.control_dependencies(done.get(row.device, [])):
                done[row.device] = self._update(row, theta, dense, scalars)
        self._assign_state(state, guard, keep)
        told = {
            "learning_rate": rate,
            "gradient_norm": norm,
            "weight_decay_loss": decay_loss,
            "finite": finite,
        }
        return told | self._rescale(finite)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let weights and statistics have their averages' values inside the `with` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        present = self._weights | self._state
        for path, average in self.averages.items():
            value = present[path].read_value()
            present[path].assign(average.read_value())
            average.assign(value)

    def _create(self, path: str, slot: optimizer.SlotSpec) -> tf.Variable:
        if slot.initial is None:
            return _on(self._device_of(path), self._weights[path].read_value)
        filling = slot.initial
        return _on(
            self._device_of(path),
            lambda: tf.fill(slot.shape, tf.cast(tf.constant(filling, tf.float64), slot.dtype)),
        )

    def _norms(
        self,
        theta: Mapping[str, tf.Tensor],
        gradients: Mapping[str, tf.Tensor],
        inverse: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the global norm of the gradient and the loss of the weight decay."""
        wide = any(w.dtype == tf.float64 for row in self._rows for w in row.weights)
        dtype = tf.float64 if wide else tf.float32
        by_device: dict[str, list[tuple[tf.Tensor, tf.Tensor]]] = {}
        for row in self._rows:
            program = self._program("norm", row.weights, lambda w: _norm_program(w, dtype))
            with tf.device(row.device):
                told = program(
                    [theta[p] for p in row.paths], [gradients[p] for p in row.paths], inverse
                )
            by_device.setdefault(row.device, []).append(told)
        sums = []
        for device, told in by_device.items():
            with tf.device(device):
                sums.append([tf.add_n(list(column)) for column in zip(*told, strict=True)])
        square, loss = (tf.add_n(list(column)) for column in zip(*sums, strict=True))
        return tf.sqrt(square), loss

    def _finite_state(self, state: Mapping[str, tf.Tensor], finite: tf.Tensor) -> tf.Tensor:
        flags = [finite]
        for path, value in state.items():
            if value.dtype.is_floating:
                with tf.device(self._device_of(path)):
                    flags.append(tf.reduce_all(tf.math.is_finite(value)))
        return tf.reduce_all(tf.stack(flags)) if len(flags) > 1 else finite

    def _keep(self, step: tf.Tensor) -> tf.Tensor | None:
        """Return the share of the old average in the new one."""
        average = self.params.average
        if average is None:
            return None
        decay = tf.constant(average.decay, tf.float32)
        done = tf.cast(step, tf.float32)
        return tf.minimum(decay, (1.0 + done) / (10.0 + done)) if average.warmup else decay

    def _update(
        self,
        row: _Row,
        theta: Mapping[str, tf.Tensor],
        gradients: Mapping[str, tf.Tensor],
        scalars: dict[str, tf.Tensor | None],
    ) -> list[tf.Operation]:
        """Give a row its new values; return what does so, nothing eagerly."""
        targets = [self._weights[p] for p in row.paths]
        targets += [
            self.slots[path, slot]
            for path, weight in zip(row.paths, row.weights, strict=True)
            for slot, _ in weight.slots
        ]
        targets += [self.averages[p] for p in row.paths if p in self.averages]
        program = self._program(
            "update",
            row.weights,
            lambda weights: _update_program(self.optimizer.rule, row.paths, weights),
        )
        with tf.device(row.device):
            values = [theta[p] for p in row.paths]
            values += [_read(v) for v in targets[len(row.paths) :]]
            new = program(values, [gradients[p] for p in row.paths], **scalars)
            assigned = [
                target.assign(value, read_value=False)
                for target, value in zip(targets, new, strict=True)
            ]
        return [] if tf.executing_eagerly() else assigned

    def _program(
        self, what: str, weights: tuple[_Weight, ...], build: Callable[..., Callable[..., Any]]
    ) -> Any:
        key = (what, weights)
        if key not in self._programs:
            self._programs[key] = tf.function(
                build(weights), autograph=False, experimental_attributes={"_noinline": True}
            )
        return self._programs[key]

    def _assign_state(
        self, state: Mapping[str, tf.Tensor], finite: tf.Tensor | None, keep: tf.Tensor | None
    ) -> None:
        for path, value in state.items():
            variable = self._state[path]
            with tf.device(self._device_of(path)):
                new = _choose(finite, tf.cast(value, variable.dtype), _read(variable))
                variable.assign(new, read_value=False)
                if path in self.averages:
                    old = _read(self.averages[path])
                    mixed = _choose(finite, _mix(old, new, keep), old)
                    self.averages[path].assign(mixed, read_value=False)

    def _rescale(self, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Lower or raise the loss scale; return what is told of it."""
        if not self._scale:
            return {}
        params = self.params.loss_scale
        scale = self._scale["scale"].read_value()
        skipped = self._scale["skipped"].read_value() + tf.cast(~finite, tf.int64)
        if params.dynamic:
            good = self._scale["good_steps"].read_value() + 1
            grown = good >= params.growth_steps
            larger = tf.minimum(scale * 2.0, _LARGEST_SCALE)
            raised = tf.where(grown, larger, scale)
            scale = tf.where(finite, raised, tf.maximum(scale / 2.0, 1.0))
            self._scale["good_steps"].assign(
                tf.where(finite & ~grown, good, tf.zeros_like(good)), read_value=False
            )
            self._scale["scale"].assign(scale, read_value=False)
        self._scale["skipped"].assign(skipped, read_value=False)
        return {"loss_scale": scale, "skipped_updates": skipped}


def _norm_program(weights: tuple[_Weight, ...], dtype: tf.DType) -> Callable[..., Any]:
    """Return (theta, gradients, inverse loss scale) → (squared norm, loss of the weight decay)."""

    def norm(
        theta: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], inverse: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        square = loss = tf.zeros([], dtype)
        for weight, value, gradient in zip(weights, theta, gradients, strict=True):
            whole = _whole_gradient(weight, value, gradient, inverse)
            square += tf.cast(tf.reduce_sum(tf.square(whole)), dtype)
            if weight.decay:
                half = tf.cast(tf.nn.l2_loss(value), dtype)
                loss += tf.constant(weight.decay, dtype) * half
        return square, loss

    return norm


def _update_program(
    rule: optimizer.Rule, paths: Sequence[str], weights: tuple[_Weight, ...]
) -> Callable[..., Any]:
    """Return (weights, slots, averages; gradients; scalars) → their new values, in that order."""

    def update(
        values: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        *,
        rate: tf.Tensor,
        step: tf.Tensor,
        inverse: tf.Tensor | None,
        clip: tf.Tensor | None,
        finite: tf.Tensor | None,
        keep: tf.Tensor | None,
    ) -> list[tf.Tensor]:
        rest = iter(values)
        theta = [next(rest) for _ in weights]
        slots = [{name: next(rest) for name, _ in weight.slots} for weight in weights]
        averages = list(rest)
        new_theta: list[tf.Tensor] = []
        new_slots: list[tf.Tensor] = []
        for path, weight, value, gradient, own in zip(
            paths, weights, theta, gradients, slots, strict=True
        ):
            whole = _whole_gradient(weight, value, gradient, inverse)
            if clip is not None:
                whole *= tf.cast(clip, whole.dtype)
            own_rate = rate if weight.factor == 1.0 else rate * weight.factor
            new, state = rule.update(path, value, whole, own, own_rate, step)
            new_theta.append(_choose(finite, new, value))
            new_slots += [_choose(finite, state[name], old) for name, old in own.items()]
        new_averages = [
            _choose(finite, _mix(old, new, keep), old)
            for old, new in zip(averages, new_theta, strict=False)
        ]
        return new_theta + new_slots + new_averages

    return update


def _whole_gradient(
    weight: _Weight, value: tf.Tensor, gradient: tf.Tensor, inverse: tf.Tensor | None
) -> tf.Tensor:
    """Return the gradient with the loss scale divided out and weight decay added."""
    if inverse is not None:
        gradient *= tf.cast(inverse, gradient.dtype)
    return gradient + weight.decay * value if weight.decay else gradient


def _choose(finite: tf.Tensor | None, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Return `new` if `finite`, else `old`."""
    if finite is None:
        return new
    # With a scalar condition this operation hands on one buffer; tf.where would write a third.
    return tf.raw_ops.Select(condition=finite, x=new, y=old)


def _mix(old: tf.Tensor, new: tf.Tensor, keep: tf.Tensor | None) -> tf.Tensor:
    """Return the average after `new` was added; integers follow."""
    if keep is None or not old.dtype.is_floating:
        return new
    return old + (1.0 - tf.cast(keep, old.dtype)) * (new - old)


def _rows(
    weights: Mapping[str, _Weight],
    device_of: Callable[[str], str],
    layer_of: Callable[[str], str],
) -> list[_Row]:
    """Group weights by layer and device, in the order in which they are given."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path in weights:
        groups.setdefault((layer_of(path), device_of(path)), []).append(path)
    return [
        _Row(device, tuple(paths), tuple(weights[p] for p in paths))
        for (_, device), paths in groups.items()
    ]


def _check(params: Any) -> None:
    scale = params.loss_scale
    if scale is not None and scale.dynamic and not params.finite_guard:
        raise errors.OptimizerError(
            "loss_scale.dynamic needs finite_guard: set finite_guard=True or loss_scale.dynamic="
            "False"
        )
    if scale is not None and not scale.initial > 0:
        raise errors.OptimizerError(
            f"loss_scale.initial={scale.initial} must be above 0; loss_scale=None turns scaling off"
        )
    if scale is not None and scale.growth_steps < 1:
        raise errors.OptimizerError(
            f"loss_scale.growth_steps={scale.growth_steps} must be 1 or more; loss_scale.dynamic="
            "False keeps the scale as it is"
        )
    if params.clip_norm is not None and params.clip_norm <= 0:
        raise errors.OptimizerError(
            f"clip_norm={params.clip_norm} must be above 0; None turns clipping off"
        )
    average = params.average
    if average is not None and not 0.0 <= average.decay < 1.0:
        raise errors.OptimizerError(f"average.decay={average.decay} must be in [0, 1)")


def _check_names(
    what: str, given: Mapping[str, Any], wanted: Mapping[str, Any], *, complete: bool
) -> None:
    unknown = [path for path in given if path not in wanted]
    if unknown:
        near = errors.nearest(unknown[0], wanted)
        raise errors.OptimizerError(
            f"{what} {unknown[0]!r} belongs to no variable of this update; nearest "
            f"{', '.join(near) or 'none'}"
        )
    missing = [path for path in wanted if given.get(path) is None] if complete else []
    if missing:
        raise errors.OptimizerError(
            f"weight {missing[0]!r} has no {what} ({len(missing)} such); freeze it, or let a loss "
            "depend on it"
        )


def _form(variable: tf.Variable) -> tuple[tuple[int, ...], tf.DType]:
    return tuple(variable.shape), variable.dtype


def _read(variable: tf.Variable) -> tf.Tensor:
    with tf.device(variable.device):
        return variable.read_value()


def _on(device: str, value: Callable[[], tf.Tensor]) -> tf.Variable:
    with tf.init_scope(), tf.device(device):
        return tf.Variable(value(), trainable=False)
