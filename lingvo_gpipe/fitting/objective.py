"""The losses that `compile` was given, computed in the last cell, one micro-batch after the other.

A loss of Keras is a mean over a mini-batch. Its mean over one micro-batch, times what that mean was
divided by (examples, positions that a mask keeps, sample weights), is a sum. The sums of all
micro-batches, divided by the same number for the mini-batch, are Keras' mean over the mini-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.keras_layers import masks

Divisor: TypeAlias = Literal["kept", "weights", "one"]
"""What a mean over a mini-batch was divided by: the number of its examples, or of those positions
that neither a mask nor the loss leaves out; the sum of their sample weights; or 1, for a sum."""

_DIVISORS: tuple[Divisor, ...] = ("kept", "weights", "one")
_EXAMPLES = 7
_LARGE = 2**20  # elements of an example's output, of which then a few positions are tried
_POSITIONS = 32
PARTS = (slice(0, 1), slice(1, 3), slice(3, None))

Values: TypeAlias = Mapping[str, tf.Tensor]
"""Name of a field of the mini-batch, or of an output of the model → its value."""


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
        divisor: see `Divisor`.
        ignored: label that it leaves out; None: it leaves out none.
    """

    name: str
    coefficient: float
    divisor: Divisor
    ignored: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """What Keras calls a loss with."""

    loss: Callable[..., tf.Tensor]
    labels: Any
    predictions: Any
    weights: Any

    def mean(self) -> tf.Tensor:
        """Return the loss as Keras computes it, of float64."""
        value = self.loss(self.labels, self.predictions, self.weights)
        return tf.cast(tf.reduce_sum(value), tf.float64)

    def divisor(self, term: Term) -> tf.Tensor:
        """Return what the mean was divided by, a scalar of float64."""
        if term.divisor == "one":
            return tf.ones([], tf.float64)
        labels, predictions = (
            keras.tree.flatten(nest)[0] for nest in (self.labels, self.predictions)
        )
        kept = getattr(predictions, "_keras_mask", None)
        if term.ignored is not None:
            counted = tf.not_equal(labels, tf.cast(term.ignored, labels.dtype))
            kept = counted if kept is None else counted & tf.reshape(kept, tf.shape(counted))
        if term.divisor == "kept":
            if kept is None:
                return tf.cast(tf.shape(labels)[0], tf.float64)
            return tf.reduce_sum(tf.cast(kept, tf.float64))
        weights = tf.cast(self.weights, tf.float64)
        if kept is not None:
            weights *= tf.cast(tf.reshape(kept, tf.shape(weights)), tf.float64)
        return tf.reduce_sum(weights)


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
                getattr(loss.loss, "ignore_class", None),
            )
            for number, loss in enumerate(losses)
        )

    def sums(self, values: Values) -> list[tf.Tensor]:
        """Return each loss of a micro-batch, times its divisor; of float64."""
        calls = self._calls(values, at(self.names.outputs, values))
        return [
            call.mean() * call.divisor(term) for call, term in zip(calls, self.terms, strict=False)
        ]

    def divisor(self, number: int, fields: Values) -> tf.Tensor:
        """Return what the sum of a loss over a mini-batch is divided by; of float64.

        Args:
            number: of the loss, in `terms`.
            fields: the mini-batch.
        """
        no_outputs = keras.tree.map_structure(lambda _: tf.zeros([]), self.names.outputs)
        return self._calls(fields, no_outputs)[number].divisor(self.terms[number])

    def divide(self, trials: Iterator[Values]) -> None:
        """Choose divisors with which sums over micro-batches are those of a mini-batch.

        Args:
            trials: yields examples to try it with; the later ones if a loss refuses the earlier.

        Raises:
            LayerError: a loss is not a sum over examples.
        """
        for values in trials:
            try:
                self.terms = tuple(self._divided(n, values) for n in range(len(self.terms)))
            except errors.LayerError:
                raise
            except Exception as error:  # noqa: BLE001 (a loss may need every position)
                failure = error
            else:
                return
        raise failure

    def _divided(self, number: int, values: Values) -> Term:
        """Return a loss with the first divisor that reproduces its mean from parts."""
        for kind in _DIVISORS:
            term = dataclasses.replace(self.terms[number], divisor=kind)

            def total(part: slice, term: Term = term) -> tf.Tensor:
                here = {name: value[part] for name, value in values.items()}
                call = self._calls(here, at(self.names.outputs, here))[number]
                return call.mean() * call.divisor(term)

            if kind == "weights" and self.names.weights is None:
                continue
            whole = total(slice(None))
            apart = sum(map(total, PARTS))
            if np.isfinite(whole) and np.allclose(apart, whole, rtol=1e-5, atol=1e-9):
                return term
        shown = self._compiled._flat_losses[number].loss.name
        raise errors.LayerError(
            f"the loss {shown!r} of a mini-batch is not a sum over its examples, so micro-batches "
            "cannot compute it. Use num_micro_batches=1, or a loss that compares each example with "
            "its label"
        )

    def _calls(self, values: Values, predictions: Any) -> list[_Call]:
        """Return what Keras would call each loss with."""
        inputs = [values[name] for name in self.names.inputs]
        predictions = masks.with_masks(self._model, inputs, predictions)
        labels, weights = at(self.names.labels, values), at(self.names.weights, values)
        calls: list[_Call] = []

        def recorded(loss: Callable[..., Any]) -> Callable[..., float]:
            def record(labels: Any, predictions: Any, weights: Any) -> float:
                calls.append(_Call(loss, labels, predictions, weights))
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


def trials(names: Names, fields: Values, outputs: Mapping[str, tf.TensorSpec]) -> Iterator[Values]:
    """Yield a few examples of a mini-batch, with random sample weights and outputs.

    Of large outputs, the first examples have a few positions only.

    Args:
        names: of what losses and metrics compare.
        fields: the mini-batch.
        outputs: name of an output of the model → its spec.
    """
    largest = max(outputs.values(), key=lambda spec: math.prod(spec.shape))
    if len(largest.shape) > 2 and math.prod(largest.shape[1:]) > _LARGE:
        places = np.linspace(0, largest.shape[1] - 1, _POSITIONS, dtype=int)
        yield _few(names, fields, outputs, places, largest.shape[1])
    yield _few(names, fields, outputs)


def _few(
    names: Names,
    fields: Values,
    outputs: Mapping[str, tf.TensorSpec],
    places: np.ndarray[Any, Any] | None = None,
    length: int | None = None,
) -> Values:
    """Return such examples; of sequences of this length, those positions alone; None: all."""
    random = np.random.default_rng(0)

    def is_cut(value: tf.Tensor | tf.TensorSpec) -> bool:
        return length is not None and value.shape[1:2] == (length,)

    few = {}
    for name, value in fields.items():
        rows = tf.gather(value, np.arange(_EXAMPLES) % value.shape[0])
        few[name] = tf.gather(rows, places, axis=1) if is_cut(value) else rows
    for name in keras.tree.flatten(names.weights):
        if name is not None:
            few[name] = tf.constant(random.uniform(0.5, 2.0, few[name].shape), few[name].dtype)
    for name, spec in outputs.items():
        shape = [_EXAMPLES, *spec.shape[1:]]
        if is_cut(spec):
            shape[1] = _POSITIONS
        few[name] = tf.constant(random.uniform(0.05, 0.95, shape), spec.dtype)
    return few


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
