"""What a converted Keras model takes, compares and updates is what Keras does with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors, optim
from lingvo_gpipe import layers as own_layers
from lingvo_gpipe.keras_layers import Network, from_keras_model
from tests.lingvo_gpipe.keras_layers import whole_models


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def pipeline(
    model: keras.Model,
    heads: Sequence[Callable[[Network], Any]] = (),
    num_micro_batches: int = 2,
) -> Any:
    network = from_keras_model(model)
    own = (head(network) for head in heads)
    return whole_models.pipeline(
        network, *own, num_partitions=2, num_micro_batches=num_micro_batches
    )


def loss_of(name: str, field: str) -> Callable[[Network], Any]:
    return lambda network: own_layers.Loss.Params(loss=name, reads=(network.outputs, field))


# --- Inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [("a", "z"), ("z", "a")])
def test_an_inner_model_takes_a_dictionary_by_the_names_of_its_inputs(one: str, other: str) -> None:
    first, second = keras.Input([6], name=one), keras.Input([6], name=other)
    difference = layers.Subtract()([layers.Dense(4)(first), layers.Dense(4)(second)])
    tower = keras.Model([first, second], difference, name="tower")
    p, q = keras.Input([6], name="p"), keras.Input([6], name="q")
    model = keras.Model([p, q], layers.Dense(3)(tower({one: p, other: q})))
    x = random(8, 6)
    fields = [x, 2 * x + 1]
    np.testing.assert_allclose(pipeline(model)(fields), model(fields), rtol=1e-5, atol=1e-5)


def test_a_column_has_the_rank_of_its_input() -> None:
    column, table = random(8), random(8, 4)
    f, g = keras.Input([1], name="f"), keras.Input([4], name="g")
    product = keras.Model([f, g], layers.Dense(2)(layers.Dense(4)(g) * f))
    pipe = pipeline(product)
    wanted = product([column, table])
    np.testing.assert_allclose(pipe([column, table]), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pipe([column[:, None], table]), wanted, rtol=1e-5, atol=1e-6)
    f = keras.Input([], name="f")
    scalars = keras.Model(f, layers.Dense(2)(layers.Dense(3)(keras.ops.expand_dims(f, -1))))
    np.testing.assert_allclose(
        pipeline(scalars)(column[:, None]), scalars(column[:, None]), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(errors.LayerError, match=r"'f' has shape \[4, 3\], but the model's Input"):
        pipeline(scalars)(random(8, 3))


def test_an_inner_model_casts_to_its_input() -> None:
    counts = keras.Input([3], dtype="int32", name="counts")
    numbers = keras.Input([3], name="numbers")
    inner = keras.Model(numbers, layers.Dense(2)(numbers * 0.5), name="inner")
    model = keras.Model(counts, inner(counts))
    x = np.arange(12, dtype="int32").reshape(4, 3)
    np.testing.assert_allclose(pipeline(model)(x), model(x), rtol=1e-5)


# --- Labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "output"), [("price", "out"), ("hidden", "price")])
def test_a_layer_named_like_the_label_is_no_label(hidden: str, output: str) -> None:
    f = keras.Input([6], name="f")
    model = keras.Model(f, layers.Dense(2, name=output)(layers.Dense(2, name=hidden)(f)))
    pipe = pipeline(model, [loss_of("MeanSquaredError", "price")])
    with pytest.raises(errors.LayerError, match=r"'price', which is a field .* layer price"):
        pipe.value_and_gradients({"f": random(8, 6), "price": random(8, 2)})


# --- Losses -------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("as_keras_test")
class Penalty(layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, kind: str = "mean", **more: Any) -> None:
        super().__init__(**more)
        self.kind = kind

    def call(self, x: Any) -> Any:
        if self.kind == "square of a sum":
            self.add_loss(keras.ops.sum(x**2) ** 2)
        else:
            self.add_loss(getattr(keras.ops, self.kind)(x**2))
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind}


def penalized(kind: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    f = keras.Input([6], name="f")
    hidden = Penalty(kind, name="penalty")(layers.Dense(4)(f))
    return keras.Model(f, layers.Dense(2)(hidden))


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_added_losses_are_means_or_sums_over_examples(kind: str, num_micro_batches: int) -> None:
    model, x, y = penalized(kind), random(7, 6), random(7, 2, seed=1)
    model.compile(loss="mse")
    wanted = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    pipe = pipeline(model, [loss_of("MeanSquaredError", "y")], num_micro_batches)
    found = pipe.value_and_gradients({"f": x, "y": y}).loss
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_an_added_loss_that_is_neither_is_refused() -> None:
    with pytest.raises(errors.LayerError, match=r"penalty .* neither a mean nor a sum"):
        pipeline(penalized("square of a sum"))(random(8, 6))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_operations_that_only_allocate_are_no_state(num_micro_batches: int) -> None:
    x = random(7, 6)
    label = np.random.default_rng(0).integers(1, 4, size=(7, 2)).astype("int32")
    field = keras.Input([6], name="f")
    hidden = layers.Dense(24)(layers.Dense(8, activation="tanh")(field))
    model = keras.Model(field, layers.Reshape((6, 4))(hidden))
    model.compile(loss=keras.losses.CTC())
    wanted = model.compute_loss(x=x, y=label, y_pred=model(x, training=True))
    pipe = pipeline(model, [loss_of("CTC", "label")], num_micro_batches)
    found = pipe.value_and_gradients({"f": x, "label": label})
    np.testing.assert_allclose(found.loss, wanted, rtol=1e-5)


# --- Examples -----------------------------------------------------------------------------------


def test_layers_that_compare_examples_need_one_micro_batch() -> None:
    left, right = keras.Input([6], name="left"), keras.Input([6], name="right")
    pairs = keras.ops.matmul(layers.Dense(4)(left), keras.ops.transpose(layers.Dense(4)(right)))
    model = keras.Model([left, right], pairs)
    x = random(9, 6)
    fields = [x, x + 1]
    whole = pipeline(model, num_micro_batches=1)(fields)
    np.testing.assert_allclose(whole, model(fields), rtol=1e-5, atol=1e-5)
    with pytest.raises(errors.LayerError, match=r"compares the examples .* Use one micro-batch"):
        pipeline(model, num_micro_batches=3)(fields)


def test_a_mean_over_the_batch_needs_one_micro_batch() -> None:
    f = keras.Input([6], name="f")
    model = keras.Model(f, layers.Dense(2)(f - keras.ops.mean(f, axis=0)))
    with pytest.raises(errors.LayerError, match="compares the examples"):
        pipeline(model)(random(8, 6))


class Resized(layers.Layer):
    """Resizes, which says to Keras that training has begun, and normalises."""

    def build(self, shape: Any) -> None:
        self.norm = layers.BatchNormalization()
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return self.norm(layers.Resizing(4, 4)(x))


def test_a_layer_is_tried_without_training() -> None:
    f = keras.Input([4, 4, 1], name="f")
    model = keras.Model(f, layers.Flatten()(Resized()(f)))
    x = random(6, 4, 4, 1)
    np.testing.assert_allclose(pipeline(model)(x), model(x, training=False), rtol=1e-5)


class Offsets(layers.Layer):
    """Returns the same for every mini-batch, as tables of positions do."""

    def build(self, shape: Any) -> None:
        self.offsets = self.add_weight(shape=shape[1:], name="offsets")

    def call(self, x: Any) -> Any:
        del x
        return self.offsets.value


class Vague(layers.Layer):
    """Declares a shape with an unknown dimension that is not the number of examples."""

    def call(self, x: Any) -> Any:
        return x * 2.0

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((None, None), x.dtype)


class Frames(layers.Layer):
    """Splits the first dimension into examples and three frames."""

    def call(self, x: Any) -> Any:
        return keras.ops.mean(keras.ops.reshape(x, [x.shape[0] // 3, 3, 6]), axis=1)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((None, 6), x.dtype)


class Mode(layers.Layer):
    """Notes the mode of its last call."""

    def call(self, x: Any, training: bool = False) -> Any:
        self.was_training = training
        return x * 2.0


def test_layers_of_unusual_shapes_and_attributes_are_those_of_keras() -> None:
    f = keras.Input([3, 6], name="f")
    frames = keras.ops.reshape(f, [-1, 6]) + Offsets()(keras.ops.reshape(f, [-1, 18])[:, :6])
    x = Vague()(Mode()(layers.Dense(6)(Frames()(frames))))
    inside = keras.Input([6], name="inside")
    inner = keras.Model({"inside": inside}, layers.Dense(2)(inside))
    model = keras.Model(f, inner(inputs={"inside": x}))
    whole_models.check(model, [random(5, 3, 6)], tolerance=1e-5)


# --- Gradients and updates ----------------------------------------------------------------------


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_gradients_without_training_are_those_with_it(num_micro_batches: int) -> None:
    ids = np.random.default_rng(0).integers(0, 20, size=(8, 5)).astype("int32")
    field = keras.Input([5], dtype="int32")
    model = keras.Model(field, layers.Dense(3)(layers.Embedding(20, 8, name="words")(field)))
    pipe = pipeline(model, num_micro_batches=num_micro_batches)
    gradients = []
    for training in (False, True):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(pipe(ids, training=training) ** 2)
        gradient = tape.gradient(value, pipe.weights)["words/embeddings"]
        gradients.append(tf.convert_to_tensor(gradient))
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6)


def test_scales_of_every_normalisation_are_of_the_group_norm() -> None:
    field = keras.Input([8])
    hidden = layers.RMSNormalization(name="rms")(layers.Dense(16, name="hidden")(field))
    hidden = layers.LayerNormalization(name="layer")(hidden)
    hidden = layers.GroupNormalization(4, name="group")(hidden)
    pipe = pipeline(keras.Model(field, layers.Dense(2, name="out")(hidden)))
    pipe.build({pipe.params.inputs: random(4, 8)})
    groups = {path: spec.group for path, spec in pipe.analysis.variables.items()}
    assert {path for path, group in groups.items() if group == "norm"} == {
        "rms/scale",
        "layer/gamma",
        "layer/beta",
        "group/gamma",
        "group/beta",
    }


def test_muon_finds_weights_by_their_paths() -> None:
    def slots(path: str, **config: Any) -> list[str]:
        params = optim.Optimizer.Params(name="Muon", config=config, learning_rate=1e-2)
        rule = params.instantiate().rule
        return sorted(slot.slot for slot in rule.slots(path, (20, 8), tf.float32))

    by_adam = slots("logits/bias_like", exclude_layers=["."])
    for pattern in ("logits", "logits/kernel", "^logits/.*$"):
        assert slots("logits/kernel", exclude_layers=[pattern]) == by_adam
        assert slots("hidden/kernel", exclude_layers=[pattern]) != by_adam
    assert slots("words/table") == slots("embedding/table") == by_adam


# --- Live layers --------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("as_keras_test")
class Block(layers.Layer):
    """Two Dense layers in a row."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.first, self.second = layers.Dense(width), layers.Dense(width)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((*shape[:-1], self.width))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


class NoConfig(layers.Layer):
    """Its config lacks an argument of its constructor."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = layers.Dense(width)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def with_lora(block: Any) -> None:
    block.first.enable_lora(2)
    block.first.lora_kernel_b.assign(np.ones((2, 6)))


def with_another_activation(block: Any) -> None:
    block.first.activation = keras.activations.relu


def with_another_sublayer(block: Any) -> None:
    block._tracker.unlock()
    block.second = layers.Dense(6, activation="relu")
    block.second.build((None, 6))
    block._tracker.lock()


def frozen_inside(block: Any) -> None:
    block.first.trainable = False


CHANGES = [with_lora, with_another_activation, with_another_sublayer, frozen_inside]


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_computes_what_the_live_one_computes(change: Callable[[Any], None]) -> None:
    inputs = keras.Input([6])
    block = Block(6)
    model = keras.Model(inputs, layers.Dense(3)(block(inputs)))
    change(block)
    x = random(4, 6)
    pipe = pipeline(model)
    np.testing.assert_allclose(pipe(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(pipe.weights) == len(model.trainable_variables)


def test_a_layer_that_its_config_does_not_make_again_runs() -> None:
    inputs = keras.Input([6])
    model = keras.Model(inputs, layers.Dense(3)(NoConfig(6)(inputs)))
    x = random(4, 6)
    np.testing.assert_allclose(pipeline(model)(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_lora, r"its variable first/kernel is float32 \[6, 6\], frozen"),
        (with_another_activation, "outputs for the same inputs and weights differ"),
        (with_another_sublayer, "its variable dense/kernel is"),
    ],
)
def test_a_text_of_a_layer_that_differs_from_its_config_is_refused(
    change: Callable[[Any], None], text: str
) -> None:
    inputs = keras.Input([6])
    block = Block(6, name="block")
    model = keras.Model(inputs, block(inputs))
    change(block)
    (layer,) = from_keras_model(model).layers
    with pytest.raises(errors.LayerError, match=rf"block \(Block\) differs .*{text}"):
        layer.to_text()


@pytest.mark.filterwarnings("ignore:Layer .*`quantize`", "ignore:__array__ implementation")
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_lora_weights_of_quantized_layers_have_the_gradients_of_keras(mode: str) -> None:
    words = keras.Input([5], dtype="int32")
    embedding = layers.Embedding(16, 8)
    einsum = layers.EinsumDense("btd,dh->bth", output_shape=(None, 8), bias_axes="h")
    dense = layers.Dense(6)
    model = keras.Model(words, dense(layers.Dense(8)(einsum(embedding(words)))))
    for layer in (embedding, einsum, dense):
        layer.enable_lora(2)
    model.quantize(mode)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(0.1 * random(*variable.shape, seed=number))
    ids = np.random.default_rng(0).integers(0, 16, (5, 5)).astype("int32")
    whole_models.check(model, [ids], num_partitions=3, tolerance=1e-5)
