"""Graphs of subclassed models: which calls have one, and what they would lose."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers import functional_form, model
from tests.lingvo_gpipe.fitting import fit_cases

X = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")


class Base(keras.Model):
    """Two dense layers, between which the classes below do something more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(3), layers.Dense(2)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.last(self.between(self.first(x), training))


class Branches(Base):
    def between(self, x: Any, training: bool | None) -> Any:
        return x + 1.0 if training else x


class AlwaysDrops(Base):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return self.dropout(x, training=True)


class WeightInAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.own = [self.add_weight(shape=(1, 3), name="own")]

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x + ops.broadcast_to(self.own[0], (1, 3))


class Repeats(Base):
    """Needs to know how many examples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.add_weight(shape=(1, 3), name="own")

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x + ops.broadcast_to(self.own, (ops.shape(x)[0], 3))


class Draws(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x + keras.random.normal((1, 3), seed=self.seed)


class DrawsByNumPy(Base):
    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x + np.random.default_rng().normal(size=(1, 3))


class Penalized(layers.Layer):
    """Adds a loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(x**2))
        return x


class LossBeside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.beside = Penalized()

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        self.beside(x)
        return x


class PenaltyBeside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.beside = self.add_weight(shape=(2,), name="beside", regularizer="l2")


class Maps(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(3)
        self.inner.build((None, 3))

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return ops.map(self.inner, x[:, None])[:, 0]


class Tokens(layers.Layer):
    """Has a mask only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(9, 3, mask_zero=True)

    def call(self, x: Any) -> Any:
        return self.table(ops.cast(x > 0, "int32"))


class Masked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.over = Tokens(), layers.LSTM(3)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return self.over(self.tokens(x))


class AListOfOne(Base):
    def call(self, x: Any, training: bool | None = None) -> Any:
        del training
        return [self.last(self.first(x))]


class ByAnInteger(Base):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return self.dropout(x, training=0)


class ReadsAVariable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.beta = tf.Variable(1.0)

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x * (self.beta * 1.0)


class OfTensorFlow(Base):
    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return tf.nn.relu(x)


class Adds(Base):
    def between(self, x: Any, training: bool | None) -> Any:
        del training
        self.add_loss(ops.mean(x))
        return x


class LooksAtTensors(Base):
    """Does something else where tensors have values."""

    def between(self, x: Any, training: bool | None) -> Any:
        del training
        return x * 2 if isinstance(x, tf.Tensor) else x


REFUSED = {
    Branches: "depends on the argument training",
    AlwaysDrops: "depends on the argument training",
    WeightInAList: "reads 'weight_in_a_list.*/own' outside of a layer",
    Repeats: "cannot be called with symbolic tensors .*None",
    Draws: "reads '.*seed_generator_state' outside of a layer",
    DrawsByNumPy: "depends on the argument training|computes something else",
    LossBeside: "calls 'penalized.*' for something that it does not return",
    PenaltyBeside: "leaves 'penalty_beside.*/beside' out, which has a penalty",
    Maps: "hands a function to 'map.*'",
    Masked: "has a mask from 'tokens.*', which defines no compute_mask",
    AListOfOne: "returns a list that is not kept",
    ByAnInteger: "has an argument training that is no bool",
    ReadsAVariable: "may read a tf.Variable",
    OfTensorFlow: "cannot be called with symbolic tensors",
    Adds: "cannot be called with symbolic tensors",
    LooksAtTensors: "computes something else",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_graph_would_lose_is_refused(kind: Any) -> None:
    with pytest.raises(errors.LayerError, match=REFUSED[kind]) as caught:
        functional_form.graphs(kind(), X)
    assert "\n" not in str(caught.value)
    assert f"the call of {kind.__name__} " in str(caught.value)


def test_the_model_is_as_before() -> None:
    own = fit_cases.Positioned()
    own(X)
    before = {name: id(value) for name, value in vars(own).items()}
    attributes = [set(vars(layer)) for layer in own.layers]
    functional_form.graphs(own, X)
    assert {name: id(value) for name, value in vars(own).items()} == before
    assert [set(vars(layer)) for layer in own.layers] == attributes
    assert [weight.name for weight in own.weights] == [
        "scale",
        *("kernel", "bias") * 2,
        "embeddings",
    ]


def test_models_in_a_model_are_cut() -> None:
    own = fit_cases.TwoHeaded()
    graphs = functional_form.graphs(own, X)
    assert graphs.keys() == {id(own), *map(id, own.encoders)}
    cut = model.from_keras_model(own, graphs=graphs)
    assert [layer.name for layer in cut.layers][:4] == [
        "encoder.dense",
        "encoder.dropout",
        "encoder.batch_normalization",
        "encoder_1.dense",
    ]
    assert cut.outputs == {"left": "dense", "right": "multiply"}


def test_a_model_that_is_called_twice_is_one_layer() -> None:
    class Flips(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x: Any, flip: bool = False) -> Any:
            return self.dense(x[:, ::-1] if flip else x)

    class Outer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Flips()

        def between(self, x: Any, training: bool | None) -> Any:
            del training
            return self.inner(x) + self.inner(x, flip=True)

    own = Outer()
    assert functional_form.graphs(own, X).keys() == {id(own)}


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"activity_regularizer": "l2"}])
def test_a_model_that_does_more_than_its_layers_is_one_layer(settings: dict[str, Any]) -> None:
    class Inner(keras.Model):
        def __init__(self) -> None:
            super().__init__(**settings)
            self.dense = layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class Outer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def between(self, x: Any, training: bool | None) -> Any:
            del training
            return self.inner(x)

    own = Outer()
    assert functional_form.graphs(own, X).keys() == {id(own)}


def test_a_layer_keeps_a_call_of_its_own() -> None:
    own = fit_cases.Positioned()
    plain = own.first.call
    own.first.call = lambda x, training=None: 2 * plain(x, training=training)
    expected = own(X)
    functional_form.graphs(own, X)
    np.testing.assert_array_equal(own(X), expected)


def test_a_model_in_a_model_that_has_no_graph_is_one_layer() -> None:
    class Outer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Draws()

        def between(self, x: Any, training: bool | None) -> Any:
            return self.inner(x, training=training)

    own = Outer()
    graphs = functional_form.graphs(own, X)
    assert graphs.keys() == {id(own)}
    assert [layer.name for layer in model.from_keras_model(own, graphs=graphs).layers] == [
        "dense",
        "draws",
        "dense_1",
    ]


def test_the_graph_is_for_the_sizes_of_the_inputs_and_any_number_of_examples() -> None:
    x = {"ids": np.zeros([4, 5], "int32"), "more": np.zeros([4, 3, 2], "float64")}

    class Reads(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(9, 2)

        def call(self, x: Any) -> Any:
            return ops.concatenate([self.table(x["ids"]), x["more"]], 1)

    own = Reads()
    graph = functional_form.graphs(own, x)[id(own)]
    assert {name: (t.shape, t.dtype) for name, t in graph.input.items()} == {
        "ids": ((None, 5), "int32"),
        "more": ((None, 3, 2), "float32"),
    }
