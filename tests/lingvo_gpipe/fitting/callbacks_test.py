"""Keras callbacks, saving and the rest of a model's methods, on a pipelined model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors
from lingvo_gpipe.fitting import PipelinedModel
from tests.lingvo_gpipe.fitting.fit_cases import CLASSES, SPARSE, Batches, X, arrays, classifier

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, while it saves


def pipelined(num_partitions: int = 2, num_micro_batches: int = 2, **more: Any) -> PipelinedModel:
    keras.utils.set_random_seed(1)
    model = PipelinedModel(classifier(), num_partitions, num_micro_batches, **more)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=SPARSE, metrics=["accuracy"])
    return model


def fitted(model: PipelinedModel, epochs: int = 2, **more: Any) -> keras.callbacks.History:
    return model.fit(**arrays(CLASSES, X.astype("float32")), epochs=epochs, verbose=0, **more)


def test_callbacks_are_called_and_change_the_run(tmp_path: Path) -> None:
    model = pipelined()
    rates, ends = [], []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch)),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0, factor=0.5),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, __: rates.append(float(model.optimizer.learning_rate)),
            on_train_batch_end=lambda _, logs: ends.append(logs["loss"]),
        ),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "board", histogram_freq=1),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.ModelCheckpoint(tmp_path / "whole.keras"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.weights.h5", save_weights_only=True),
    ]
    history = fitted(model, 3, callbacks=callbacks)
    np.testing.assert_allclose(rates, [0.01, 0.0025, 0.01 / 6], rtol=1e-5)
    assert len(ends) == 3 * len(Batches())
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "board" / "train").glob("events*"))
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert not isinstance(loaded, PipelinedModel)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == len(ends)
    plain = classifier()
    plain.load_weights(tmp_path / "best.weights.h5")
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(history.history["loss"]) == 3


def test_early_stopping_restores_the_best_weights() -> None:
    model = pipelined()
    kept = []
    callbacks = [
        keras.callbacks.EarlyStopping(
            monitor="loss", mode="max", patience=1, restore_best_weights=True
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda _, __: kept.append(model.get_weights())),
    ]
    history = fitted(model, 9, callbacks=callbacks)
    assert len(history.history["loss"]) == 2  # it falls, and the largest was wanted
    for one, other in zip(model.get_weights(), kept[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_that_was_backed_up_continues(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del logs
            if epoch == 1:
                raise KeyboardInterrupt

    def backup() -> keras.callbacks.Callback:
        return keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    whole = pipelined()
    fitted(whole, 3)
    with pytest.raises(KeyboardInterrupt):
        fitted(pipelined(), 3, callbacks=[backup(), Stop()])
    continued = pipelined()
    assert len(fitted(continued, 3, callbacks=[backup()]).history["loss"]) == 1
    for one, other in zip(continued.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_single_batches_are_trained_tested_and_predicted() -> None:
    keras.utils.set_random_seed(1)
    plain = classifier()
    plain.compile(optimizer=keras.optimizers.Adam(0.01), loss=SPARSE, metrics=["accuracy"])
    model = pipelined()
    x = X.astype("float32")
    for rows in (slice(0, 10), slice(10, 17)):
        wanted = plain.train_on_batch(x[rows], CLASSES[rows], return_dict=True)
        assert model.train_on_batch(x[rows], CLASSES[rows], return_dict=True) == pytest.approx(
            wanted, rel=1e-5
        )
    assert model.test_on_batch(x, CLASSES) == pytest.approx(
        plain.test_on_batch(x, CLASSES), rel=1e-5
    )
    np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-5)


def test_variables_and_slots_lie_on_their_cells_devices() -> None:
    model = pipelined()
    before = model.model.get_weights()
    fitted(model, 1)
    (run,) = model._pipelines._with_losses.values()
    pipe = run.pipe
    cells = {path: pipe.executor.device_of(path) for path in pipe.by_path}
    assert len(set(cells.values())) == 2
    variables = model._pipelines.variables
    for path, variable in variables.items():
        assert variable.value is pipe.by_path[path]
        assert tf.DeviceSpec.from_string(variable.value.device).device_index == int(
            cells[path].rpartition(":")[2]
        )
    slots = [v for v in model.optimizer.variables if v.shape == (6, 16)]
    (first,) = (v for v in variables.values() if v.shape == (6, 16))
    assert {v.value.device for v in slots} == {first.value.device}
    after = model.model.get_weights()
    assert all(np.any(one != other) for one, other in zip(before, after, strict=True))


def test_weights_that_are_set_are_trained_on() -> None:
    model = pipelined()
    fitted(model, 1)
    zeros = [np.zeros_like(weight) for weight in model.get_weights()]
    model.set_weights(zeros)
    np.testing.assert_allclose(model.predict(X, verbose=0), 1 / 3, rtol=1e-6)
    model.fit(X, CLASSES, epochs=1, verbose=0)
    assert np.any(model.model.layers[-1].bias.numpy())


def test_compiling_again_keeps_the_weights() -> None:
    model = pipelined()
    fitted(model, 1)
    before = model.get_weights()
    model.model.layers[1].trainable = False
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    fitted(model, 1)
    after = model.get_weights()
    np.testing.assert_array_equal(before[0], after[0])
    assert np.any(before[2] != after[2])


def test_what_belongs_to_the_model_is_the_plain_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    model = pipelined()
    assert model.count_params() == model.model.count_params()
    assert [v.path for v in model.trainable_variables] == [
        v.path for v in model.model.trainable_variables
    ]
    model.summary()
    assert "Dense" in capsys.readouterr().out


def test_a_pipelined_model_can_be_differentiated() -> None:
    model = pipelined()
    x = tf.constant(X, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(model(x) ** 2)
    with tf.GradientTape() as plain_tape:
        plain_tape.watch(x)
        wanted = tf.reduce_sum(model.model(x) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, x), plain_tape.gradient(wanted, x), rtol=1e-4)


class Pairs(keras.losses.Loss):
    """Compares each example with the mean of the mini-batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        del y_true
        return keras.ops.mean((y_pred - keras.ops.mean(y_pred, 0)) ** 2, -1)


def test_a_loss_that_compares_examples_is_refused_before_the_first_update() -> None:
    model = PipelinedModel(classifier(), 2, 2)
    model.compile(loss=Pairs())
    before = model.get_weights()
    with pytest.raises(errors.LayerError, match=r"the loss 'pairs' of a mini-batch is not a sum"):
        fitted(model)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    whole = PipelinedModel(classifier(), 2, 1)
    whole.compile(loss=Pairs())
    fitted(whole)


def test_a_subclassed_model_without_a_graph_is_refused_by_the_first_mini_batch() -> None:
    class Mine(keras.Model):
        pass

    model = PipelinedModel(Mine())
    model.compile("sgd", "mse")
    with pytest.raises(errors.LayerError, match=r"the call of Mine cannot be called.*put the rest"):
        model.train_on_batch(X, X)


@pytest.mark.parametrize(
    "argument",
    [
        {"num_partitions": "2"},
        {"cuts": "2,2"},
        {"cuts": 4},
        {"devices": "CPU:0"},
        {"recompute": False},
    ],
)
def test_an_argument_of_another_type_is_refused_in_the_constructor(argument: Any) -> None:
    with pytest.raises(errors.ParamsError, match=f"'{next(iter(argument))}.* must be "):
        PipelinedModel(classifier(), **argument)


def test_replicas_divide_the_mini_batch() -> None:
    one, two = pipelined(), pipelined(2, 4, num_replicas=2)
    for model in (one, two):
        fitted(model)
    for weight, other in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-6)


def test_an_error_of_a_layer_names_layer_and_micro_batch() -> None:
    ids = keras.Input([3], dtype="int32")
    embedded = layers.Embedding(5, 4, name="words")(ids)
    model = PipelinedModel(keras.Model(ids, layers.Dense(2)(layers.Flatten()(embedded))), 2, 2)
    model.compile(loss="mse")
    x = np.ones([4, 3], "int32")
    x[3, 1] = 7
    with pytest.raises(errors.InputError, match=r"row 3.* 7.*words"):
        model.fit(x, np.zeros([4, 2]), verbose=0)


def test_half_precision_scales_the_loss() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        results = []
        for wrap in (lambda m: m, lambda m: PipelinedModel(m, 2, 2)):
            keras.utils.set_random_seed(1)
            model = wrap(classifier())
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss=SPARSE)
            fitted(model, 2)
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            results.append(model.get_weights())
    finally:
        keras.config.set_dtype_policy("float32")
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
