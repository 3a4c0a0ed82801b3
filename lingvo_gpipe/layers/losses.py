"""Losses of values: those of Keras, squared errors, penalties on activations.

See `heads` for what they are divided by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, heads, keras_references, reshaping, trials
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class MeanSquaredError(heads.Head):
    """x: [B, ...] floating, target: [B, ...] → x in the master dtype; loss: squared error.

    It is the mean of (x − target)² over an example. Each example has weight 1, or that of the third
    name it reads, weights: [B].
    """

    class Params(heads.Head.Params):
        reads = ("x", "target")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, target", "x, target, weights"))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It compares one tensor")
            for spec in inputs[1:]:
                checks.any_shape(self, spec, "[B, ...]", "Set its field reads")
            _check_compared(self, *(spec.shape for spec in inputs))
            dtype = self.policy.variable
            losses: tuple[LossSpec, ...] = ()
            if len(inputs) > 1:
                weighted = len(inputs) == 3
                weight = heads.weight_by(self.reads[-1], dtype, are_weights=weighted, examples=True)
                losses = (LossSpec(self.loss_name, self.coefficient, weight),)
            output = tf.TensorSpec(shape, dtype)
            return Meta(output, activation_bytes=base.spec_bytes(output), losses=losses)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        # A later mini-batch may have other shapes than the first.
        _check_compared(self.params, x.shape, *(other.shape for other in others))
        if others:
            error = tf.square(x - tf.cast(others[0], x.dtype))
            per_example = _per_example(error)
            if len(others) == 2:
                per_example *= tf.cast(others[1], x.dtype)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return x


def _check_compared(params: Layer.Params, shape: tf.TensorShape, *others: tf.TensorShape) -> None:
    """Refuse a target of another shape than x, or weights that are not one for each example.

    Args:
        params: params of the layer.
        shape: of x; sizes may be unknown.
        *others: of the target, then of the weights.

    Raises:
        LayerError: naming the shapes.
    """
    for found, expected in zip(others, (shape, shape[:1]), strict=False):
        if not found.is_compatible_with(expected):
            raise errors.LayerError(
                f"{base.describe(params)}: target or weights of shape {found.as_list()}, expected "
                f"{expected.as_list()} for x of shape {shape.as_list()}. Reshape one of them"
            )


def _per_example(values: tf.Tensor) -> tf.Tensor:
    """Return the mean over all axes but that of the batch: [B]."""
    return tf.reduce_mean(values, range(1, values.shape.rank))


class AuxiliaryLoss(Layer):
    """x: [B, ...] floating → x in the compute dtype; loss: mean of x² over an example.

    It may be anywhere in a network.
    """

    class Params(heads.LossParams):
        examples: str = hyperparams.field(
            "", "Field whose batch dimension counts the examples; empty: the first field."
        )
        loss_name = "auxiliary_loss"

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It measures one tensor")
            policy = self.policy
            weight = heads.weight_by(self.examples, policy.variable, examples=True)
            return Meta(
                tf.TensorSpec(shape, policy.compute),
                activation_bytes=base.spec_bytes(tf.TensorSpec(shape, policy.variable)),
                losses=(LossSpec(self.loss_name, self.coefficient, weight),),
            )

        def _inference(self) -> Layer.Params | None:
            """Pass x on."""
            return reshaping.passing(self)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.variable)
        per_example = _per_example(tf.square(x))
        ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return precision.cast(inputs, self.policy.compute)


Divisor: TypeAlias = Literal["kept", "weights", "one"]
"""What a mean over a mini-batch was divided by: the number of its examples, or of those positions
that neither a mask nor the loss leaves out; the sum of their sample weights; or 1, for a sum."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What Keras calls a loss with.

    A loss of Keras is a mean over a mini-batch. Its mean over one micro-batch, times what that mean
    was divided by, is a sum. The sums of all micro-batches, divided by the same number for the
    mini-batch, are Keras' mean over the mini-batch.

    Attributes:
        loss: function of labels, predictions and weights, such as a `keras.losses.Loss`.
        predictions: a nest.
        labels: what they are compared with, a nest.
        weights: sample weights; None: there are none.
    """

    loss: Callable[..., tf.Tensor]
    predictions: Any
    labels: Any
    weights: Any = None

    def sum(self, divisor: Divisor) -> tf.Tensor:
        """Return the mean that Keras computes times its divisor, a scalar of float64."""
        mean = tf.reduce_sum(self.loss(self.labels, self.predictions, self.weights))
        return tf.cast(mean, tf.float64) * self.divisor(divisor)

    def divisor(self, divisor: Divisor) -> tf.Tensor:
        """Return what the mean was divided by, a scalar of float64."""
        if divisor == "one":
            return tf.ones([], tf.float64)
        labels, predictions = (
            keras.tree.flatten(nest)[0] for nest in (self.labels, self.predictions)
        )
        kept = getattr(predictions, "_keras_mask", None)
        ignored = getattr(self.loss, "ignore_class", None)
        if ignored is not None:
            counted = tf.not_equal(labels, tf.cast(ignored, labels.dtype))
            kept = counted if kept is None else counted & tf.reshape(kept, tf.shape(counted))
        if divisor == "kept":
            if kept is None:
                return tf.cast(tf.shape(labels)[0], tf.float64)
            return tf.reduce_sum(tf.cast(kept, tf.float64))
        weights = tf.cast(self.weights, tf.float64)
        if kept is not None:
            weights *= tf.cast(tf.reshape(kept, tf.shape(weights)), tf.float64)
        return tf.reduce_sum(weights)


def find_divisor(
    compare: Callable[[trials.Values], Comparison],
    values: trials.Values,
    labels: Sequence[str],
    name: str,
) -> Divisor:
    """Return the divisor with which sums over micro-batches are those of a mini-batch.

    Args:
        compare: examples → what the loss is called with.
        values: examples to try it on.
        labels: those of `values` that are labels.
        name: of the loss, for messages.

    Raises:
        LayerError: the loss is not a sum over examples.
    """
    compared = compare(values)
    divisors: list[Divisor] = ["kept", "weights", "one"]
    if compared.weights is None:
        divisors.remove("weights")

    def total(part: trials.Values, divisor: Divisor = "one") -> list[tf.Tensor]:
        return [compare(part).sum(divisor)]

    if not np.isfinite(total(values)):
        raise trials.NotFiniteError(
            f"the loss {name!r} is not finite on the outputs between 0 and 1, or 1 and 2, on which "
            "it is tried. Let it be finite there"
        )
    is_half = "16" in str(getattr(compared.loss, "dtype", ""))
    adds_up = functools.partial(trials.adds_up, relative=2e-2 if is_half else 1e-5)
    for divisor in divisors:
        by_divisor = functools.partial(total, divisor=divisor)
        if adds_up(by_divisor, values):
            # Of labels that are all 0, a ratio of Keras such as Dice is 1 for all examples.
            is_known = is_of_keras(compared.loss)
            marks = (1.0,) if is_known else (*trials.MARKS, *_compared_numbers(compared))
            marked = trials.marked(values, labels, marks)
            if _add_up(functools.partial(adds_up, by_divisor), by_divisor, marked):
                return divisor
            if not is_known:
                raise errors.LayerError(
                    f"the loss {name!r} divides by a count of some labels of the mini-batch, which "
                    "a micro-batch does not know. If it leaves the others out, give them sample "
                    "weights of 0, with a loss whose reduction is mean_with_sample_weight"
                )
    raise errors.LayerError(
        f"the loss {name!r} of a mini-batch is not a sum over its examples, so micro-batches "
        "cannot compute it. Use a loss that compares each example with its label; for a mean over "
        "some labels, give sample weights of 0 and 1, and reduction='mean_with_sample_weight'"
    )


def _add_up(
    adds_up: Callable[[trials.Values], bool],
    total: Callable[[trials.Values], list[tf.Tensor]],
    marked: Iterable[trials.Values],
) -> bool:
    """Return whether a loss is a sum for these examples, too, if it takes them."""
    for examples in marked:
        is_sum = True
        with contextlib.suppress(Exception):  # it has no such labels
            is_sum = not np.isfinite(total(examples)) or adds_up(examples)
        if not is_sum:
            return False
    return True


def _compared_numbers(compared: Comparison) -> list[float]:
    """Return the numbers with which a loss compares its labels, among others."""
    try:
        return trials.compared_numbers(trials.graph_of(lambda: compared.sum("one")))
    except Exception:  # noqa: BLE001 (a loss that cannot be traced is refused by its cell)
        return []


def is_of_keras(loss: Callable[..., Any]) -> bool:
    """Return whether a loss is one of Keras' own, and no function of a user in one of them."""
    kinds = type(loss), getattr(loss, "fn", loss)
    return all(getattr(kind, "__module__", "").startswith("keras.") for kind in kinds)


class Loss(heads.Head):
    """x: [B, ...] floating, label: [B, ...] → x in the master dtype; loss: any loss of Keras.

    It is Σ values · weights over an update, divided as the reduction of the Keras loss says:
    `sum_over_batch_size` (Keras' default, as in `compile` and `fit`) and `mean` by the number of
    values, whatever the weights; `mean_with_sample_weight` by the sum of the weights; `sum` by 1,
    for each mini-batch. The third name it reads, weights, is Keras' `sample_weight`. Labels and
    weights are fields of the mini-batch.

    A loss is tried on a few examples, and refused if micro-batches cannot compute it, such as
    `Circle`, and `Dice` and `Tversky` without `axis`. A cross-entropy of probabilities is computed
    from these, clipped at 1e-7, whatever layer they come from; `from_logits` needs no clipping.

    >>> loss = Loss.Params(loss="SparseCategoricalCrossentropy", reads=("logits", "label"))
    >>> loss.config = {"from_logits": True}
    """

    class Params(heads.Head.Params):
        reads = ("x", "label")
        loss: str | type[keras.losses.Loss] | Callable[..., Any] = hyperparams.required(
            "Class of a Keras loss, or its name as in compile, such as Huber or mse; or a function "
            "of labels and predictions."
        )
        config: dict[str, Any] = hyperparams.field({}, "Arguments of the class.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, label", "x, label, weights"))
            layout, way_out = "[B, ...]", "It compares one tensor"
            shape = checks.shape(self, inputs[0], layout, way_out)
            output = tf.TensorSpec(shape, self.policy.variable)
            meta = Meta(output, activation_bytes=base.spec_bytes(output))
            if len(inputs) == 1:
                return meta
            label = checks.any_shape(self, inputs[1], layout, "Set its field reads")
            for weights in inputs[2:]:
                checks.any_shape(self, weights, layout, "Set its field reads")
            divisor = self.divisor(output, *inputs[1:])

            def weight(fields: dict[str, Nest]) -> tf.Tensor:
                compared = [heads.field_of(fields, name) for name in self.reads[1:]]
                comparison = Comparison(self.keras_loss(), tf.zeros([]), *compared)
                return tf.cast(comparison.divisor(divisor), self.policy.variable)

            losses = (
                LossSpec(self.loss_name, self.coefficient, weight, of_batch=divisor == "one"),
            )
            ranges = self._label_range(shape, label, inputs[1].dtype)
            return dataclasses.replace(meta, losses=losses, value_ranges=ranges)

        def keras_loss(self) -> keras.losses.Loss:
            """Return the loss of Keras, of the master dtype.

            Raises:
                LayerError: Keras has no such loss, refuses its arguments, or these name what would
                    run code; or its reduction is None.
            """
            named = self.loss if isinstance(self.loss, str) else ""
            subject = f"{base.describe(self)}: no Keras loss {named}"
            keras_references.check([named, self.config], subject)
            kind: Any = _class_of(named) if named else self.loss
            config = json.dumps(self.config, sort_keys=True, default=repr)
            made = _loss(kind, config, self.policy.variable.name)
            if made.reduction in (None, "none"):
                raise errors.LayerError(
                    f"{base.describe(self)}: {kind.__name__} has no reduction, and an update needs "
                    "one number. Set config={'reduction': 'sum_over_batch_size'}"
                )
            return made

        def divisor(self, *specs: tf.TensorSpec) -> Divisor:
            """Return what a mean of this loss was divided by.

            Args:
                *specs: of predictions, in the master dtype, label, and weights, if there are any.

            Raises:
                LayerError: the loss refuses them, or is not a sum over examples.
            """
            of_an_example = [tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in specs]
            try:
                with tf.init_scope():
                    return _divisor(self.keras_loss(), *of_an_example)
            except errors.LayerError as error:
                raise errors.LayerError(f"{base.describe(self)}: {error}") from None
            except Exception as error:  # whatever a loss raises
                x, *others = (list(spec.shape) for spec in specs)
                shown = " and weights".join(f" of shape {shape}" for shape in others)
                raise errors.LayerError(
                    f"{base.describe(self)}: {type(self.keras_loss()).__name__} refuses labels"
                    f"{shown} with predictions of shape {x}: {str(error).strip().splitlines()[0]}"
                ) from error

        def classifier(self, x: tf.TensorSpec, label: tf.TensorSpec) -> heads.Classifier | None:
            """See `Head.Params.classifier`."""
            kind, wanted = self.keras_loss(), tuple(label.shape[1:])
            rank, width = x.shape.rank, math.prod(x.shape[1:])
            names = keras.losses
            binary = names.BinaryCrossentropy | names.BinaryFocalCrossentropy
            one_hot = names.CategoricalCrossentropy | names.CategoricalFocalCrossentropy
            if isinstance(kind, binary) and width == 1 and wanted in ((), (1,)):
                return heads.Classifier(kind.from_logits, is_binary=True)
            if (
                isinstance(kind, names.SparseCategoricalCrossentropy)
                and rank == 2
                and wanted in ((), (1,))
            ):
                return heads.Classifier(kind.from_logits, ignored=kind.ignore_class)
            if isinstance(kind, one_hot) and rank == 2 and wanted == (width,):
                return heads.Classifier(kind.from_logits, is_one_hot=True)
            return None

        def _label_range(
            self, x: tuple[int, ...], label: tuple[int, ...], dtype: tf.DType
        ) -> dict[str, base.ValueRange]:
            """Return the range of labels that are numbers of classes; empty: they are not."""
            loss, names = self.keras_loss(), keras.losses
            sparse = names.SparseCategoricalCrossentropy | names.CategoricalGeneralizedCrossEntropy
            binary = names.BinaryCrossentropy | names.BinaryFocalCrossentropy
            classes: int | None = None
            if isinstance(loss, sparse) and label in (x[:-1], (*x[:-1], 1)):
                classes = x[-1]
            elif isinstance(loss, binary) and dtype.is_integer:
                classes = 2
            is_of_keras = type(loss) in vars(names).values()  # a user's may read labels its way
            if classes is None or not is_of_keras:
                return {}
            ignored = getattr(loss, "ignore_class", None)
            return {self.reads[1]: base.ValueRange(classes, "", ignored=ignored)}

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        p = self.params
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        if others:
            divisor = p.divisor(*map(tf.TensorSpec.from_tensor, (x, *others)))
            # Keras would compute with logits wherever it finds the softmax that x came from, which
            # depends on the cut; it does not look through an identity.
            total = Comparison(p.keras_loss(), tf.identity(x), *others).sum(divisor)
            ctx.add_loss(p.loss_name, tf.cast(total, x.dtype))
        return x


class _FunctionLoss(keras.losses.Loss):
    """A function of labels and predictions."""

    def __init__(
        self,
        function: Callable[..., tf.Tensor],
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(function.__name__, reduction, dtype)
        self._function = functools.partial(function, **settings)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return self._function(y_true, y_pred)


@functools.cache
def _loss(kind: Callable[..., Any], config: str, dtype: str) -> keras.losses.Loss:
    """Return the loss of a class or function with these arguments, as JSON."""
    settings = json.loads(config)
    if not (isinstance(kind, type) and issubclass(kind, keras.losses.Loss)):
        return _FunctionLoss(kind, **settings, dtype=dtype)
    parameters = inspect.signature(kind).parameters.values()
    if any(p.name == "dtype" or p.kind == p.VAR_KEYWORD for p in parameters):
        settings["dtype"] = dtype
    try:
        loss: keras.losses.Loss = kind.from_config(settings)  # type: ignore[attr-defined]
    except (ValueError, TypeError) as error:
        raise errors.LayerError(f"no Keras loss {kind.__name__}({config}): {error}") from error
    return loss


@functools.cache
def _divisor(loss: keras.losses.Loss, *specs: tf.TensorSpec) -> Divisor:
    """Return the divisor of a loss of examples of these specs."""

    def compare(values: trials.Values) -> Comparison:
        return Comparison(loss, *values.values())

    return trials.on_examples(
        lambda values: find_divisor(compare, values, ["1"], type(loss).__name__),
        {str(number): spec for number, spec in enumerate(specs)},
    )


def _class_of(name: str) -> type[keras.losses.Loss]:
    """Return the class of a name: of the class, of its function, or a registered one.

    Raises:
        LayerError: there is no such loss.

    >>> _class_of("mse") is _class_of("MeanSquaredError") is keras.losses.MeanSquaredError
    True
    """
    registered = keras.saving.get_registered_object(name)
    if isinstance(registered, type) and issubclass(registered, keras.losses.Loss):
        return registered
    kinds = {k.__name__: k for k in vars(keras.losses).values() if isinstance(k, type)}
    del kinds["Loss"]
    with contextlib.suppress(ValueError):
        match = keras.losses.get(name)  # a function where the name is one, such as mse
        name = getattr(match, "__name__", type(match).__name__)
    joined = name.replace("_", "").lower()
    for kind in kinds.values():
        if kind.__name__.lower() == joined:
            return kind
    raise errors.LayerError(
        f"no Keras loss {name!r}; {errors.suggestion(name, kinds)}. Name a class of keras.losses, "
        "or set the class itself"
    )
