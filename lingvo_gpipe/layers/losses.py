"""Losses of values: those of Keras, squared errors, penalties on activations.

See `heads` for what they are divided by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, heads, keras_references, reshaping
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
            for spec, expected in zip(inputs[1:], (shape, shape[:1]), strict=False):
                target = checks.any_shape(self, spec, "[B, ...]", "Set its field reads")
                if target != expected:
                    raise errors.LayerError(
                        f"{base.describe(self)}: target or weights of shape {list(target)}, "
                        f"expected {list(expected)} for x of shape {list(shape)}. Reshape one of "
                        "them"
                    )
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
        if others:
            error = tf.square(x - tf.cast(others[0], x.dtype))
            per_example = _per_example(error)
            if len(others) == 2:
                per_example *= tf.cast(others[1], x.dtype)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return x


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


class Loss(heads.Head):
    """x: [B, ...] floating, label: [B, ...] → x in the master dtype; loss: any loss of Keras.

    It is Σ values · weights over an update, divided as the reduction of the Keras loss says:
    `sum_over_batch_size` (Keras' default, as in `compile` and `fit`) and `mean` by the number of
    values, whatever the weights; `mean_with_sample_weight` by the sum of the weights; `sum` by 1,
    for each mini-batch. The third name it reads, weights, is Keras' `sample_weight`, of the shape
    of the values: [B] for most losses. Labels and weights are fields of the mini-batch.

    The values of an example may depend on no other example, so `Circle`, and `Dice` and `Tversky`
    without `axis`, are refused. A cross-entropy of probabilities is computed from these, clipped at
    1e-7, whatever layer they come from; `from_logits` needs no clipping.

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
            values = self._values_shape(output, tf.TensorSpec(label, self.policy.variable))
            if len(inputs) == 3:
                weights = checks.any_shape(self, inputs[2], "[...]", "Set its field reads")
                if weights not in (values, (*values, 1)):
                    raise errors.LayerError(
                        f"{base.describe(self)}: weights of shape {list(weights)}, expected "
                        f"{list(values)}, one for each value of the loss. Reshape them in the input"
                    )
            weight = self._weight(values, weighted=len(inputs) == 3)
            of_batch = _keras_loss(self).reduction == "sum"
            losses = (LossSpec(self.loss_name, self.coefficient, weight, of_batch=of_batch),)
            ranges = self._label_range(shape, label, inputs[1].dtype)
            return dataclasses.replace(meta, losses=losses, value_ranges=ranges)

        def classifier(self, x: tf.TensorSpec, label: tf.TensorSpec) -> Classifier | None:
            """Return how to read classes from predictions and labels; None: there is no one class.

            Args:
                x: spec of the predictions.
                label: spec of the labels.
            """
            kind, wanted = _keras_loss(self).keras_object, tuple(label.shape[1:])
            rank, width = x.shape.rank, math.prod(x.shape[1:])
            names = keras.losses
            binary = names.BinaryCrossentropy | names.BinaryFocalCrossentropy
            one_hot = names.CategoricalCrossentropy | names.CategoricalFocalCrossentropy
            if isinstance(kind, binary) and width == 1 and wanted in ((), (1,)):
                return Classifier(kind.from_logits, is_binary=True)
            if (
                isinstance(kind, names.SparseCategoricalCrossentropy)
                and rank == 2
                and wanted in ((), (1,))
            ):
                return Classifier(kind.from_logits, ignored=kind.ignore_class)
            if isinstance(kind, one_hot) and rank == 2 and wanted == (width,):
                return Classifier(kind.from_logits, is_one_hot=True)
            return None

        def _label_range(
            self, x: tuple[int, ...], label: tuple[int, ...], dtype: tf.DType
        ) -> dict[str, base.ValueRange]:
            """Return the range of labels that are numbers of classes; empty: they are not."""
            loss, names = _keras_loss(self), keras.losses
            sparse = names.SparseCategoricalCrossentropy | names.CategoricalGeneralizedCrossEntropy
            binary = names.BinaryCrossentropy | names.BinaryFocalCrossentropy
            classes: int | None = None
            if isinstance(loss.keras_object, sparse) and label in (x[:-1], (*x[:-1], 1)):
                classes = x[-1]
            elif isinstance(loss.keras_object, binary) and dtype.is_integer:
                classes = 2
            if classes is None or not loss.is_separate:  # a class of a user may read labels its way
                return {}
            return {self.reads[1]: base.ValueRange(classes, "", ignored=loss.ignored)}

        def _values_shape(self, x: tf.TensorSpec, label: tf.TensorSpec) -> tuple[int, ...]:
            """Return the shape of the values of the loss: [B, ...]."""
            loss = _keras_loss(self)
            traced = tf.function(lambda *both: tf.convert_to_tensor(loss.function(*both)))
            try:
                values = traced.get_concrete_function(label, x).structured_outputs
            except Exception as error:  # whatever a loss raises
                raise errors.LayerError(
                    f"{base.describe(self)}: {loss.name} refuses labels of shape "
                    f"{list(label.shape)} with predictions of shape {list(x.shape)}: "
                    f"{str(error).strip().splitlines()[0]}"
                ) from error
            shape = tuple(values.shape.as_list())
            rows = x.shape.as_list()[:1]
            if not rows or list(shape[:1]) != rows:
                raise errors.LayerError(
                    f"{base.describe(self)}: {loss.name} returns {list(shape)} for "
                    f"{sum(rows)} examples, not a value for each, so micro-batches cannot "
                    "compute it. Set its axis, or use another loss"
                )
            return shape

        def _weight(
            self, values: tuple[int, ...], *, weighted: bool
        ) -> Callable[[dict[str, Nest]], tf.Tensor]:
            """Return a function from the fields to what the sum of the values is divided by."""
            loss, dtype = _keras_loss(self), self.policy.variable
            if loss.reduction == "sum":
                return lambda _: tf.ones([], dtype)
            by_weights = loss.reduction == "mean_with_sample_weight" and weighted
            if loss.ignored is not None:
                weights = self.reads[-1] if by_weights else None
                return functools.partial(_kept_weight, self.reads[1], loss.ignored, weights, dtype)
            if by_weights:
                return heads.weight_by(self.reads[-1], dtype, are_weights=True)
            examples = heads.weight_by(self.reads[1], dtype, examples=True)
            of_an_example = math.prod(values[1:])
            return lambda fields: examples(fields) * of_an_example

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        if others:
            loss = _keras_loss(self.params)
            # Keras would compute with logits wherever it finds the softmax that x came from, which
            # depends on the cut; it does not look through an identity.
            predictions = tf.identity(x)
            label = tf.cast(others[0], x.dtype)  # Keras casts integer labels, too
            if not loss.is_separate:
                shapes = tuple(x.shape), tuple(label.shape)
                with tf.init_scope():
                    _check_separate(base.describe(self.params), loss, *shapes)
            values = tf.convert_to_tensor(loss.function(label, predictions))
            if len(others) == 2:
                values *= tf.reshape(tf.cast(others[1], values.dtype), tf.shape(values))
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(values))
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class Classifier:
    """How a loss reads classes from predictions and labels.

    Attributes:
        from_logits: predictions are logits, else probabilities.
        is_binary: they are those of class 1 of two, [N] or [N, 1]; else of all classes, [N, C].
        is_one_hot: labels are [B, C], with 1 at the class; else numbers of classes, [B] or [B, 1].
        ignored: label that is left out; None: none is.
    """

    from_logits: bool
    is_binary: bool = False
    is_one_hot: bool = False
    ignored: int | None = None

    def probabilities(self, x: tf.Tensor) -> tf.Tensor:
        """Return the probability of each class, [N, C], for predictions."""
        if not self.is_binary:
            return tf.nn.softmax(x) if self.from_logits else x
        first = tf.reshape(tf.sigmoid(x) if self.from_logits else x, (-1,))
        return tf.stack([1 - first, first], -1)

    def classes(self, label: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the classes, [B] int64; -1 where the label is left out."""
        if self.is_one_hot:
            return tf.argmax(label, -1)
        numbers = tf.cast(tf.reshape(label, (-1,)), tf.int64)
        return numbers if self.ignored is None else tf.where(numbers == self.ignored, -1, numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class _KerasLoss:
    """A loss of Keras.

    Attributes:
        name: of its class or function, for messages.
        function: labels and predictions → values, as `call` of Keras' losses.
        reduction: of the values.
        ignored: label that is left out, `ignore_class` of sparse cross-entropy; None: none is.
        is_separate: whether its values are known to depend on one example each.
        keras_object: the object of Keras; None for a function.
    """

    name: str
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    reduction: str | None
    ignored: int | None
    is_separate: bool
    keras_object: Any = None


def _keras_loss(params: Loss.Params) -> _KerasLoss:
    """Return the loss of Keras that the params describe.

    Raises:
        LayerError: Keras has no such loss, refuses its arguments, or these name what would run
            code; or its reduction is None.
    """
    name_or_class: Any = params.loss  # mypy takes no function for a key of a cache
    named = name_or_class if isinstance(name_or_class, str) else ""
    subject = f"{base.describe(params)}: no Keras loss {named}"
    keras_references.check([named, params.config], subject)
    loss = _loss_object(name_or_class, json.dumps(params.config, sort_keys=True, default=repr))
    if loss.reduction in (None, "none"):
        raise errors.LayerError(
            f"{base.describe(params)}: {loss.name} has no reduction, and an update needs one "
            "number. Set config={'reduction': 'sum_over_batch_size'}"
        )
    return loss


@functools.cache
def _loss_object(named: Any, config: str) -> _KerasLoss:
    kind: Any = _class_of(named) if isinstance(named, str) else named
    settings = json.loads(config)
    is_class = isinstance(kind, type) and issubclass(kind, keras.losses.Loss)
    if not is_class:
        reduction = settings.pop("reduction", "sum_over_batch_size")
        function = functools.partial(kind, **settings)
        return _KerasLoss(kind.__name__, function, reduction, None, is_separate=False)
    try:
        keras_object = kind.from_config(settings)
    except (ValueError, TypeError) as error:
        raise errors.LayerError(f"no Keras loss {kind.__name__}({settings}): {error}") from error
    ignored = getattr(keras_object, "ignore_class", None)
    is_of_keras = vars(keras.losses).get(kind.__name__) is kind
    is_separate = is_of_keras and kind is not keras.losses.Circle
    return _KerasLoss(
        kind.__name__,
        keras_object.call,
        keras_object.reduction,
        ignored,
        is_separate,
        keras_object,
    )


def _kept_weight(
    label: str, ignored: int, weights: str | None, dtype: tf.DType, fields: dict[str, Nest]
) -> tf.Tensor:
    """Return the number of labels other than `ignored`, or the sum of their weights."""
    kept = tf.cast(tf.not_equal(fields[label], tf.cast(ignored, fields[label].dtype)), dtype)
    if weights is not None:
        kept *= tf.reshape(tf.cast(fields[weights], dtype), tf.shape(kept))
    return tf.reduce_sum(kept)


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
    kinds = [v for v in vars(keras.losses).values() if isinstance(v, type)]
    kinds.remove(keras.losses.Loss)
    with contextlib.suppress(ValueError):
        match = keras.losses.get(name)  # a function where the name is one, such as mse
        name = name if isinstance(match, keras.losses.Loss) else match.__name__
    joined = name.replace("_", "").lower()
    for kind in kinds:
        if kind.__name__.lower() == joined:
            return kind
    names = [kind.__name__ for kind in kinds]
    near = errors.nearest(name, names) or names[:3]
    raise errors.LayerError(
        f"no Keras loss {name!r}; nearest {', '.join(near)}. Name a class of keras.losses, or set "
        "the class itself"
    )


@functools.cache
def _check_separate(
    described: str, loss: _KerasLoss, x: tuple[int, ...], label: tuple[int, ...]
) -> None:
    """Refuse a loss whose values depend on other examples, which may be in another micro-batch.

    Args:
        described: how messages call the layer.
        loss: the loss.
        x: shape of predictions.
        label: shape of labels.

    Raises:
        LayerError: they do.
    """
    random = np.random.default_rng(0)
    dims, label_dims = ((4, *shape[1:]) for shape in (x, label))
    predicted = tf.constant(random.random(dims), tf.float64)
    wanted = tf.constant(random.integers(0, 2, label_dims), tf.float64)
    whole = loss.function(wanted, predicted)
    parts = (tf.split(value, (1, 3)) for value in (wanted, predicted))
    separate = tf.concat([loss.function(*part) for part in zip(*parts, strict=True)], 0)
    if not np.allclose(whole, separate, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise errors.LayerError(
            f"{described}: the values of {loss.name} for an example depend on other examples, "
            "which may be in another micro-batch. Use a loss that compares each example with its "
            "label"
        )
