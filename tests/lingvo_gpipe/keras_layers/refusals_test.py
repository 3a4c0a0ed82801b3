"""Keras layers that are refused, their params texts, and copied weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors, hyperparams, network, pipelining
from lingvo_gpipe.keras_layers import adapter, from_keras_model
from tests.lingvo_gpipe.keras_layers import keras_runs

hyperparams.register_package(__name__)

ROWS = (2, 5, 4)


class Keeps(layers.Layer):
    def call(self, x: Any) -> Any:
        self.last = x
        return x


class Counts(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


class Remembers(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Any] = []

    def call(self, x: Any) -> Any:
        self.seen.append(keras.ops.shape(x)[0])
        return x


class HoldsVariable(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = tf.Variable(2.0, name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor


class MakesVariable(layers.Layer):
    def call(self, x: Any) -> Any:
        return x * tf.Variable(2.0)


class Writes(layers.Layer):
    def build(self, shape: Any) -> None:
        del shape
        self.total = self.add_weight(name="total", shape=(), trainable=False)

    def call(self, x: Any) -> Any:
        self.total.assign_add(keras.ops.sum(x))
        return x


class DrawsUnseeded(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x))


class DrawsByTensorFlow(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class Prints(layers.Layer):
    def call(self, x: Any) -> Any:
        tf.print(x)
        return x


class HidesLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        def body(i: Any) -> Any:
            self.add_loss(keras.ops.sum(x))
            return (i + 1,)

        keras.ops.while_loop(lambda i: i < 3, body, (0,))
        return x


class Measures(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


class NormTwice(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(self.norm(x))


class Secret(layers.Layer):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class KeepsPositive(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.boolean_mask(x, x[:, 0, 0] > 0)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


REFUSED: list[tuple[Any, tuple[int, ...], str]] = [
    (
        lambda: layers.LSTM(3, stateful=True),
        ROWS,
        "stateful: it carries state from batch to batch",
    ),
    (
        lambda: layers.Bidirectional(layers.LSTM(3, stateful=True)),
        ROWS,
        "Make it with stateful=False",
    ),
    (lambda: layers.RNN(layers.LSTMCell(3), stateful=True), ROWS, "Make it with stateful=False"),
    (Keeps, ROWS, "its call stores a value in the attribute 'last'"),
    (Counts, ROWS, "its call stores a value in the attribute 'calls'"),
    (Remembers, ROWS, "its call stores a value in the attribute 'seen'"),
    (HoldsVariable, ROWS, "its call reads the variable 'factor', which Keras does not list"),
    (MakesVariable, ROWS, "cannot be"),
    (Writes, ROWS, "its call writes its variable 'total'. A pipeline changes moving"),
    (
        lambda: layers.SpectralNormalization(layers.Dense(3)),
        ROWS,
        "its call writes its variable 'vector_u'",
    ),
    (DrawsUnseeded, ROWS, "keras.random without a seed, so every step"),
    (DrawsByTensorFlow, ROWS, "stateful operation RandomStandardNormal. Draw by keras.random"),
    (Prints, ROWS, "stateful operation"),
    (HidesLoss, ROWS, "a loss inside a loop or branch, where it cannot be collected"),
    (Measures, ROWS, "its call updates a metric"),
    (NormTwice, ROWS, "its batch norm norm is called 2 times in one call"),
    (lambda: layers.Normalization(), ROWS, "must adapt to data before it can be called"),
    (lambda: layers.BatchNormalization(renorm=True), ROWS, "synchronized or renorm"),
    (
        lambda: layers.Dense(3, kernel_constraint="non_neg"),
        ROWS,
        "kernel has the constraint NonNeg",
    ),
    (lambda: layers.Dense(3), (), "cannot be called on its inputs"),
    (
        lambda: layers.Dense(3, dtype="float8_from_float32"),
        ROWS,
        "it is quantized to float8, which a pipeline cannot train",
    ),
    (KeepsPositive, ROWS, "returns shape (None, 5, 4), which depends on its data"),
]


@pytest.mark.parametrize(("make", "shape", "text"), REFUSED)
def test_what_hides_state_is_refused_with_the_reason(
    make: Any, shape: tuple[int, ...], text: str
) -> None:
    layer = make()
    message = keras_runs.refused(adapter.from_keras(layer, name="mine"), keras_runs.spec(*shape))
    assert message.startswith(f"mine ({type(layer).__name__}): ")
    assert text in message
    assert "\n" not in message


def analyze(model: keras.Model) -> None:
    cut = from_keras_model(model)
    params = pipelining.PipeliningLayer.Params(layers=cut.layers)
    network.analyze(params, {cut.inputs: tf.TensorSpec(ROWS, tf.float32)})


def test_it_is_refused_in_a_model() -> None:
    x = keras.Input(ROWS[1:], batch_size=ROWS[0])
    model = keras.Model(x, layers.Dense(2)(Keeps(name="keeps")(x)))
    with pytest.raises(errors.LayerError, match=r"^keeps \(.* its call stores a value in the attr"):
        analyze(model)


def test_a_layer_that_keras_cannot_make_again_runs_but_has_no_text() -> None:
    x = keras.Input((8, 8, 3))
    model = keras.Model(x, layers.RandomShear(x_factor=0.1)(x))  # its config has -0.1
    (layer,) = from_keras_model(model).layers
    with pytest.raises(errors.LayerError, match="no Keras layer can be made from this RandomShear"):
        layer.to_text()


def test_a_lookup_table_belongs_into_the_input() -> None:
    params = adapter.from_keras(layers.IntegerLookup(vocabulary=[4, 5]))
    text = keras_runs.refused(params, keras_runs.spec(2, dtype=tf.int64))
    assert "reads a table or another resource. Do that in the input" in text


def test_a_layer_that_does_not_record_how_it_was_made_is_refused() -> None:
    with pytest.raises(errors.LayerError, match="Define its get_config"):
        adapter.from_keras(Secret(lambda x: x))


def test_wrong_inputs_are_named() -> None:
    params = adapter.from_keras(layers.Dense(3), name="mine")
    assert "got 2 inputs for the names ('x',)" in keras_runs.refused(
        params, keras_runs.spec(2, 4), keras_runs.spec(2, 4)
    )
    assert "an input of shape (None, 4)" in keras_runs.refused(params, tf.TensorSpec((None, 4)))
    params.frozen = ("kernle",)
    assert "no sublayer 'kernle' to freeze" in keras_runs.refused(params, keras_runs.spec(2, 4))
    params = adapter.from_keras(layers.Dense(3), name="mine").set(args=[{"read": "y"}])
    assert "an argument reads 'y', which is not in reads; there are 'x'" in keras_runs.refused(
        params, keras_runs.spec(2, 4)
    )
    picked = adapter.from_keras(layers.Dense(3)).set(picks=(1,))
    assert "picks tensor 1, but its call returns 1" in keras_runs.refused(
        picked, keras_runs.spec(2, 4)
    )


# --- Texts ------------------------------------------------------------------------------------


def test_a_lambda_runs_but_has_no_text() -> None:
    params = adapter.from_keras(layers.Lambda(lambda x: x * 2))
    x = keras_runs.random(2, 4)
    np.testing.assert_array_equal(keras_runs.run(params, x)[0], x * 2)
    with pytest.raises(errors.ParamsError, match=r"'config'.* has no name that a text could hold"):
        params.to_text()


def doubled(x: Any) -> Any:
    return x * 2


def test_a_function_of_a_live_layer_runs_but_has_no_text() -> None:
    x = keras_runs.random(2, 4)
    for live in (layers.Lambda(doubled), layers.Activation(doubled)):
        params = adapter.from_keras(live)
        assert adapter.from_keras(live) == params
        np.testing.assert_array_equal(keras_runs.run(params.copy(), x)[0], x * 2)
        with pytest.raises(errors.ParamsError, match=r"write a class of keras\.layers\.Layer"):
            params.to_text()


def test_an_activation_of_keras_has_a_text() -> None:
    params = adapter.from_keras(layers.Dense(4, activation=keras.activations.leaky_relu))
    assert params.from_text(params.to_text()) == params
    params = adapter.from_keras(layers.Lambda(keras.activations.relu))
    assert "Lambda" in keras_runs.refused(params, keras_runs.spec(2, 4))


def test_a_class_made_inside_a_function_runs_but_has_no_text() -> None:
    class Local(layers.Layer):
        def call(self, x: Any) -> Any:
            return x + 1

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    params = adapter.from_keras(layers.TimeDistributed(Local()))
    x = keras_runs.random(2, 3, 4)
    np.testing.assert_array_equal(keras_runs.run(params, x)[0], x + 1)
    with pytest.raises(errors.ParamsError, match="has no name that a text could hold"):
        params.to_text()


class Shift(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 1


class Holds(layers.Layer):
    """Has its part in an attribute of another name than in its configuration."""

    def __init__(self, part: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._held = part

    def call(self, x: Any) -> Any:
        return self._held(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "part": keras.saving.serialize_keras_object(self._held)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{**config, "part": keras.saving.deserialize_keras_object(config["part"])})


def test_a_part_in_another_attribute_is_found_by_its_name() -> None:
    class Local(Shift):
        pass

    params = adapter.from_keras(Holds(Shift()))
    assert params.from_text(params.to_text()) == params
    np.testing.assert_array_equal(keras_runs.run(params, tf.zeros([1, 2]))[0], [[1, 1]])
    with pytest.raises(errors.LayerError, match=r"refusals_test\.Local, .*Define it at the top le"):
        adapter.from_keras(Holds(Local()))


@pytest.mark.parametrize(
    "config",
    [
        {"module": "os", "class_name": "system", "config": {"command": "true"}},
        {"module": "keras.layers", "class_name": "Dense", "config": {"unknown": 1}},
        {"module": "keras.initializers", "class_name": "Zeros", "config": {}},
        {},
    ],
)
def test_a_hostile_or_wrong_configuration_is_refused(config: dict[str, Any]) -> None:
    params = adapter.KerasLayer.Params(config=config, name="mine")
    assert "Keras layer" in keras_runs.refused(
        hyperparams.from_text(params.to_text()), keras_runs.spec(2, 4)
    )
