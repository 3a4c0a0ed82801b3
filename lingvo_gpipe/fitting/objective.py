"""The losses that `compile` was given, computed in the last cell for each micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss

from lingvo_gpipe import hyperparams
from lingvo_gpipe.keras_layers import masks
from lingvo_gpipe.layers import trials
from lingvo_gpipe.layers.losses import Comparison, Divisor, find_divisor
from lingvo_gpipe.layers.trials import Values


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
        self._compiled = compiled
        nested = keras.tree.is_nested(names.labels) or keras.tree.is_nested(names.outputs)
        # Of several losses for a single output, Keras uses the first.
        losses = compiled._flat_losses if nested else compiled._flat_losses[:1]
        self.terms = tuple(
            Term(
                f"loss_{number}",
                1.0 if loss.loss_weights is None else float(loss.loss_weights),
                "kept",
            )
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

    def divide(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> None:
        """Choose divisors with which sums over micro-batches are those of a mini-batch.

        Args:
            values: see `trials.on_examples`.

        Raises:
            LayerError: a loss is not a sum over examples.
        """

        def divided(number: int, examples: Values) -> Term:
            name = self._compiled._flat_losses[number].loss.name
            divisor = find_divisor(lambda part: self._comparisons(part)[number], examples, name)
            return dataclasses.replace(self.terms[number], divisor=divisor)

        self.terms = trials.on_examples(
            lambda examples: tuple(divided(n, examples) for n in range(len(self.terms))), values
        )

    def _comparisons(self, values: Values) -> list[Comparison]:
        """Return what Keras would call each loss with."""
        calls: list[Comparison] = []

        def recorded(loss: Callable[..., Any]) -> Callable[..., float]:
            def record(labels: Any, predictions: Any, weights: Any) -> float:
                calls.append(Comparison(loss, labels, predictions, weights))
                return 0.0

            return record

        losses = self._compiled._flat_losses
        with _replaced(
            self._compiled,
            _flat_losses=[loss._replace(loss=recorded(loss.loss)) for loss in losses],
            _metrics=[None] * len(losses),
        ):
            self._compiled.call(*self.names.arguments(values))
        return calls


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
