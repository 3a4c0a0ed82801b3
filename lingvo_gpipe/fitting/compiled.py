"""The losses and metrics of `compile`, computed in the last cell for each micro-batch.

The outputs of a whole mini-batch, such as the logits of a language model, may need more memory than
all else on a device. But nearly all metrics keep sums over examples: of correct answers, or the
counts of a curve. Then a micro-batch adds what its examples add, and no output leaves its cell.
Metrics that keep anything else read the outputs of the whole mini-batch, as in Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.keras_layers import masks
from lingvo_gpipe.layers import base, trials
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.layers.losses import Comparison, Divisor, find_divisor, is_of_keras
from lingvo_gpipe.layers.trials import Values
from lingvo_gpipe.nests import Nest, SpecNest

_KNOWN = ("keras.", "keras_hub.")  # a user's own class may keep more than its variables


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Names of what losses and metrics compare.

    Attributes:
        model: whose outputs they compare.
        inputs: fields with the inputs of the model, flat.
        outputs: outputs, in the structure of the model.
        labels: fields with the labels, in the structure of the data; None: there are none.
        weights: fields with the sample weights, likewise.
    """

    model: Functional
    inputs: tuple[str, ...]
    outputs: Any
    labels: Any
    weights: Any

    def compared(self) -> tuple[str, ...]:
        """Return the fields with labels and sample weights."""
        flat = keras.tree.flatten([self.labels, self.weights])
        return tuple(name for name in flat if name is not None)

    def arguments(self, values: Values) -> tuple[Any, Any, Any]:
        """Return labels, outputs with their masks, and sample weights, in their structures.

        Args:
            values: fields and outputs; without outputs, these are zeros of no shape.
        """

        def value(name: str | None) -> tf.Tensor | None:
            if name is None:
                return None
            return values[name] if name in values else tf.zeros([])

        def at(names: Any) -> Any:
            return keras.tree.map_structure(value, names)

        inputs = [values[name] for name in self.inputs]
        outputs = masks.with_masks(self.model, inputs, at(self.outputs))
        return at(self.labels), outputs, at(self.weights)

    def drawn(
        self, fields: Values, outputs: Mapping[str, tf.TensorSpec]
    ) -> dict[str, tf.Tensor | tf.TensorSpec]:
        """Return what losses and metrics are tried on: weights and outputs are drawn.

        Args:
            fields: a mini-batch.
            outputs: name of an output of the model → its spec.
        """
        weights = [name for name in keras.tree.flatten(self.weights) if name is not None]
        drawn = {name: tf.TensorSpec.from_tensor(fields[name]) for name in weights}
        return {**fields, **drawn, **outputs}


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One of the losses that `compile` was given.

    Attributes:
        name: its name in the network.
        coefficient: from `loss_weights`.
        divisor: see `losses.Divisor`.
    """

    name: str
    coefficient: float
    divisor: Divisor


class Objective(hyperparams.Opaque):
    """The losses of `compile`, for mini-batches of one structure.

    Attributes:
        names: names of what they compare.
        terms: one for each loss.
    """

    def __init__(self, compiled: CompileLoss, names: Names) -> None:
        """Find the losses; Keras has to have called them before.

        Args:
            compiled: the losses.
            names: see the class.
        """
        self.names = names
        self._calls = _calls(compiled, names)
        nested = keras.tree.is_nested(names.labels) or keras.tree.is_nested(names.outputs)
        # Of several losses for a single output, Keras uses the first.
        losses = compiled._flat_losses if nested else compiled._flat_losses[:1]
        self.terms = tuple(
            Term(f"loss_{number}", _coefficient(loss.loss_weights), "kept")
            for number, loss in enumerate(losses)
        )

    def sums(self, values: Values) -> list[tf.Tensor]:
        """Return each loss of a micro-batch, times its divisor; of float64."""
        return [
            comparison.sum(term.divisor)
            for comparison, term in zip(self._comparisons(values), self.terms, strict=False)
        ]

    def divisor(self, number: int, fields: Values) -> tf.Tensor:
        """Return what the sum of a loss over a mini-batch is divided by; of float64.

        Args:
            number: of the loss, in `terms`.
            fields: the mini-batch.
        """
        return self._comparisons(fields)[number].divisor(self.terms[number].divisor)

    def check(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> None:
        """Refuse a loss that reads a variable, whose later values its cell would not have.

        Args:
            values: see `trials.on_examples`.

        Raises:
            LayerError: naming the loss and the variable.
        """

        def read_by(number: int, examples: Values) -> list[str]:
            with contextlib.suppress(Exception):  # what cannot be traced is refused by its cell
                graph = trials.graph_of(lambda: self._comparisons(examples)[number].sum("one"))
                return [variable.name for variable in graph.variables]
            return []

        for number, (loss, *_) in enumerate(self._calls):
            if is_of_keras(loss):
                continue
            names = trials.on_examples(functools.partial(read_by, number), values)
            if names:
                raise errors.LayerError(
                    f"the loss {loss.name!r} reads the variable {names[0].partition(':')[0]!r}, "
                    "but a pipeline computes losses from labels and outputs alone. Hold what it "
                    "reads in a layer, whose call adds this loss by self.add_loss"
                )

    def divide(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> None:
        """Choose divisors with which sums over micro-batches are those of a mini-batch.

        Args:
            values: see `trials.on_examples`.

        Raises:
            LayerError: a loss is not a sum over examples.
        """
        flat = keras.tree.flatten(self.names.labels)
        labels = [label for label in flat if label is not None]

        def divided(number: int, examples: Values) -> Term:
            name = self._calls[number][0].name
            divisor = find_divisor(
                lambda part: self._comparisons(part)[number], examples, labels, name
            )
            return dataclasses.replace(self.terms[number], divisor=divisor)

        self.terms = trials.on_examples(
            lambda examples: tuple(divided(n, examples) for n in range(len(self.terms))), values
        )

    def _comparisons(self, values: Values) -> list[Comparison]:
        """Return what Keras would call each loss with."""
        flat = keras.tree.flatten(self.names.arguments(values))

        def at(place: _Place | None) -> tf.Tensor | None:
            return None if place is None else flat[place.number]

        return [
            Comparison(loss, at(predictions), at(labels), at(weights))
            for loss, labels, predictions, weights in self._calls
        ]


class _Place:
    """Stands for a label, an output or a weight: Keras would take a tensor of rows for a list."""

    def __init__(self, number: int) -> None:
        self.number = number


def _calls(
    compiled: CompileLoss, names: Names
) -> list[tuple[Any, _Place | None, _Place, _Place | None]]:
    """Return each loss with the places of its labels, its output and its weights.

    A place is a number in the flat arguments of `compiled`.
    """
    calls = []

    def recorded(loss: Callable[..., Any]) -> Callable[..., float]:
        def record(labels: Any, predictions: Any, weights: Any) -> float:
            calls.append((loss, labels, predictions, weights))
            return 0.0

        return record

    numbers = itertools.count()

    def place(name: str | None) -> _Place | None:
        number = next(numbers)
        return None if name is None else _Place(number)

    arguments = [
        keras.tree.map_structure(place, nest)
        for nest in (names.labels, names.outputs, names.weights)
    ]
    losses = compiled._flat_losses
    with _replaced(
        compiled,
        _flat_losses=[loss._replace(loss=recorded(loss.loss)) for loss in losses],
        _metrics=[None] * len(losses),
    ):
        compiled.call(*arguments)
    return calls


def _coefficient(weight: Any) -> float:
    """Return the weight of a loss.

    Raises:
        LayerError: it may change while the model trains.
    """
    if isinstance(weight, tf.Variable | keras.Variable):
        raise errors.LayerError(
            "loss_weights has a variable, whose changes a pipeline would not see. Give numbers; to "
            "change them, call compile again with optimizer=model.optimizer"
        )
    return 1.0 if weight is None else float(weight)


class MetricSums(hyperparams.Opaque):
    """The metrics of `compile`, for mini-batches of one structure."""

    def __init__(self, compiled: CompileMetrics, names: Names) -> None:
        """Keep what computes them.

        Args:
            compiled: the metrics; Keras has to have called them before.
            names: of what they compare.
        """
        self._compiled = compiled
        self._names = names

    def specs(self) -> tuple[base.MetricSpec, ...]:
        """Return a spec of each metric."""
        return tuple(
            base.MetricSpec(name, functools.partial(_metric_of, metric))
            for name, metric in self._by_name()
        )

    def of(self, values: Values) -> dict[str, dict[str, tf.Tensor]]:
        """Return what examples add: name of a metric → number of its variable → value."""
        after = iter(self._after(self._zeros(), values))
        return {
            name: {f"{number:03d}": next(after) for number in range(len(metric.variables))}
            for name, metric in self._by_name()
        }

    def add(self, sums: Mapping[str, Mapping[str, tf.Tensor]]) -> None:
        """Add to the variables what `of` has returned for all examples of a mini-batch."""
        for name, metric in self._by_name():
            for variable, (_, added) in zip(
                metric.variables, sorted(sums[name].items()), strict=True
            ):
                variable.assign(variable.value + added)

    def are_sums(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> bool:
        """Return whether what a mini-batch adds is the sum of what its parts add.

        Args:
            values: see `trials.on_examples`.
        """
        metrics = self._compiled.metrics
        is_known = all(type(metric).__module__.startswith(_KNOWN) for metric in metrics)
        if is_known and len(set(map(id, metrics))) == len(metrics):  # one may serve two outputs
            with contextlib.suppress(Exception):  # what a metric raises, Keras raises later
                return trials.on_examples(self._add_up, values)
        return False

    def _add_up(self, values: Values) -> bool:
        zeros = self._zeros()
        if trials.graph_of(lambda: self._after(zeros, values)).variables:
            return False  # a function of a user's, whose variables its cell would not have
        once = self._after(zeros, values)
        twice = self._after(once, values)
        return trials.adds_up(lambda part: self._after(zeros, part), values, absolute=1e-5) and all(
            np.allclose(after - before, before, 1e-4, 1e-5)
            for before, after in zip(once, twice, strict=True)
        )

    def _by_name(self) -> Iterator[tuple[str, keras.Metric]]:
        """Yield each metric with its name in the network."""
        return ((f"metric_{n}", metric) for n, metric in enumerate(self._compiled.metrics))

    def _zeros(self) -> list[tf.Tensor]:
        return [tf.zeros(v.shape, v.dtype) for v in self._compiled.variables]

    def _after(self, state: list[tf.Tensor], values: Values) -> list[tf.Tensor]:
        """Return the variables after examples, which were `state` before."""
        after = self._compiled.stateless_update_state(state, *self._names.arguments(values))
        return [tf.convert_to_tensor(value) for value in after]


class CompiledLosses(base.Layer):
    """Outputs of a Keras model, labels, sample weights, inputs → the sum of the losses, unused."""

    class Params(base.Layer.Params):
        objective: Objective = hyperparams.required("The losses.")
        metrics: MetricSums | None = hyperparams.field(None, "Metrics that are sums; None: none.")

        def compared(self) -> tuple[str, ...]:
            """Return the fields with labels and sample weights."""
            return self.objective.names.compared()

        def gradient_sources(
            self, inputs: Sequence[SpecNest], writes: Collection[int]
        ) -> frozenset[str | int]:
            """See `KerasLayer.Params.gradient_sources`; nothing reads what it writes."""
            del writes
            found: list[tf.Tensor | None] = []

            def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
                sums = self.objective.sums(dict(zip(self.reads, flat, strict=True)))
                found.extend(tf.gradients(sums, flat))
                return sums

            tf.function(compute, autograph=False).get_concrete_function(*inputs)
            return frozenset(n for n, gradient in enumerate(found) if gradient is not None)

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            dtype = self.policy.variable

            def weight(number: int) -> Callable[[dict[str, Nest]], tf.Tensor]:
                return lambda fields: tf.cast(self.objective.divisor(number, fields), dtype)

            return base.Meta(
                outputs=tf.TensorSpec([], dtype),
                activation_bytes=sum(map(base.spec_bytes, inputs)),
                metrics=() if self.metrics is None else self.metrics.specs(),
                losses=tuple(
                    base.LossSpec(
                        term.name, term.coefficient, weight(n), of_batch=term.divisor == "one"
                    )
                    for n, term in enumerate(self.objective.terms)
                ),
            )

    params: Params

    def fprop(self, theta: base.Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        objective = self.params.objective
        values = dict(zip(self.params.reads, inputs, strict=True))
        sums = [tf.cast(total, self.policy.variable) for total in objective.sums(values)]
        for term, total in zip(objective.terms, sums, strict=True):
            ctx.add_loss(term.name, total)
        if self.params.metrics is not None:
            for name, sums_of in self.params.metrics.of(values).items():
                ctx.add_sum(name, sums_of)
        return tf.add_n(sums)


def _metric_of(metric: keras.Metric, sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return a metric of the examples whose sums these are."""
    return metric.stateless_result([value for _, value in sorted(sums.items())])


@contextlib.contextmanager
def _replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes in the `with` block."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
