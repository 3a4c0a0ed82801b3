"""Packed variables change no result and no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

from lingvo_gpipe import errors, optim, packing
from lingvo_gpipe.execution import variables
from lingvo_gpipe.run import checkpoints, learner
from tests import sameness
from tests.networks import pipelines
from tests.tiny_task import Points, tiny_task

SHAPES = strategies.lists(
    strategies.lists(strategies.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6
)
DTYPES = strategies.sampled_from([tf.float32, tf.float64, tf.float16, tf.int64, tf.complex128])


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack variables on devices of this process, too."""
    monkeypatch.setattr(packing, "is_packed", lambda _: True)


def wanted(shape: tuple[int, ...], value: float = 0.0, **fields: Any) -> packing.Wanted:
    settings: dict[str, Any] = {"dtype": tf.float32, "device": "/device:CPU:1", "kind": "weights"}
    settings |= fields
    dtype = settings["dtype"]
    return packing.Wanted(
        shape, value=lambda: tf.fill(shape, tf.cast(tf.constant(value), dtype)), **settings
    )


def backing(found: Any) -> int:
    """Return of how many variables these are parts."""
    return len({packing.unit(variable) for variable in found})


@pytest.mark.usefixtures("packed")
@hypothesis.settings(max_examples=40, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(shapes=SHAPES, dtype=DTYPES, data=strategies.data())
def test_parts_are_read_and_assigned_like_variables(
    shapes: list[tuple[int, ...]], dtype: tf.DType, data: Any
) -> None:
    made = packing.create({n: wanted(s, n, dtype=dtype) for n, s in enumerate(shapes)})
    assert backing(made.values()) == 1
    values = {n: np.full(shape, n, dtype.as_numpy_dtype) for n, shape in enumerate(shapes)}
    for number in data.draw(strategies.permutations(range(len(shapes)))):
        size = values[number].size
        values[number] = np.arange(size).reshape(shapes[number]).astype(dtype.as_numpy_dtype)
        made[number].assign(values[number])
    together = packing.read(made)
    for number, value in values.items():
        part = made[number]
        assert (part.dtype, tuple(part.shape)) == (dtype, shapes[number])
        assert part.device.endswith("/device:CPU:1")
        for found in (part.numpy(), together[number].numpy(), np.asarray(part), tf.identity(part)):
            np.testing.assert_array_equal(found, value, strict=True)


@pytest.mark.usefixtures("packed")
def test_a_pack_has_one_device_dtype_kind_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_BYTES", 256)
    given = {
        "a": wanted((16,)),
        "device": wanted((4,), device="/device:CPU:2"),
        "b": wanted((33,)),  # rounded up to three rows of 64 bytes
        "kind": wanted((4,), kind="statistics"),
        "full": wanted((1,)),
        "dtype": wanted((4,), dtype=tf.float64),
        "large": wanted((80,)),
        "c": wanted(()),
        "trainable": wanted((4,), trainable=True),
        "d": wanted((5,)),
    }
    made = packing.create(given)
    assert list(made) == list(given)
    groups: dict[Any, list[str]] = {}
    for key, variable in made.items():
        groups.setdefault(packing.unit(variable), []).append(key)
    assert sorted(groups.values()) == [
        ["a", "b"], ["c", "d"], ["device"], ["dtype"], ["full"], ["kind"], ["large"], ["trainable"]
    ]  # fmt: skip
    parts = {key for key, variable in made.items() if isinstance(variable, packing.PackedVariable)}
    assert parts == {"a", "b", "c", "d"}


@pytest.mark.usefixtures("packed")
def test_values_of_other_shapes_are_refused() -> None:
    made = packing.create({"a": wanted((2, 3)), "b": wanted((3,))})
    with pytest.raises(ValueError, match="incompatible"):
        made["a"].assign(tf.zeros([3, 2]))


@pytest.mark.usefixtures("packed")
def test_copies_of_some_parts_are_exchanged_alone() -> None:
    made = packing.create({n: wanted((2, n + 1), n) for n in range(4)})
    some = {n: made[n] for n in (3, 1)}
    copies = packing.copies(some)
    assert backing(copies.values()) == 1
    packing.assign((made[n], tf.fill([2, n + 1], -1.0)) for n in made)
    tf.function(lambda: packing.exchange(copies, made))()
    assert [variable.numpy().max() for variable in made.values()] == [-1, 1, -1, 3]
    assert [variable.numpy().max() for variable in copies.values()] == [-1, -1]


def learned(**train: Any) -> learner.Learner:
    """Return a network of three cells with ties, statistics and slots after two updates."""
    params = tiny_task(
        optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.01),
        average=optim.Average.Params(decay=0.9),
        clip_norm=1.0,
        **train,
    )
    made = learner.Learner(params, Points.Params(batch_size=8).instantiate().element_spec())
    batch = {
        "point": tf.random.stateless_normal([8, 4], [1, 2]),
        "label": tf.range(8, dtype=tf.int32) % 3,
    }
    made.update([batch])
    made.update([batch, {**batch, "point": batch["point"] * 2}])
    made.update([{**batch, "point": batch["point"] * np.nan}])  # changes nothing
    return made


def values(of: Any) -> dict[str, Any]:
    return {key: variable.numpy() for key, variable in of.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key, strict=True)


def test_updates_and_checkpoints_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learned()
    monkeypatch.setattr(packing, "is_packed", lambda _: True)
    monkeypatch.setattr(packing, "MAX_BYTES", 256)  # several packs
    made = learned()
    assert len(made.variables) == len(plain.variables)
    assert backing(made.variables.values()) < len(made.variables)
    same(values(made.variables), values(plain.variables))
    with made.updater.averaged(), plain.updater.averaged():
        same(values(made.variables), values(plain.variables))
    expected = values(plain.variables)
    same(values(made.variables), expected)
    # Each is restored from the other's checkpoint.
    for number, (one, other) in enumerate(((made, plain), (plain, made))):
        folder = str(tmp_path / str(number))
        checkpoints.Checkpoints(folder, one.variables, "class: x\n").save(3)
        for variable in other.variables.values():
            variable.assign(tf.zeros_like(variable))
        assert checkpoints.restore(folder, other.variables, {})
        same(values(other.variables), expected)
        bias = {"head/bias": other.pipe.by_path["head/bias"]}
        bias["head/bias"].assign(tf.ones([3]))
        part = checkpoints.Part("variables/head/bias", (3,))
        assert checkpoints.restore_matching(bias, folder, {"head/bias": [part]}).restored
        same(values(other.variables), expected)
    made.reset_to_weights()
    plain.reset_to_weights()
    same(values(made.variables), values(plain.variables))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("net", ["tied", "conv"])
def test_the_gradients_are_those_of_the_plain_network(net: str) -> None:
    """The comparison of `sameness_test`, with ties and statistics."""
    sameness.check(sameness.Case(net, 3, 3, "1f1b", "losses inside", "full"))


def test_a_tape_that_watches_theta_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for is_packed in (True, False):
        monkeypatch.setattr(packing, "is_packed", lambda _, answer=is_packed: answer)
        pipe = pipelines.three()
        pipe.build(pipelines.batch())
        theta = pipe.theta()
        with tf.GradientTape() as tape:
            tape.watch(theta)
            outputs = pipe.fprop(theta, pipelines.batch(), pipe.context(training=True))
            loss = tf.reduce_sum(tf.square(outputs))
        found = variables.flatten(tape.gradient(loss, theta))
        gradients.append({path: value.numpy() for path, value in found.items()})
    same(*gradients)
    assert gradients[0]["d0/kernel"].any()


@pytest.mark.usefixtures("packed")
def test_a_tape_that_is_asked_for_packed_weights_is_refused() -> None:
    pipe = pipelines.three()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(pipe(pipelines.batch(), training=True))
    with pytest.raises(errors.DeviceError, match=r"^on workers, weights are packed"):
        tape.gradient(loss, pipe.weights)
