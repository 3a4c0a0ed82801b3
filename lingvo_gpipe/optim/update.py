"""The update of all weights: weight decay, loss scale, clipping, guard, optimizer, averages.

One program per layer (`layer_programs`) computes the layer's new values from the old ones. The
variables are read before it and assigned after it, on their devices. A layer's program waits only
for the layer's own gradients, unless clipping or the guard needs the norm over all layers; then
each device sends two scalars, its part of the squared norm and of the decay loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, nests, packing
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers import base
from lingvo_gpipe.optim import update_options
from lingvo_gpipe.optim.layer_programs import (
    LayerPrograms,
    LayerWeights,
    Norms,
    StepScalars,
    WeightConfig,
    choose,
)
from lingvo_gpipe.optim.optimizer import Optimizer
from lingvo_gpipe.optim.rule import SlotSpec
from lingvo_gpipe.optim.update_options import Average, LossScale, WeightDecay


class Updater(hyperparams.Configurable):
    """Holds slots, averages and the loss scale, and updates the weights of a network.

    Attributes:
        optimizer: the rule, its rate and groups.
        slots: {(weight path, slot name): variable}, each on its weight's device.
        averages: {path: variable} of weights and statistics; empty without `average`.
        scale: the loss scale; None without one.
    """

    class Params(hyperparams.Configurable.Params):
        """Params of Updater."""

        optimizer: Optimizer.Params = hyperparams.required("Update rule and its rate.")
        clip_norm: float | None = hyperparams.field(
            None, "Largest global norm of the gradient, weight decay included; None: no limit."
        )
        weight_decay: WeightDecay.Params = hyperparams.field(
            WeightDecay.Params(), "L2 decay by weight group (decoupled decay: the optimizer's)."
        )
        loss_scale: LossScale.Params | None = hyperparams.field(
            None, "Scaling of losses for float16; None: no scaling."
        )
        finite_guard: bool = hyperparams.field(
            True,
            "An update whose gradient or statistics are not finite changes no weight, statistic, "
            "slot or average.",
        )
        average: Average.Params | None = hyperparams.field(
            None, "Exponential moving average of weights and statistics; None: no average."
        )

    params: Params

    def __init__(
        self,
        params: Updater.Params,
        *,
        variables: Mapping[str, packing.Variable],
        specs: Mapping[str, base.VariableSpec],
        device_of: Callable[[str], str],
        layer_of: Callable[[str], str],
        state: Mapping[str, packing.Variable] | None = None,
    ) -> None:
        """Create the slots and averages of a network's variables.

        Args:
            params: params of the update.
            variables: the weights to update by path.
            specs: by path, at least of these weights.
            device_of: path → device of the variable.
            layer_of: path → name of its top-level layer.
            state: statistics by path; they are assigned and averaged, and have no slots.

        Raises:
            ParamsError: params do not fit the weights, or there is no weight.
        """
        super().__init__(params)
        _check(params)
        if not variables:
            raise errors.ParamsError(
                "there is nothing to train: every weight is frozen, or the network has none. Look "
                "at model.frozen and the layers' trainable"
            )
        self.scale: LossScale | None = None
        if params.loss_scale is not None:
            self.scale = params.loss_scale.instantiate()
        self._average: Average | None = None
        if params.average is not None:
            self._average = params.average.instantiate()
        self._weights = dict(variables)
        self._state = dict(state or {})
        self._device_of = device_of
        self.optimizer: Optimizer = params.optimizer.instantiate()
        self._programs = LayerPrograms(self.optimizer.rule)
        factors = self.optimizer.factors(self._weights)
        slots = {
            path: self.optimizer.rule.slots(path, tuple(variable.shape), variable.dtype)
            for path, variable in variables.items()
        }
        self.slots: dict[tuple[str, str], packing.Variable] = packing.create(
            {(path, slot.slot): self._wanted(slot) for path in slots for slot in slots[path]}
        )
        self.averages: dict[str, packing.Variable] = {}
        if self._average is not None:
            self.averages = packing.copies(self._weights | self._state)
        self._exchange = tf.function(
            lambda: packing.exchange(self.averages, self._weights | self._state), autograph=False
        )
        configs = {
            path: WeightConfig(
                tuple(variable.shape),
                variable.dtype,
                slots=tuple((slot.slot, slot.shape) for slot in slots[path]),
                decay=getattr(params.weight_decay, specs[path].group),
                rate_factor=factors[path],
            )
            for path, variable in variables.items()
        }
        self._layers = _by_layer(configs, device_of, layer_of)
        # Layers whose variables are assigned together.
        self._groups: dict[Hashable, list[LayerWeights]] = {}
        for layer in self._layers:
            unit = packing.unit(self._weights[layer.paths[0]])
            self._groups.setdefault(unit, []).append(layer)
        wide = any(config.dtype == tf.float64 for config in configs.values())
        self._dtype = tf.float64 if wide else tf.float32  # of norms and of the rate

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The scale of the next update's losses, a float32 scalar; None without scaling."""
        return None if self.scale is None else self.scale.read()

    @property
    def num_traces(self) -> int:
        """Traces of update programs so far."""
        return self._programs.num_traces

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
            gradients: of every weight by path, in its dtype, multiplied by `loss_scale` if there
                is one.
            state: new values of statistics by path.
            step: integer scalar, updates done before this one.
            loss_scale: the factor by which the losses were multiplied.

        Returns:
            Scalars: learning_rate, gradient_norm (before clipping, weight decay included),
            weight_decay_loss, finite; with loss scaling also loss_scale (the next one's) and
            skipped_updates.
        """
        state = dict(state or {})
        step = tf.cast(step, tf.int64)
        rate = tf.cast(self.optimizer.rate(step), self._dtype)
        inverse = None if loss_scale is None else 1.0 / tf.cast(loss_scale, tf.float32)
        dense = {path: tf.convert_to_tensor(g) for path, g in gradients.items()}
        weights = packing.read(self._weights)

        norm, decay_loss = self._global_norm(weights, dense, inverse)
        finite = self._all_finite(tf.math.is_finite(norm), state)
        clip = None
        if self.params.clip_norm is not None:
            limit = tf.constant(self.params.clip_norm, norm.dtype)
            clip = tf.where(norm > limit, limit / norm, tf.ones_like(norm))
        scalars = StepScalars(
            rate,
            step,
            inverse,
            clip,
            finite=finite if self.params.finite_guard else None,
            average_decay=None if self._average is None else self._average.decay(step),
        )
        # One group after the other on each device: at once, the new values of all of them would
        # need memory at the same time.
        done: dict[str, list[tf.Operation]] = {}
        for layers in self._groups.values():
            device = layers[0].device
            with tf.control_dependencies(done.get(device, [])):
                done[device] = self._update_layers(layers, weights, dense, scalars)
        self._assign_state(state, scalars)
        results = {
            "learning_rate": rate,
            "gradient_norm": norm,
            "weight_decay_loss": decay_loss,
            "finite": finite,
        }
        if self.scale is None:
            return results
        # Without the guard no update is skipped, finite or not.
        unskipped = finite if self.params.finite_guard else tf.ones_like(finite)
        return results | self.scale.adjust(unskipped)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Assign weights and statistics their averages' values inside the `with` block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _wanted(self, slot: SlotSpec) -> packing.Wanted:
        weight, initial = self._weights[slot.path], slot.initial

        def value() -> tf.Tensor:
            if initial is None:
                return weight.read_value()
            return tf.fill(slot.shape, tf.cast(tf.constant(initial, tf.float64), slot.dtype))

        # Slots of the weights of one pack are assigned with it.
        kind = (slot.slot, packing.unit(weight))
        return packing.Wanted(slot.shape, slot.dtype, self._device_of(slot.path), kind, value)

    def _global_norm(
        self,
        weights: Mapping[str, tf.Tensor],
        gradients: Mapping[str, tf.Tensor],
        inverse: tf.Tensor | None,
    ) -> Norms:
        """Return the global norm of the gradient and the loss of the weight decay."""
        by_device: dict[str, list[Norms]] = {}
        for layer in self._layers:
            norms = self._programs.norms(
                layer,
                [weights[path] for path in layer.paths],
                [gradients[path] for path in layer.paths],
                inverse,
                self._dtype,
            )
            by_device.setdefault(layer.device, []).append(norms)
        of_devices = []
        for device, all_norms in by_device.items():
            with tf.device(device):
                of_devices.append([in_order(column) for column in zip(*all_norms, strict=True)])
        square, loss = (in_order(column) for column in zip(*of_devices, strict=True))
        return tf.sqrt(square), loss

    def _all_finite(self, finite: tf.Tensor, state: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return whether `finite` holds and all new statistics are finite.

        Each device sends one value, however many statistics it has.
        """
        by_device: dict[str, list[tf.Tensor]] = {}
        for path, value in state.items():
            if nests.is_differentiable(value.dtype):
                by_device.setdefault(self._device_of(path), []).append(value)
        flags = [finite]
        for device, values in by_device.items():
            with tf.device(device):
                of_values = [tf.reduce_all(tf.math.is_finite(tf.abs(v))) for v in values]
                flags.append(tf.reduce_all(tf.stack(of_values)))
        return tf.reduce_all(tf.stack(flags)) if len(flags) > 1 else finite

    def _update_layers(
        self,
        layers: Sequence[LayerWeights],
        weights: Mapping[str, tf.Tensor],
        gradients: Mapping[str, tf.Tensor],
        scalars: StepScalars,
    ) -> list[tf.Operation]:
        """Assign layers their new values; return the operations that do so, none eagerly."""
        paths = [path for layer in layers for path in layer.paths]
        slots_of = {
            path: [(path, slot) for slot, _ in config.slots]
            for layer in layers
            for path, config in zip(layer.paths, layer.configs, strict=True)
        }
        slots = packing.read({key: self.slots[key] for path in paths for key in slots_of[path]})
        means = packing.read({path: self.averages[path] for path in paths if path in self.averages})
        pairs: list[tuple[packing.Variable, tf.Tensor]] = []
        for layer in layers:
            keys = [key for path in layer.paths for key in slots_of[path]]
            averaged = [path for path in layer.paths if path in means]
            values = [weights[path] for path in layer.paths]
            values += [slots[key] for key in keys] + [means[path] for path in averaged]
            targets = [self._weights[path] for path in layer.paths]
            targets += [self.slots[key] for key in keys]
            targets += [self.averages[path] for path in averaged]
            with tf.device(layer.device):
                new = self._programs.update(
                    layer, values, [gradients[path] for path in layer.paths], scalars
                )
            pairs += zip(targets, new, strict=True)
        return packing.assign(pairs)

    def _assign_state(self, state: Mapping[str, tf.Tensor], scalars: StepScalars) -> None:
        before = packing.read({path: self._state[path] for path in state})
        means = packing.read({path: self.averages[path] for path in state if path in self.averages})
        pairs: list[tuple[packing.Variable, tf.Tensor]] = []
        for path, value in state.items():
            with tf.device(self._device_of(path)):
                old = before[path]
                new = choose(scalars.finite, tf.cast(value, old.dtype), old)
                pairs.append((self._state[path], new))
                if path in means:
                    mean = update_options.averaged(means[path], new, scalars.average_decay)
                    mean = choose(scalars.finite, mean, means[path])
                    pairs.append((self.averages[path], mean))
        packing.assign(pairs)


def _by_layer(
    configs: Mapping[str, WeightConfig],
    device_of: Callable[[str], str],
    layer_of: Callable[[str], str],
) -> list[LayerWeights]:
    """Group weights by layer and device, in the order of `configs`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path in configs:
        groups.setdefault((layer_of(path), device_of(path)), []).append(path)
    return [
        LayerWeights(device, tuple(paths), tuple(configs[path] for path in paths))
        for (_, device), paths in groups.items()
    ]


def _check(params: Updater.Params) -> None:
    scale = params.loss_scale
    if scale is not None and scale.dynamic and not params.finite_guard:
        raise errors.ParamsError(
            "loss_scale.dynamic needs finite_guard: set finite_guard=True or loss_scale.dynamic="
            "False"
        )
    if params.clip_norm is not None and not 0 < params.clip_norm < math.inf:
        raise errors.ParamsError(
            f"clip_norm={params.clip_norm} must be above 0 and finite; None turns clipping off"
        )
