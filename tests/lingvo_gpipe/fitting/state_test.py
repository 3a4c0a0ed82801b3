"""What a wrapped model, its optimizer and its random numbers are before and between updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors
from lingvo_gpipe.fitting import PipelinedModel

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = X[:, :2]


def network(*between: layers.Layer) -> keras.Model:
    """Return a model of two layers, `first` and `last`, and others between."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([6])
    x = layers.Dense(8, activation="tanh", name="first")(inputs)
    for layer in between:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(2, name="last")(x))


def compare(optimizer: Callable[[keras.Model], keras.optimizers.Optimizer]) -> None:
    """Compare the weights of a pipelined model after some updates with those of the plain one."""
    results = []
    for pipelined in (True, False):
        model = network()
        chosen = optimizer(model)
        run = PipelinedModel(model, 2, 3) if pipelined else model
        run.compile(chosen, "mse")
        for _ in range(3):
            run.train_on_batch(X, Y)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def excluding(model: keras.Model) -> keras.optimizers.Optimizer:
    """Return an optimizer that lets the kernel of the first layer be as large as it is."""
    adam = keras.optimizers.AdamW(1e-3, weight_decay=10.0)
    adam.exclude_from_weight_decay(var_list=[model.get_layer("first").kernel])
    return adam


def test_a_weight_that_an_optimizer_knows_does_not_decay() -> None:
    compare(excluding)


@pytest.mark.parametrize("factor", [None, 64.0])
def test_gradients_are_scaled_as_the_optimizer_divides_them(factor: float | None) -> None:
    compare(lambda _: keras.optimizers.SGD(0.1, loss_scale_factor=factor))


def test_a_model_that_was_made_in_float16_scales_its_loss() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plain = network()
    finally:
        keras.config.set_dtype_policy("float32")
    model = PipelinedModel(plain, 2, 2)
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer is plain.optimizer


def test_a_call_under_a_mixed_policy_keeps_the_dtypes_of_the_inputs() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x = keras.Input([6])
        small = layers.Rescaling(1e-5, dtype="float32")(x)
        hidden = layers.Dense(8)(small)
        plain = keras.Model(x, layers.Dense(2, dtype="float32")(hidden))
        model = PipelinedModel(plain, 2)
        for training in (False, True):
            large = np.full([4, 6], 2e5, "float32")  # more than a float16 holds
            np.testing.assert_allclose(model(large, training=training), plain(large), rtol=1e-2)
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_layer_in_float64_leaves_the_others_as_they_are() -> None:
    results = []
    for pipelined in (True, False):
        keras.utils.set_random_seed(0)
        model = network(layers.Dense(8, dtype="float64"))
        run = PipelinedModel(model, 2, 3) if pipelined else model
        run.compile("sgd", "mse")
        run.train_on_batch(X, Y)
        results.append((model.get_weights(), model(X), run.predict(X, verbose=0)))
    for one, other in zip(*map(keras.tree.flatten, results), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_in_half_precision_is_a_sum(dtype: str) -> None:
    plain = network()
    losses = []
    for model in (PipelinedModel(plain, 2, 3), plain):
        loss = keras.losses.MeanSquaredError(dtype=dtype)
        model.compile(keras.optimizers.SGD(0.0), loss)
        losses.append(float(model.train_on_batch(X, Y)))
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)


def test_a_strategy_is_refused() -> None:
    model = PipelinedModel(network(), 2)
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(errors.LayerError, match=r"outside of strategy\.scope\(\); num_replicas"),
    ):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("batch", [(X, Y, None), (X, (Y, None), (X[:, 0], None))])
def test_a_generator_may_leave_something_out(batch: Any) -> None:
    def batches() -> Iterator[Any]:
        while True:
            yield batch

    model = network()
    if isinstance(batch[1], tuple):
        model = keras.Model(model.input, [model.output, model.get_layer("first").output])
    losses = []
    for run in (model, PipelinedModel(model, 2, 3)):
        run.compile(keras.optimizers.SGD(0.0), ["mse", None][: len(model.outputs)])
        losses.append(
            run.fit(batches(), steps_per_epoch=2, shuffle=False, verbose=0).history["loss"]
        )
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_compile_may_turn_xla_off_again() -> None:
    model = PipelinedModel(network(), 2)
    for asked in (True, False):
        model.compile("sgd", "mse", jit_compile=asked)
        assert model.settings["jit_compile"] is asked
    always = PipelinedModel(network(), 2, jit_compile=True)
    always.compile("sgd", "mse", jit_compile=False)
    assert always.settings["jit_compile"]


def test_dropout_draws_by_the_seed_of_keras() -> None:
    def losses(seed: int, iterations: int = 0) -> list[float]:
        model = network(layers.Dropout(0.5))
        keras.utils.set_random_seed(seed)
        model = PipelinedModel(model, 2, 3)
        sgd = keras.optimizers.SGD(0.0)
        sgd.iterations.assign(iterations)
        model.compile(sgd, "mse")
        return [float(model.train_on_batch(X, Y)) for _ in range(3)]

    first = losses(1)
    assert len(set(first)) == 3
    assert losses(1) == first
    assert not set(losses(2)) & set(first)
    assert losses(1, iterations=2)[0] == first[2]  # as from a file


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras, in quantize
@pytest.mark.parametrize("compiles", [True, False])
def test_a_model_may_be_quantized_after_a_prediction(compiles: bool) -> None:
    predictions = []
    for pipelined in (True, False):
        model = network()
        run = PipelinedModel(model, 2, 3) if pipelined else model
        before = run.predict(X, verbose=0)
        model.quantize("int8")
        if compiles:
            run.compile("sgd", "mse")
        predictions.append(run.predict(X, verbose=0) - before)
    assert np.abs(predictions[1]).max() > 1e-3
    np.testing.assert_allclose(predictions[0], predictions[1], atol=1e-6)


def test_a_penalty_reaches_the_weights_of_a_layer_in_half_precision() -> None:
    moved = []
    for penalty in (0.0, 1e-3):
        keras.utils.set_random_seed(1)
        inputs = keras.Input([6])
        regularizer = keras.regularizers.L2(penalty)
        hidden = layers.Dense(8, dtype="mixed_bfloat16", kernel_regularizer=regularizer)(inputs)
        model: Any = PipelinedModel(keras.Model(inputs, layers.Dense(2)(hidden)), 2, 2)
        kernel = model.get_layer(index=1).kernel.numpy()
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.train_on_batch(100 * X, Y)
        moved.append(model.get_layer(index=1).kernel.numpy())
    # The kernel itself is large now, so the difference is rounded.
    found, wanted = (moved[0] - moved[1]).ravel(), 2e-3 * kernel.ravel()
    assert found @ wanted / (wanted @ wanted) == pytest.approx(1.0, abs=0.05)


def test_a_penalty_that_is_set_later_counts() -> None:
    losses = []
    for pipelined in (True, False):
        model = network()
        run = PipelinedModel(model, 2, 3) if pipelined else model
        run.compile("sgd", "mse")
        run.evaluate(X, Y, verbose=0)
        model.get_layer("first").kernel.regularizer = keras.regularizers.L2(1.0)
        model.get_layer("last").activity_regularizer = keras.regularizers.L2(1.0)
        run.compile("sgd", "mse")
        losses.append(run.evaluate(X, Y, verbose=0))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_batch_norm_without_weights_may_be_frozen_and_trained_again() -> None:
    means = []
    for pipelined in (True, False):
        norm = layers.BatchNormalization(center=False, scale=False, momentum=0.5)
        model = network(norm)
        run = PipelinedModel(model, 2, 1) if pipelined else model
        for trainable in (False, True):
            norm.trainable = trainable
            run.compile("sgd", "mse")
            run.train_on_batch(X, Y)
            means.append(norm.moving_mean.numpy())
    assert not np.any(means[0])
    assert np.any(means[1])
    np.testing.assert_allclose(means[:2], means[2:], rtol=1e-5)


def test_a_call_draws_what_no_update_draws() -> None:
    model = PipelinedModel(network(layers.Dropout(0.5)), 2, 1)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    updates = np.array([float(model.train_on_batch(X, Y)) for _ in range(4)])
    for _ in range(4):
        called = float(tf.reduce_mean((model(X, training=True) - Y) ** 2))
        assert np.abs(updates - called).min() > 1e-5


@pytest.mark.parametrize(
    ("schedule", "cuts"), [("1f1b", (2, 2)), ("zb_h1", (2, 2)), ("zb_v", (1, 1, 1, 1))]
)
def test_a_cell_may_read_integers_alone(schedule: str, cuts: tuple[int, ...]) -> None:
    losses = []
    for pipelined in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input([6])
        chosen = keras.ops.argmax(layers.Dense(5, activity_regularizer="l2")(inputs), axis=-1)
        model = keras.Model(inputs, layers.Dense(2)(layers.Embedding(5, 3)(chosen)))
        run = PipelinedModel(model, 2, 3, schedule=schedule, cuts=cuts) if pipelined else model
        run.compile("sgd", "mse")
        losses.append([float(run.train_on_batch(X, Y)) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_layers_that_are_made_later_begin_as_without_a_pipeline() -> None:
    kernels = []
    for wrap in (lambda model: model, lambda model: PipelinedModel(model, 2)):
        wrap(network())
        later = layers.Dense(3)
        later.build([None, 4])
        kernels.append(later.kernel.numpy())
    np.testing.assert_array_equal(kernels[0], kernels[1])


def test_a_call_in_training_draws_and_updates_statistics() -> None:
    noisy = PipelinedModel(network(layers.Dropout(0.5)), 2, 3)
    assert len({float(tf.reduce_sum(noisy(X, training=True))) for _ in range(4)}) == 4
    assert np.array_equal(noisy(X), noisy(X))
    sums, means = [], []
    for pipelined in (True, False):
        batch_norm = layers.BatchNormalization(momentum=0.5)
        model = network(layers.ActivityRegularization(l2=1.0), batch_norm)
        model.get_layer("last").kernel_regularizer = keras.regularizers.L2(0.1)
        run = PipelinedModel(model, 2, 1) if pipelined else model
        run(X, training=True)
        sums.append([float(loss) for loss in run.losses])
        means.append(batch_norm.moving_mean.numpy())
    assert np.any(means[0])
    np.testing.assert_allclose(means[0], means[1], rtol=1e-5)
    np.testing.assert_allclose(sorted(sums[0]), sorted(sums[1]), rtol=1e-5)


def test_an_evaluation_makes_no_variables_of_the_optimizer() -> None:
    model = PipelinedModel(network(), 2, 3)
    model.compile("adam", "mse")
    model.evaluate(X, Y, verbose=0)
    assert not model.optimizer.built
    model.train_on_batch(X, Y)
    assert model.optimizer.built


def test_models_that_were_called_before_see_the_trained_weights() -> None:
    encoder, decoder = network(), network()
    inputs = keras.Input([6])
    whole = keras.Model(inputs, decoder(layers.Dense(6)(encoder(inputs))))
    encoder.predict(X, verbose=0)
    model = PipelinedModel(whole, 2, 3)
    model.compile("sgd", "mse")
    whole.evaluate(X, Y, verbose=0)
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(encoder.predict(X, verbose=0), encoder(X), rtol=1e-5)
    np.testing.assert_allclose(
        whole.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0), rtol=1e-5
    )


def test_a_layer_that_was_frozen_can_be_trained_by_keras() -> None:
    plain = network()
    first = plain.get_layer("first")
    first.trainable = False
    model = PipelinedModel(plain, 2, 3)
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    first.trainable = True
    before = first.kernel.numpy()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.train_on_batch(X, Y)
    assert np.any(before != first.kernel.numpy())


def test_a_layer_that_is_trained_after_an_evaluation_is_trained() -> None:
    plain = network()
    first = plain.get_layer("first")
    first.trainable = False
    model = PipelinedModel(plain, 2, 3)
    model.compile("sgd", "mse")
    model.evaluate(X, Y, verbose=0)
    first.trainable = True
    before = first.kernel.numpy()
    model.train_on_batch(X, Y)
    assert np.any(before != first.kernel.numpy())


def test_models_that_share_layers_train_the_same_weights() -> None:
    def losses(wrap: Callable[[keras.Model, int], Any]) -> list[float]:
        encoder = network()
        whole = keras.Model(encoder.input, layers.Dense(2, name="head")(encoder.output))
        runs = [wrap(encoder, 2), wrap(whole, 3), wrap(encoder, 1)]  # the last as the first
        for run in runs:
            run.compile(keras.optimizers.SGD(0.1), "mse")
        return [float(run.train_on_batch(X, Y)) for _ in range(3) for run in runs] + [
            float(run.evaluate(X, Y, verbose=0)) for run in runs
        ]

    pipelined = losses(lambda model, k: PipelinedModel(model, k, 3))
    np.testing.assert_allclose(pipelined, losses(lambda model, _: model), rtol=1e-5)


@pytest.mark.parametrize("of_evaluation", [True, False])
def test_labels_of_another_kind_are_compared(of_evaluation: bool) -> None:
    labels = X[:, :1] > 0
    losses = []
    for pipelined in (True, False):
        model = network()
        model = keras.Model(model.input, layers.Dense(1, "sigmoid")(model.output))
        model = PipelinedModel(model, 2, 3) if pipelined else model
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
        begin = model.test_on_batch if of_evaluation else model.train_on_batch
        begin(X, labels.astype("int64"))
        model.reset_metrics()
        losses.append(model.train_on_batch(X, labels.astype("float64")))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_lora_may_be_enabled_after_a_prediction() -> None:
    plain = network()
    model = PipelinedModel(plain, 2, 3)
    before = model.predict(X, verbose=0)
    plain.get_layer("first").enable_lora(2)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    for _ in range(2):
        model.train_on_batch(X, Y)
    after = model.predict(X, verbose=0)
    assert np.any(before != after)
    np.testing.assert_allclose(after, plain(X), rtol=1e-4, atol=1e-6)
    assert np.any(plain.get_layer("first").lora_kernel_b.numpy())


def test_a_weight_of_a_loss_that_may_change_is_refused() -> None:
    model = PipelinedModel(network(), 2, 3)
    model.compile("sgd", ["mse"], loss_weights=[keras.Variable(0.5)])
    with pytest.raises(errors.LayerError, match="loss_weights has a variable"):
        model.train_on_batch(X, Y)
