"""A schedule is chosen, and what does not fit is said or changed, before the first update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining, schedule
from lingvo_gpipe.fitting import PipelinedModel, planning, variables
from tests.lingvo_gpipe.fitting.fit_cases import CLASSES, X

_WIDE = 512


def wide(depth: int = 6, norm: bool = False) -> keras.Model:
    """Return a model of 1 MiB weights for each of its layers."""
    x = inputs = keras.Input([6])
    for _ in range(depth):
        x = keras.layers.Dense(_WIDE, activation="tanh")(x)
    if norm:
        x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))


def fitted(model: keras.Model, optimizer: str = "adam", **settings: Any) -> PipelinedModel:
    """Return the model after an update on large mini-batches."""
    pipelined = PipelinedModel(model, **settings)
    pipelined.compile(optimizer, "sparse_categorical_crossentropy")
    rows = np.arange(2048) % len(X)
    pipelined.fit(X[rows], CLASSES[rows], batch_size=2048, epochs=1, verbose=0)
    return pipelined


@pytest.mark.parametrize("predicts_first", [False, True])
def test_auto_chooses_when_training_begins(predicts_first: bool) -> None:
    keras.utils.set_random_seed(1)
    model = wide()
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    pipelined = PipelinedModel(model, 2, 8, schedule="auto")
    if predicts_first:
        predicted, wanted = (each.predict(X, verbose=0) for each in (pipelined, twin))
        np.testing.assert_allclose(predicted, wanted, rtol=1e-5)
    for each in (pipelined, twin):
        each.compile("sgd", "sparse_categorical_crossentropy")
        each.fit(X, CLASSES, batch_size=len(X), epochs=2, verbose=0, shuffle=False)
    assert pipelined.settings["schedule"] not in ("auto", "gpipe", "1f1b")  # more waiting
    assert pipelined.settings["recompute"] == "never"
    for wanted, got in zip(twin.get_weights(), pipelined.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_step_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(errors.PartitionError) as caught:
        fitted(wide(), num_partitions=1, recompute="never", device_memory="40MiB")
    assert "more than the 40.0 MiB of a device" in str(caught.value)
    assert "It fits with num_micro_batches=4, which adapt_to_memory=True sets" in str(caught.value)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_step_that_does_not_fit_is_divided_until_it_does(partitions: int) -> None:
    with pytest.warns(UserWarning, match="so that a step fits in 30.0 MiB"):
        model = fitted(
            wide(),
            num_partitions=partitions,
            recompute="never",
            device_memory="30MiB",
            adapt_to_memory=True,
        )
    assert model.settings["num_micro_batches"] > 1


@pytest.mark.parametrize(("limit_mib", "cuts"), [(60, (10, 8)), (40, (7, 11))])
def test_cells_are_cut_within_the_memory_of_a_gpu_that_nobody_stated(
    monkeypatch: pytest.MonkeyPatch, limit_mib: int, cuts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(planning, "_limit_bytes", lambda _: limit_mib * 2**20)
    inputs = keras.Input([4])
    x = keras.layers.RepeatVector(2**15)(keras.layers.Dense(4)(inputs))
    for _ in range(8):  # much memory, few FLOPs
        x = keras.layers.Activation("tanh")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    for _ in range(6):
        x = keras.layers.Dense(256)(x)
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
    pipelined = PipelinedModel(model, 2, 2, recompute="never")
    pipelined.compile("sgd", "sparse_categorical_crossentropy")
    pipelined.train_on_batch(X[:12, :4], CLASSES[:12])
    assert pipelined.settings["cuts"] == cuts
    assert pipelined.settings["device_memory"] is None


@pytest.mark.parametrize(("optimizer", "memory"), [("sgd", "20MiB"), ("adam", "24MiB")])
def test_what_the_optimizer_keeps_decides_what_fits(optimizer: str, memory: str) -> None:
    settings = {"num_partitions": 3, "num_micro_batches": 64, "device_memory": memory}
    assert fitted(wide(), optimizer, **settings).settings["device_memory"] == memory


def test_a_schedule_of_two_micro_batches_has_no_more() -> None:
    text = schedule.make("1f1b", 2, 2).to_text()
    with pytest.raises(
        errors.PartitionError, match=r"a step needs about .*, more than the 5\.00 MiB"
    ):
        fitted(wide(), num_partitions=2, num_micro_batches=2, schedule=text, device_memory="5MiB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_partitions": 0}, r"^num_partitions=0, but it must be at least 1$"),
        (
            {"num_partitions": 2, "cuts": (1, 1)},
            r"^cuts=\[1, 1\] sums to 2, but there are 7 layers",
        ),
        ({"num_partitions": 2, "num_replicas": 2}, "^num_replicas=2, but a mini-batch has 1 micro"),
    ],
)
def test_other_mistakes_are_not_those_of_the_memory(settings: Any, message: str) -> None:
    with pytest.raises(errors.PartitionError, match=message):
        fitted(wide(), device_memory="8GiB", **settings)


def test_cuts_that_do_not_fit_are_said_to_be_too_many() -> None:
    with pytest.raises(errors.PartitionError, match=r"It fits with cuts=None$"):
        fitted(wide(), num_partitions=2, num_micro_batches=64, cuts=(1, 6), device_memory="24MiB")


def test_a_replicated_model_predicts_one_example_first() -> None:
    plain = wide(2)
    expected = plain.predict(X[:1], verbose=0)
    model = PipelinedModel(plain, 2, 4, num_replicas=2)
    np.testing.assert_allclose(model.predict(X[:1], verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(model.predict(X[:5], verbose=0)[:1], expected, rtol=1e-5)


def test_more_partitions_are_named_where_nothing_else_helps() -> None:
    with pytest.raises(errors.PartitionError, match=r"It fits with num_partitions=[2-7]"):
        fitted(wide(), num_partitions=1, device_memory="15MiB", adapt_to_memory=True)


def test_what_keeps_the_number_of_micro_batches_is_named_where_nothing_helps() -> None:
    with pytest.raises(
        errors.PartitionError, match=r"not tried.*: batch_normal.* takes statistics"
    ):
        fitted(wide(norm=True), num_partitions=1, device_memory="2MiB")


def test_a_batch_norm_keeps_its_micro_batches() -> None:
    with pytest.warns(UserWarning, match="recompute='except_last', so that a step fits"):
        model = fitted(
            wide(norm=True),
            num_partitions=2,
            num_micro_batches=4,
            schedule="gpipe",
            recompute="never",
            device_memory="24MiB",
            adapt_to_memory=True,
        )
    assert model.settings["num_micro_batches"] == 4


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: keras.optimizers.SGD(), 0),
        (lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True), 2),
        (lambda: keras.optimizers.Adam(clipnorm=1.0, gradient_accumulation_steps=2), 3),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
    ],
)
def test_slots_are_counted_without_being_made(
    make: Callable[[], keras.optimizers.Optimizer], slots: int
) -> None:
    optimizer = make()
    model = wide(depth=1)
    sizes = planning.slot_bytes(optimizer, variables.trained({d.name: d for d in model.layers[1:]}))
    weights = [4 * int(np.prod(w.shape)) for w in model.trainable_variables]
    assert list(sizes.values()) == [slots * size for size in weights]
    assert not optimizer.built


def test_a_model_is_called_first_in_a_function_of_the_users_own() -> None:
    model = wide()
    pipelined = PipelinedModel(model, 2, 4)
    called = tf.function(lambda x: pipelined(x, training=False))(tf.constant(X, tf.float32))
    np.testing.assert_allclose(called, model(X), rtol=1e-5)
    pipelined.compile("adam", "sparse_categorical_crossentropy")
    pipelined.fit(X, CLASSES, batch_size=len(X), verbose=0)


def test_a_loss_that_compares_examples_keeps_one_micro_batch() -> None:
    def contrast(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(predictions[:, 0]) ** 2 + 0.0 * tf.cast(labels, tf.float32)

    pipelined = PipelinedModel(wide(), 1, device_memory="30MiB", adapt_to_memory=True)
    pipelined.compile("adam", contrast)
    rows = np.arange(2048) % len(X)
    with pytest.raises(errors.PartitionError, match=r"not tried.*: a loss of compile is not a sum"):
        pipelined.train_on_batch(X[rows], CLASSES[rows])


def test_a_mini_batch_that_is_divided_to_fit_trains_as_the_whole_one() -> None:
    keras.utils.set_random_seed(1)
    model = wide()
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    weights = np.linspace(0.5, 2.0, 2048)
    rows = np.arange(2048) % len(X)
    pipelined = PipelinedModel(model, 1, device_memory="30MiB", adapt_to_memory=True)
    for each in (pipelined, twin):
        each.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(UserWarning, match="so that a step fits"):
        pipelined.train_on_batch(X[rows], CLASSES[rows], sample_weight=weights)
    twin.train_on_batch(X[rows], CLASSES[rows], sample_weight=weights)
    assert pipelined.settings["num_micro_batches"] > 1
    for wanted, got in zip(twin.get_weights(), pipelined.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_sizes_that_a_model_leaves_open_are_those_of_the_mini_batch() -> None:
    ids = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(9, 8)(ids)
    model = keras.Model(ids, keras.layers.Dense(9)(keras.layers.Dense(8, "tanh")(x)))
    pipelined = PipelinedModel(model, 2, 2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipelined.compile("adam", loss, weighted_metrics=["accuracy"])
    for length in (4, 7):
        tokens = np.arange(6 * length).reshape(6, length) % 9
        pipelined.train_on_batch(tokens, tokens, sample_weight=np.ones([6, length]))


def test_memory_is_known_of_each_device_of_tensorflow() -> None:
    names = [device.name for device in tf.config.list_logical_devices()]
    memory = planning.memory_bytes()
    assert [name.rpartition("task:0")[2] for name in memory] == [
        name.rpartition("task:0")[2] for name in names
    ]
    assert min(memory.values()) >= 2**20


def test_a_gpu_keeps_some_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs the smaller counts; the CPU does not."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["GPU"])
    sizes = {"/device:CPU:0": 1, "/device:GPU:0": 1000, "/device:GPU:1": 2000}
    monkeypatch.setattr(planning, "memory_bytes", lambda: sizes)
    params = pipelining.PipeliningLayer.Params(layers=[])
    assert planning._limit_bytes(params) == 850
    assert planning._limit_bytes(params.set(placement="cpu")) is None
    assert planning._limit_bytes(params.set(device_memory="1KiB")) == 1024


def test_replicas_divide_the_gpus_if_no_number_of_partitions_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: ["GPU"] * 4 if kind == "GPU" else found(kind),
    )
    pipelined = PipelinedModel(wide(), num_micro_batches=2, num_replicas=2, placement="cpu")
    pipelined.predict(X, verbose=0)
    assert pipelined.settings["num_partitions"] == 2
