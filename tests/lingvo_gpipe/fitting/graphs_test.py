"""Models whose graphs are unusual train in a pipeline as in plain Keras, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe import errors
from lingvo_gpipe.fitting import PipelinedModel

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables"),
]

_random = np.random.default_rng(0)
X = _random.normal(size=(8, 6))
Y = _random.normal(size=(8, 2))


def trained(
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    layout: tuple[int, int] | None,
    loss: Any = "mse",
    optimizer: str = "adamw",
) -> tuple[Any, ...]:
    """Return weights, losses and predictions after two epochs."""
    keras.utils.set_random_seed(1)
    model: Any = make()
    if layout is not None:
        model = PipelinedModel(model, *layout)
    chosen = keras.optimizers.get(optimizer)
    chosen.learning_rate = 0.05
    if optimizer == "adamw":
        chosen.weight_decay = 0.5
    model.compile(optimizer=chosen, loss=loss)
    history = model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0).history
    return model.get_weights(), history["loss"], model.predict(x, batch_size=4, verbose=0)


def same(
    make: Callable[[], keras.Model],
    x: Any = X,
    y: Any = Y,
    *,
    layout: tuple[int, int] = (2, 2),
    tolerance: float = 1e-10,
    **compiled: Any,
) -> None:
    """Check that a model trains in some cells and micro-batches as in plain Keras."""
    plain, found = (trained(make, x, y, layout, **compiled) for layout in (None, layout))
    keras.tree.assert_same_structure(plain, found)
    for one, other in zip(keras.tree.flatten(plain), keras.tree.flatten(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


# --- Layers that no output needs ----------------------------------------------------------------


class AddsLoss(layers.Layer):
    """Adds a loss, of a kind that its config does not hold."""

    def __init__(self, kind: str = "mean", **more: Any) -> None:
        super().__init__(**more)
        self.kind = kind

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * getattr(ops, self.kind)(x**2))
        return x

    def get_config(self) -> dict[str, Any]:
        return super().get_config()


def with_unused(unused: Callable[[Any], Any], *, ends: bool = False) -> keras.Model:
    """Return a model with an inner model, one of whose two heads nothing reads."""
    inner = keras.Input([6])
    hidden = layers.Dense(4)(inner)
    block = keras.Model(inner, [layers.Dense(2)(hidden), unused(hidden)])
    x = keras.Input([6])
    used = block(x)[0]
    return keras.Model(x, used if ends else layers.Dense(2)(used))


UNUSED: dict[str, Callable[[Any], Any]] = {
    "regularizer": lambda x: layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))(x),
    "activity": lambda x: layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))(
        layers.Dense(5)(x)
    ),
    "add-loss": lambda x: AddsLoss()(layers.Dense(3)(x)),
    "plain": lambda x: layers.ReLU()(layers.Dense(3)(x)),
}


@pytest.mark.parametrize("unused", UNUSED)
def test_an_unused_head_of_an_inner_model_keeps_its_losses(unused: str) -> None:
    same(lambda: with_unused(UNUSED[unused], ends=unused == "add-loss"))


def test_a_batch_norm_of_an_unused_head_keeps_its_statistics() -> None:
    def make() -> keras.Model:
        return with_unused(lambda x: layers.BatchNormalization()(x))

    plain, found = (trained(make, X, Y, layout) for layout in (None, (2, 1)))
    for one, other in zip(plain[0], found[0], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-10)


# --- Weights without a gradient -----------------------------------------------------------------


class HasUnused(layers.Layer):
    """Returns two values, and has a weight that it does not use."""

    def build(self, shape: Any) -> None:
        self.one, self.other = layers.Dense(3), layers.Dense(3)
        self.one.build(shape)
        self.other.build(shape)
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def call(self, x: Any) -> Any:
        return self.one(x), self.other(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], 3), (*shape[:-1], 3)


def stopped(x: Any) -> Any:
    return ops.stop_gradient(layers.Dense(4)(x)) + layers.Dense(4, kernel_regularizer="l2")(x)


def one_stopped(x: Any) -> Any:
    one, other = HasUnused()(x)
    return ops.stop_gradient(one) + layers.Dense(3, kernel_regularizer="l2")(other)


WITHOUT_GRADIENT: dict[str, Callable[[Any], Any]] = {
    "stopped": stopped,
    "one-of-two": lambda x: HasUnused()(x)[0],
    "one-of-two-stopped": one_stopped,
    "largest": lambda x: ops.one_hot(ops.argmax(layers.Dense(4)(x), -1), 4, dtype="float64"),
    "regularized": lambda x: ops.stop_gradient(layers.Dense(4, kernel_regularizer="l2")(x)),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_weight_without_a_gradient_does_not_decay(name: str) -> None:
    same(lambda: between(WITHOUT_GRADIENT[name]))


def argmax_error(labels: Any, predictions: Any) -> Any:
    return ops.mean((labels - ops.cast(ops.argmax(predictions, -1), "float64")[:, None]) ** 2, -1)


@pytest.mark.parametrize("loss", [["mse", None], [None, "mse"], ["mse", argmax_error]])
def test_a_head_whose_loss_has_no_gradient_does_not_decay(loss: Any) -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        hidden = layers.Dense(4)(x)
        return keras.Model(x, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)])

    same(make, y=[Y, Y], loss=loss)


@pytest.mark.parametrize("heads", [2, 4])  # as many as a mini-batch, or its half, has examples
def test_labels_of_one_head_are_given_without_a_list(heads: int) -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        return keras.Model(x, [layers.Dense(2)(x) for _ in range(heads)])

    same(make, loss=["mse", *[None] * (heads - 1)])


class Cubed(keras.regularizers.Regularizer):
    """The third power of a sum over examples, which Keras divides by their number."""

    def __call__(self, x: Any) -> Any:
        return 0.001 * ops.sum(x**2) ** 3


def test_an_added_loss_of_a_whole_mini_batch_needs_one_micro_batch() -> None:
    def make() -> keras.Model:
        return between(layers.Dense(3, activity_regularizer=Cubed()))

    same(make, layout=(2, 1))
    with pytest.raises(
        errors.LayerError, match=r"adds a loss that is neither.*Use one micro-batch"
    ):
        trained(make, X, Y, (2, 2))


class EndPoint(layers.Layer):
    """Adds the CTC loss of the labels that it is called on."""

    def call(self, labels: Any, predictions: Any) -> Any:
        self.add_loss(ops.mean(keras.losses.CTC(reduction=None)(labels, predictions)))
        return predictions


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_a_layer_that_adds_the_loss_of_its_labels_may_take_any_labels(dtype: str) -> None:
    def make() -> keras.Model:
        x, labels = keras.Input([5, 4], name="x"), keras.Input([2], name="labels", dtype=dtype)
        hidden = layers.Dense(6, activation="softmax")(x)
        return keras.Model({"x": x, "labels": labels}, EndPoint()(labels, hidden))

    labels = _random.integers(1, 5, size=(8, 2)).astype(dtype)
    same(make, {"x": SEQUENCES, "labels": labels}, None, loss=None, tolerance=1e-6)


# --- Layers of one class that differ ------------------------------------------------------------


def cut(first: int, last: int) -> Callable[[Any], Any]:
    def columns(x: Any) -> Any:
        return x[:, first:last]

    return columns


class Applies(layers.Layer):
    """Calls a function, or a layer, that its config does not hold."""

    def __init__(self, function: Any, **more: Any) -> None:
        super().__init__(**more)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)

    def get_config(self) -> dict[str, Any]:
        return super().get_config()


def losses_of_two_kinds(x: Any) -> Any:
    return AddsLoss("sum")(layers.Dense(6)(AddsLoss("mean")(x)))


def columns_of_two_widths(x: Any) -> Any:
    return ops.concatenate([layers.Lambda(cut(0, 2))(x), layers.Lambda(cut(2, 6))(x)], -1)


def functions_of_two_widths(x: Any) -> Any:
    return ops.concatenate([Applies(cut(0, 2))(x), Applies(cut(2, 6))(x)], -1)


def layers_of_two_kinds(x: Any) -> Any:
    x = Applies(layers.Dense(6, activity_regularizer=None))(x)
    return Applies(layers.Dense(6, activity_regularizer="l2"))(x)


@pytest.mark.parametrize(
    "differing",
    [losses_of_two_kinds, columns_of_two_widths, functions_of_two_widths, layers_of_two_kinds],
)
def test_layers_differ_whose_configs_are_equal(differing: Callable[[Any], Any]) -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2)(differing(layers.Dense(6)(x))))

    same(make)


# --- Layers that compare examples ---------------------------------------------------------------


def centred(x: Any) -> Any:
    return x - ops.mean(x, axis=0, keepdims=True)


class Centres(layers.Layer):
    """Compares examples, in some calls after dropout."""

    def __init__(self, rate: float = 0.0, *, in_training: bool = False) -> None:
        super().__init__()
        self.in_training = in_training
        self.dropout = layers.Dropout(rate) if rate else None

    def call(self, x: Any, training: Any = None) -> Any:
        if self.dropout is not None:
            x = self.dropout(x, training=training)
        return x if self.in_training and not training else centred(x)


class Noisy(layers.Layer):
    """Draws numbers in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)
        self.dropout = layers.Dropout(0.5)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.dropout(x, training=training)
        return x + keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seeds)


def between(middle: Any, *, shape: Any = (6,), batch_size: int | None = None) -> keras.Model:
    x = keras.Input(shape, batch_size=batch_size)
    return keras.Model(x, layers.Dense(2)(middle(layers.Dense(6)(x))))


SEQUENCES = _random.normal(size=(8, 5, 4))
MIXING: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "variable-length": (lambda: between(centred, shape=(None, 4)), SEQUENCES),
    "fixed-batch": (lambda: between(centred, batch_size=4), X),
    "in-training": (lambda: between(Centres(in_training=True)), X),
    "after-dropout": (lambda: between(Centres(0.5)), X),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_compares_examples_needs_one_micro_batch(name: str) -> None:
    make, x = MIXING[name]
    model: Any = PipelinedModel(make(), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match="compares the examples of a mini-batch"):
        model.fit(x, np.zeros((*x.shape[:-1], 2)), batch_size=4, verbose=0)


ALONE: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "variable-length": (
        lambda: between(lambda x: ops.cumsum(layers.Conv1D(6, 5)(x), 1), shape=(None, 4)),
        SEQUENCES,
    ),
    "fixed-batch": (lambda: between(lambda x: ops.flip(x, 1), batch_size=4), X),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_that_treats_each_example_alone_is_not_refused(name: str) -> None:
    make, x = ALONE[name]
    y = np.zeros((8, 1, 2)) if x is SEQUENCES else Y
    same(make, x, y)


def test_a_layer_that_draws_numbers_is_not_refused() -> None:
    model: Any = PipelinedModel(between(Noisy()), 2, 2)
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(X, Y, batch_size=4, verbose=0).history["loss"]).all()


def test_a_layer_that_draws_at_inference_draws_each_time() -> None:
    model: Any = PipelinedModel(between(Noisy()), 2, 2)
    model.compile("sgd", "mse")
    same_examples = np.repeat(X[:1], 8, 0)
    predicted = [model.predict(same_examples, batch_size=4, verbose=0) for _ in range(2)]
    numbers = [*predicted, model(same_examples), model(same_examples)]
    assert len(np.unique(np.concatenate(numbers)[:, 0])) == 4 * 8
    losses = {model.evaluate(same_examples, Y, verbose=0) for _ in range(2)}
    assert len(losses) == 2


def test_a_call_takes_none_of_the_random_numbers_of_tensorflow() -> None:
    model = PipelinedModel(between(Noisy()), 2, 2)
    model(X)
    drawn = []
    for calls in (0, 1):
        keras.utils.set_random_seed(1)
        for _ in range(calls):
            model(X)
            model(X, training=True)
            model.predict(X, verbose=0)
        drawn.append(float(tf.random.uniform([])))
    assert drawn[0] == drawn[1]


# --- Masks --------------------------------------------------------------------------------------

IDS = _random.integers(0, 3, size=(8, 5))
TAGS = _random.normal(size=(8, 5, 2))


def test_an_output_has_its_mask_through_layers_called_by_keyword() -> None:
    def make() -> keras.Model:
        ids = keras.Input([5], dtype="int32")
        embedded = layers.Embedding(9, 4, mask_zero=True)(inputs=ids)
        hidden = layers.LSTM(3, return_sequences=True)(sequences=embedded)
        return keras.Model(ids, layers.Dense(2)(inputs=hidden))

    same(make, IDS, TAGS, optimizer="sgd")  # rows of an Embedding differ under Adam


def attended(x: Any, *others: Any) -> Any:
    """Add an attention, which takes the Keras masks from what it is called on."""
    return layers.LayerNormalization()(
        layers.Add()([x, layers.MultiHeadAttention(2, 2)(x, *others or [x])])
    )


def crossed(x: Any) -> Any:
    memory = attended(x)
    return attended(attended(x, memory), memory)


def inner(function: Callable[[Any], Any]) -> keras.Model:
    x = keras.Input([5, 4])
    return keras.Model(x, function(x))


MASKED: dict[str, Callable[[Any, Any], Any]] = {
    "one-attention": lambda x, _: attended(x),
    "two-attentions": lambda x, _: attended(attended(x)),
    "two-attentions-pooled": lambda x, _: ops.expand_dims(
        layers.GlobalAveragePooling1D()(attended(attended(x))), 1
    ),
    "attention-recurrent": lambda x, _: layers.LSTM(3, return_sequences=True)(attended(x)),
    "memory": lambda x, _: crossed(x),
    "inner-model": lambda x, _: attended(inner(attended)(x)),
    "joined": lambda x, other: layers.Concatenate()([layers.Dense(3)(x), other]),
    "joined-with-unmasked": lambda x, other: layers.Concatenate()([ops.tanh(other), x]),
    "joined-in-time": lambda x, other: layers.Concatenate(axis=1)([x, other])[:, :5],
}


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("name", MASKED)
def test_masks_are_those_that_keras_has_when_the_model_runs(name: str) -> None:
    def make() -> keras.Model:
        ids = keras.Input([5], dtype="int32")
        words, places = (layers.Embedding(9, 4, mask_zero=True)(ids) for _ in range(2))
        return keras.Model(ids, layers.Dense(2)(MASKED[name](words, places)))

    same(make, IDS, TAGS, optimizer="sgd")


def test_a_mask_of_an_output_that_layers_compute_is_refused() -> None:
    x = keras.Input([5, 4])
    masked = layers.Masking(name="masking")(layers.Rescaling(0.5)(x))
    model = PipelinedModel(keras.Model(x, layers.LSTM(2, return_sequences=True)(masked)), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(
        errors.LayerError, match=r"before masking\. Call that layer on a keras\.Inp"
    ):
        model.fit(SEQUENCES, TAGS, batch_size=4, verbose=0)


# --- Arguments of layers ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_a_variable_outside_of_layers_is_refused(make: Callable[..., Any]) -> None:
    variable = make(np.float64(1), name="variable")
    model = PipelinedModel(between(lambda x: ops.multiply(x, variable)), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match=r"takes the variable 'variable.*self\.add_weight"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_the_name_of_a_layer_may_begin_with_an_underscore() -> None:
    same(lambda: between(layers.Dense(3, name="_hidden")))


def test_a_tuple_of_outputs_is_predicted() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        return keras.Model(x, (layers.Dense(2)(x), layers.Dense(2)(layers.Dense(3)(x))))

    same(make, X, (Y, Y), loss=["mse", "mae"])


class SumOf(layers.Layer):
    """Adds up the items of a dict, each with a factor."""

    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.keys = keys

    def call(self, items: Any) -> Any:
        return ops.add(*[factor * items[key] for factor, key in enumerate(self.keys, 1)])


@pytest.mark.parametrize("keys", [("read", "other"), ("class_name", "config")])
def test_a_dict_of_tensors_may_have_the_keys_of_markers(keys: tuple[Any, Any]) -> None:
    same(lambda: between(lambda x: SumOf(*keys)({key: layers.Dense(3)(x) for key in keys})))


def test_a_dict_whose_keys_are_not_strings_is_refused() -> None:
    model = PipelinedModel(between(lambda x: SumOf(0, 1)({0: x, 1: x})), 2, 2)
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match="sum_of: an argument is a dict with the key 0"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_a_dict_of_one_tensor_may_have_the_key_of_a_marker() -> None:
    same(lambda: between(lambda x: layers.Lambda(lambda items: 2 * items["read"])({"read": x})))


@pytest.mark.parametrize("num_micro_batches", [3, 4])
def test_a_squeeze_of_one_example_needs_its_axis(num_micro_batches: int) -> None:
    def make(**axis: int) -> keras.Model:
        x = keras.Input([6])
        return keras.Model(x, ops.squeeze(layers.Dense(1)(x), **axis))

    model = PipelinedModel(make(), 2, num_micro_batches)
    model.compile("sgd", "mse")
    with pytest.raises(
        errors.LayerError, match=r"squeeze: .*of which a micro-batch has one\. Name"
    ):
        model.fit(X, Y[:, 0], batch_size=4, verbose=0)
    model = PipelinedModel(make(axis=-1), 2, num_micro_batches)
    model.compile("sgd", "mse")
    model.fit(X, Y[:, 0], batch_size=4, verbose=0)
