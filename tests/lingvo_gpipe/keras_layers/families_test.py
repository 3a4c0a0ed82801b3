"""Keras models of every kind in a pipeline: each gradient by its name is that of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from lingvo_gpipe import hyperparams
from tests.lingvo_gpipe.keras_layers import whole_models

hyperparams.register_package(__name__)
VOCABULARY, TIME = 11, 6


pytestmark = pytest.mark.usefixtures("float64")


def ids(rows: int = 5, *, seed: int = 0) -> Any:
    """Return ids whose last ones are 0, which is padding."""
    random = np.random.default_rng(seed)
    found = random.integers(1, VOCABULARY, (rows, TIME)).astype("int32")
    for row, length in enumerate(random.integers(2, TIME + 1, rows)):
        found[row, length:] = 0
    return found


class Positions(layers.Layer):
    """Adds a trained vector for each position, as KerasHub's embeddings do."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="glorot_uniform", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


class Encoder(layers.Layer):
    """A Transformer block as one layer, as KerasHub's TransformerEncoder."""

    def __init__(self, hidden: int, rate: float, **more: Any) -> None:
        super().__init__(**more)
        self.hidden, self.rate = hidden, rate
        self.inner = layers.Dense(hidden, activation="gelu")
        self.norm = layers.LayerNormalization()
        self.dropout = layers.Dropout(rate)

    def build(self, shape: Any) -> None:
        self.outer = layers.Dense(shape[-1])
        self.inner.build(shape)
        self.outer.build((*shape[:-1], self.hidden))
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return self.norm(x + self.dropout(self.outer(self.inner(x))))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "hidden": self.hidden, "rate": self.rate}


def bert() -> keras.Model:
    """Token ids and segments, attention over real tokens, two heads, one of them tied."""
    tokens = keras.Input((TIME,), dtype="int32", name="tokens")
    segments = keras.Input((TIME,), dtype="int32", name="segments")
    table = layers.ReversibleEmbedding(VOCABULARY, 8, name="table")
    x = Positions(name="positions")(table(tokens)) + layers.Embedding(2, 8)(segments)
    x = layers.Dropout(0.1)(layers.LayerNormalization()(x))
    real = ops.not_equal(tokens, 0)
    attended = layers.MultiHeadAttention(2, 4)(x, x, attention_mask=real[:, None, :])
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
    x = Encoder(12, 0.1)(x)
    pooled = layers.Dense(8, activation="tanh", name="pooled")(x[:, 0])
    masked = layers.LayerNormalization()(layers.Dense(8, activation="gelu")(x))
    return keras.Model(
        {"tokens": tokens, "segments": segments},
        {"sentence": layers.Dense(2)(pooled), "words": table(masked, reverse=True)},
    )


def masked_lstm() -> keras.Model:
    words = keras.Input((TIME,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 5, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(4))(layers.Dropout(0.2)(x))
    return keras.Model(words, layers.Dense(2)(x))


def unet() -> keras.Model:
    """Skips over two levels, whose tensors cross every cut between them."""

    def block(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.Activation("swish")(layers.BatchNormalization()(x))

    x = image = keras.Input((8, 8, 2))
    skips = []
    for filters in (3, 4):
        skips.append(block(x, filters))
        x = layers.MaxPooling2D()(skips[-1])
    x = layers.SpatialDropout2D(0.2)(block(x, 5))
    for filters, skip in zip((4, 3), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skip]), filters)
    return keras.Model(image, layers.Conv2D(1, 1)(x))


def two_by_two() -> keras.Model:
    """Two inputs and two outputs, one of which another output is computed from."""
    one, two = keras.Input((4,), name="one"), keras.Input((3,), name="two")
    joined = layers.Concatenate()([layers.Dense(4, activation="tanh")(one), two])
    first = layers.Dense(5, activation="tanh")(joined)
    return keras.Model(
        [one, two], [first, layers.Dense(2)(layers.Multiply()([first, joined[:, :5]]))]
    )


def siamese() -> keras.Model:
    """A tower that two inputs share, and a layer that is called twice in it."""
    inside = keras.Input((4,))
    again = layers.Dense(4, activation="tanh", name="again")
    tower = keras.Model(inside, layers.Dense(3)(again(again(inside))), name="tower")
    one, two = keras.Input((4,)), keras.Input((4,))
    return keras.Model([one, two], layers.Dense(1)(ops.abs(tower(one) - tower(two))))


HAND_BUILT: dict[str, tuple[Any, Any]] = {
    "bert": (bert, lambda: [np.minimum(ids(seed=1), 1), ids()]),
    "masked_lstm": (masked_lstm, lambda: [ids()]),
    "unet": (unet, lambda: [whole_models.random(5, 8, 8, 2)]),
    "two_by_two": (
        two_by_two,
        lambda: [whole_models.random(5, 4), whole_models.random(5, 3, seed=1)],
    ),
    "siamese": (siamese, lambda: [whole_models.random(5, 4), whole_models.random(5, 4, seed=1)]),
}
SLOW = ("masked_lstm", "unet")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sameness_grid) if name in SLOW else name
        for name in HAND_BUILT
    ],
)
def test_a_hand_built_model_has_the_gradients_of_keras(name: str) -> None:
    make, inputs = HAND_BUILT[name]
    model = make()
    whole_models.warm(model)
    whole_models.check(model, inputs(), num_partitions=2)


# One of each module of keras.applications, with a size of images at which no batch norm has a
# single position, which would amplify rounding.
FAMILIES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 64,
    "EfficientNetB0": 64,
    "EfficientNetV2B0": 64,
    "InceptionResNetV2": 96,
    "InceptionV3": 96,
    "MobileNet": 64,
    "MobileNetV2": 64,
    "MobileNetV3Small": 64,
    "NASNetMobile": 64,
    "ResNet50": 64,
    "ResNet50V2": 64,
    "VGG16": 32,
    "Xception": 96,
}


def test_every_family_of_keras_applications_is_compared() -> None:
    modules = {
        getattr(keras.applications, name).__module__
        for name in dir(keras.applications)
        if name[0].isupper()
    }
    compared = [getattr(keras.applications, name).__module__ for name in FAMILIES]
    # VGG16 and VGG19 have a module each, and ResNet50 one of its own.
    assert {module.rstrip("0123456789") for module in modules} == {
        module.rstrip("0123456789") for module in compared
    }
    assert len(compared) == len(FAMILIES)


@pytest.mark.sameness_grid
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_keras_applications_has_the_gradients_of_keras(name: str) -> None:
    size = FAMILIES[name]
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(size, size, 3), classes=4, classifier_activation=None)
    images = whole_models.random(6, size, size, 3)
    whole_models.check(model, [images], sizes=(3, 3), tolerance=1e-8)
    keras.backend.clear_session()
