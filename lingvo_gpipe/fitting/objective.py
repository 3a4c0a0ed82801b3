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
        inputs: fields with the inputs of the model, flat.
        outputs: outputs, in the structure of the model.
        labels: fields with the labels, in the structure of the data; None: there are none.
        weights: fields with the sample weights, likewise.
    """

    inputs: tuple[str, ...]
    outputs: Any
    labels: Any
    weights: Any

    def compared(self) -> tuple[str, ...]:
        """Return the fields with labels and sample weights."""
        flat = keras.tree.flatten([self.labels, self.weights])
        return tuple(name for name in flat if name is not None)


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

    def __init__(self, model: Functional, compiled: CompileLoss, names: Names) -> None:
        """Find the losses; Keras has to have called them before.

        Args:
            model: whose outputs are compared.
            compiled: the losses.
            names: see the class.
        """
        self.names = names
        self._model = model
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
        calls = self._comparisons(values, at(self.names.outputs, values))
        return [call.sum(term.divisor) for call, term in zip(calls, self.terms, strict=False)]

    def divisor(self, number: int, fields: Values) -> tf.Tensor:
        """Return what the sum of a loss over a mini-batch is divided by; of float64.

        Args:
            number: of the loss, in `terms`.
            fields: the mini-batch.
        """
        no_outputs = keras.tree.map_structure(lambda _: tf.zeros([]), self.names.outputs)
        return self._comparisons(fields, no_outputs)[number].divisor(self.terms[number].divisor)

    def divide(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> None:
        """Choose divisors with which sums over micro-batches are those of a mini-batch.

        Args:
            values: see `trials.on_examples`.

        Raises:
            LayerError: a loss is not a sum over examples.
        """
        self.terms = trials.on_examples(
            lambda examples: tuple(self._divided(n, examples) for n in range(len(self.terms))),
            values,
        )

    def _divided(self, number: int, values: Values) -> Term:
        """Return a loss with its divisor."""

        def compare(part: Values) -> Comparison:
            return self._comparisons(part, at(self.names.outputs, part))[number]

        name = self._compiled._flat_losses[number].loss.name
        divisor = find_divisor(compare, values, name)
        return dataclasses.replace(self.terms[number], divisor=divisor)

    def _comparisons(self, values: Values, predictions: Any) -> list[Comparison]:
        """Return what Keras would call each loss with."""
        inputs = [values[name] for name in self.names.inputs]
        predictions = masks.with_masks(self._model, inputs, predictions)
        labels, weights = at(self.names.labels, values), at(self.names.weights, values)
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
            self._compiled.call(labels, predictions, weights)
        return calls


def drawn(
    names: Names, fields: Values, outputs: Mapping[str, tf.TensorSpec]
) -> dict[str, tf.Tensor | tf.TensorSpec]:
    """Return a mini-batch on which losses and metrics are tried, with drawn weights and outputs.

    Args:
        names: of what losses and metrics compare.
        fields: the mini-batch.
        outputs: name of an output of the model → its spec.
    """
    weights = [name for name in keras.tree.flatten(names.weights) if name is not None]
    return {
        **fields,
        **{name: tf.TensorSpec.from_tensor(fields[name]) for name in weights},
        **outputs,
    }


def at(names: Any, values: Mapping[str, Any]) -> Any:
    """Return values in a structure of names; None where there is no name."""
    return keras.tree.map_structure(lambda name: None if name is None else values[name], names)


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
