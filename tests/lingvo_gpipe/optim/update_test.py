"""The update of all weights: sums, order and guards over layers and devices."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, optim
from lingvo_gpipe.layers import base
from tests.networks import pipelines

# Two equal layers, one of another width; a gradient of each differs from every other.
SHAPES = {
    "one/kernel": (3, 4),
    "one/bias": (4,),
    "two/kernel": (3, 4),
    "two/bias": (4,),
    "head/kernel": (4, 2),
}
DEVICES = {"one": "CPU:0", "two": "CPU:1", "head": "CPU:2"}
GROUPS = {"kernel": "kernel", "bias": "bias"}


def layer_of(path: str) -> str:
    return path.split("/")[0]


def device_of(path: str) -> str:
    return DEVICES[layer_of(path)]


def random(path: str, seed: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    numbers = np.random.RandomState(seed + 1000 * list(SHAPES).index(path))
    return np.asarray(numbers.randn(*SHAPES[path]), dtype)


def gradients(seed: int, dtype: Any = np.float32) -> dict[str, tf.Tensor]:
    return {path: tf.constant(random(path, seed, dtype)) for path in SHAPES}


def variables(dtype: Any = np.float32) -> dict[str, tf.Variable]:
    made = {}
    for path in SHAPES:
        with tf.device(device_of(path)):
            made[path] = tf.Variable(random(path, 0, dtype))
    return made


def statistics() -> dict[str, tf.Variable]:
    with tf.device(DEVICES["two"]):
        return {"two/mean": tf.Variable([1.0, 2.0]), "two/count": tf.Variable(3, dtype=tf.int64)}


def make(
    weights: dict[str, tf.Variable],
    state: dict[str, tf.Variable] | None = None,
    name: str = "Adam",
    optimizer_more: dict[str, Any] | None = None,
    **more: Any,
) -> optim.Updater:
    specs = {
        path: base.VariableSpec(
            path,
            tuple(v.shape),
            v.dtype,
            base.initializer("zeros"),
            group=GROUPS[path.split("/")[1]],
        )
        for path, v in weights.items()
    }
    own = optim.Optimizer.Params(name=name, learning_rate=0.1, **(optimizer_more or {}))
    made: optim.Updater = optim.Updater.Params(optimizer=own, **more).instantiate(
        variables=weights, specs=specs, device_of=device_of, layer_of=layer_of, state=state
    )
    return made


def run(own: optim.Updater, *args: Any, step: int, **more: Any) -> dict[str, Any]:
    told = own.apply(*args, step=tf.constant(step, tf.int64), **more)
    return {name: value.numpy() for name, value in told.items()}


def snapshot(*groups: dict[Any, tf.Variable]) -> list[Any]:
    return [variable.numpy() for group in groups for variable in group.values()]


@pytest.mark.parametrize(
    ("name", "guard"), [("SGD", False), ("Adam", True), ("Nadam", False), ("Adafactor", True)]
)
def test_all_layers_are_updated_as_keras_updates_them(name: str, guard: bool) -> None:
    weights = variables()
    own = make(weights, name=name, finite_guard=guard)
    theirs = {path: keras.Variable(random(path, 0), name="kernel") for path in SHAPES}
    reference = getattr(keras.optimizers, name)(learning_rate=0.1)
    reference.build(list(theirs.values()))
    for step in range(3):
        given = gradients(step + 1)
        told = run(own, given, step=step)
        reference.apply(list(given.values()), list(theirs.values()))
        norm = np.sqrt(sum((g.numpy() ** 2).sum() for g in given.values()))
        assert told["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        assert told["finite"]
        assert told["learning_rate"] == np.float32(0.1)
    for path, variable in weights.items():
        np.testing.assert_allclose(variable, theirs[path].numpy(), rtol=1e-5, atol=1e-7)


def test_float64_weights_are_updated_in_float64() -> None:
    weights = variables(np.float64)
    own = make(weights, name="SGD", clip_norm=0.5, optimizer_more={"config": {"momentum": 0.5}})
    given = gradients(1, np.float64)
    told = run(own, given, step=0)
    norm = np.sqrt(sum((g.numpy() ** 2).sum() for g in given.values()))
    assert told["gradient_norm"].dtype == np.float64
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-14)
    assert told["learning_rate"] == np.float64(0.1)
    for path, variable in weights.items():
        expected = random(path, 0, np.float64) - 0.1 * given[path].numpy() * 0.5 / norm
        np.testing.assert_allclose(variable, expected, rtol=1e-13)


def test_equal_layers_share_one_trace() -> None:
    weights = variables()
    own = make(weights)
    step = tf.function(lambda g, n: own.apply(g, step=n), autograph=False)
    for number in range(3):
        step(gradients(number), tf.constant(number, tf.int64))
    assert step.experimental_get_tracing_count() == 1
    assert own.num_traces == 4  # norm and update, of two kinds of layer


def graph_of(own: optim.Updater) -> Any:
    function = tf.function(lambda g: own.apply(g, step=tf.constant(0, tf.int64)), autograph=False)
    return function.get_concrete_function(gradients(1)).graph


def test_programs_are_pure_and_stay_calls_on_their_devices() -> None:
    own = make(variables(), clip_norm=1.0, average=optim.Average.Params())
    graph = graph_of(own)
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 6
    assert {tf.DeviceSpec.from_string(op.device).device_index for op in calls} == {0, 1, 2}
    for name in {op.get_attr("f").name for op in calls}:
        function = graph._get_function(name)
        assert function.cached_definition.attr["_noinline"].b
        assert not [op.name for op in function.graph.get_operations() if op._is_stateful]


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ({"finite_guard": False}, False),
        ({"finite_guard": False, "weight_decay": optim.WeightDecay.Params(kernel=0.1)}, False),
        ({"finite_guard": True}, True),
        ({"finite_guard": False, "clip_norm": 1.0}, True),
    ],
)
def test_a_layer_waits_for_others_only_where_a_norm_is_requested(
    more: dict[str, Any], waits: bool
) -> None:
    own = make(variables(), **more)
    graph = graph_of(own)
    order = sorted(SHAPES)  # nests are flattened by sorted key
    inputs = {path: graph.inputs[n].op for n, path in enumerate(order)}
    assigns = [op for op in graph.get_operations() if op.type == "AssignVariableOp"]
    assert assigns
    touched = [{layer_of(p) for p in SHAPES if inputs[p] in pipelines.before(op)} for op in assigns]
    assert all(len(layers) == (3 if waits else 1) for layers in touched)


def test_a_devices_layers_are_updated_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(DEVICES, "two", DEVICES["one"])
    graph = graph_of(make(variables()))
    assigned: dict[Any, list[Any]] = {}
    for op in graph.get_operations():
        if op.type == "AssignVariableOp":
            call = op.inputs[1].op
            assigned.setdefault(call, []).append(op)
    by_device: dict[str, list[Any]] = {}
    for call in assigned:
        assert call.type == "PartitionedCall"
        by_device.setdefault(call.device, []).append(call)
    assert sorted(map(len, by_device.values())) == [1, 2]
    (pair,) = (calls for calls in by_device.values() if len(calls) == 2)
    assert set(assigned[pair[0]]) <= pipelines.before(pair[1])
    (alone,) = (calls[0] for calls in by_device.values() if len(calls) == 1)
    assert not pipelines.before(alone) & {op for call in pair for op in assigned[call]}


def test_slots_and_averages_lie_beside_their_weights() -> None:
    own = make(variables(), average=optim.Average.Params())
    for (path, _), slot in own.slots.items():
        assert slot.device.endswith(device_of(path))
    for path, average in own.averages.items():
        assert average.device.endswith(device_of(path))


def test_weight_decay_is_added_by_group_before_clipping() -> None:
    weights = variables()
    own = make(
        weights,
        name="SGD",
        clip_norm=0.7,
        weight_decay=optim.WeightDecay.Params(kernel=0.3, bias=0.05),
    )
    coefficient = {path: 0.05 if path.endswith("bias") else 0.3 for path in SHAPES}
    given = gradients(1)
    whole = {p: given[p].numpy() + coefficient[p] * random(p, 0) for p in SHAPES}
    norm = np.sqrt(sum((g**2).sum() for g in whole.values()))
    loss = sum(coefficient[p] * (random(p, 0) ** 2).sum() / 2 for p in SHAPES)
    told = run(own, given, step=0)
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    assert told["weight_decay_loss"] == pytest.approx(loss, rel=1e-6)
    for path, variable in weights.items():
        expected = random(path, 0) - 0.1 * whole[path] * 0.7 / norm
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-6)


def test_complex_weights_have_norms_decay_and_averages() -> None:
    start = np.array([1 + 1j, 2.0], np.complex64)
    with tf.device("CPU:0"):
        weights = {"one/kernel": tf.Variable(start)}
    decay = optim.WeightDecay.Params(kernel=0.3, bias=0.0)
    average = optim.Average.Params(decay=0.5, warmup=False)
    own = make(weights, name="SGD", clip_norm=1.0, weight_decay=decay, average=average)
    told = run(own, {"one/kernel": tf.constant([3 - 4j, 4 + 3j], tf.complex64)}, step=0)
    whole = np.array([3 - 4j, 4 + 3j]) + 0.3 * start
    norm = np.linalg.norm(whole)
    assert told["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    assert told["weight_decay_loss"] == pytest.approx(0.3 * 6.0 / 2, rel=1e-6)
    expected = start - 0.1 * whole / norm
    np.testing.assert_allclose(weights["one/kernel"], expected, rtol=1e-5)
    np.testing.assert_allclose(own.averages["one/kernel"], (start + expected) / 2, rtol=1e-5)


def test_a_small_gradient_is_not_clipped_at_all() -> None:
    clipped, plain = variables(), variables()
    run(make(clipped, clip_norm=1e3), gradients(1), step=0)
    run(make(plain), gradients(1), step=0)
    np.testing.assert_equal(snapshot(clipped), snapshot(plain))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_changes_nothing(bad: float) -> None:
    weights, state = variables(), statistics()
    own = make(weights, state, name="Nadam", clip_norm=1.0, average=optim.Average.Params(decay=0.5))
    run(own, gradients(1), {"two/mean": tf.constant([5.0, 6.0])}, step=0)
    before = snapshot(weights, state, own.slots, own.averages)
    given = gradients(2)
    given["two/bias"] = tf.constant([0.0, bad, 0.0, 0.0])
    told = run(own, given, {"two/mean": tf.constant([7.0, 8.0])}, step=1)
    assert not told["finite"]
    np.testing.assert_equal(snapshot(weights, state, own.slots, own.averages), before)
    told = run(own, gradients(3), {"two/mean": tf.constant([np.nan, 8.0])}, step=1)
    assert not told["finite"]
    np.testing.assert_equal(snapshot(weights, state, own.slots, own.averages), before)
    assert run(own, gradients(3), step=1)["finite"]


def test_without_the_guard_a_bad_gradient_goes_through_and_is_reported() -> None:
    weights = variables()
    own = make(weights, name="SGD", finite_guard=False)
    given = gradients(2)
    given["two/bias"] = tf.constant([0.0, np.nan, 0.0, 0.0])
    assert not run(own, given, step=0)["finite"]
    assert np.isnan(weights["two/bias"].numpy()[1])
    assert np.isfinite(weights["one/kernel"].numpy()).all()


def test_the_loss_scale_is_divided_out_once() -> None:
    scaled, plain = variables(), variables()
    more: dict[str, Any] = {
        "clip_norm": 1.0,
        "weight_decay": optim.WeightDecay.Params(kernel=0.1),
    }
    own = make(scaled, loss_scale=optim.LossScale.Params(initial=1024.0), **more)
    scale = own.loss_scale
    assert scale is not None
    given = gradients(1)
    told = run(own, {p: g * scale for p, g in given.items()}, step=0, loss_scale=scale)
    expected = run(make(plain, **more), given, step=0)
    assert told["gradient_norm"] == expected["gradient_norm"]
    assert told["weight_decay_loss"] == expected["weight_decay_loss"]
    np.testing.assert_equal(snapshot(scaled), snapshot(plain))


def test_a_dynamic_scale_falls_after_a_skip_and_rises_after_good_updates() -> None:
    own = make(variables(), loss_scale=optim.LossScale.Params(initial=8.0, growth_steps=3))
    bad = gradients(1) | {"one/bias": tf.fill([4], np.float32(np.inf))}
    told = []
    for given in [gradients(1), bad, gradients(1), gradients(2), gradients(3), gradients(4), bad]:
        found = run(own, given, step=0, loss_scale=own.loss_scale)
        told.append((float(found["loss_scale"]), int(found["skipped_updates"])))
    assert told == [(8, 0), (4, 1), (4, 1), (4, 1), (8, 1), (8, 1), (4, 2)]
    assert own.loss_scale is not None
    assert own.loss_scale.numpy() == 4.0


def test_a_scale_stays_between_one_and_its_limit() -> None:
    own = make(variables(), loss_scale=optim.LossScale.Params(initial=2.0**40, growth_steps=1))
    assert run(own, gradients(1), step=0, loss_scale=own.loss_scale)["loss_scale"] == 2.0**40
    own = make(variables(), loss_scale=optim.LossScale.Params(initial=1.0))
    bad = gradients(1) | {"one/bias": tf.fill([4], np.float32(np.nan))}
    assert run(own, bad, step=0, loss_scale=own.loss_scale)["loss_scale"] == 1.0


@pytest.mark.parametrize(("finite_guard", "skipped"), [(True, 1), (False, 0)])
def test_a_fixed_scale_stays(finite_guard: bool, skipped: int) -> None:
    """Without the guard no update is skipped."""
    scale = optim.LossScale.Params(initial=8.0, dynamic=False)
    own = make(variables(), loss_scale=scale, finite_guard=finite_guard)
    bad = gradients(1) | {"one/bias": tf.fill([4], np.float32(np.inf))}
    told = run(own, bad, step=0, loss_scale=own.loss_scale)
    assert (told["loss_scale"], told["skipped_updates"], told["finite"]) == (8.0, skipped, False)


@pytest.mark.parametrize("warmup", [False, True])
def test_averages_follow_weights_and_statistics(warmup: bool) -> None:
    weights, state = variables(), statistics()
    own = make(weights, state, name="SGD", average=optim.Average.Params(decay=0.9, warmup=warmup))
    expected = {path: v.numpy() for path, v in (weights | state).items()}
    for step in range(4):
        new = {
            "two/mean": tf.constant([step, -2.0 * step]),
            "two/count": tf.constant(step, tf.int64),
        }
        run(own, gradients(step), new, step=step)
        keep = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        for path, variable in (weights | state).items():
            old, now = expected[path], variable.numpy()
            expected[path] = now if path == "two/count" else keep * old + (1 - keep) * now
    for path, average in own.averages.items():
        np.testing.assert_allclose(average, expected[path], rtol=1e-5, atol=1e-6)
    assert own.averages["two/count"].numpy() == 3


def test_averaged_lends_the_averages_and_restores_the_weights() -> None:
    weights, state = variables(), statistics()
    own = make(weights, state, average=optim.Average.Params())
    run(own, gradients(1), {"two/mean": tf.constant([3.0, 4.0])}, step=0)
    present, averages = snapshot(weights, state), snapshot(own.averages)

    def evaluate() -> None:
        with own.averaged():
            np.testing.assert_equal(snapshot(weights, state), averages)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    np.testing.assert_equal(snapshot(weights, state), present)
    np.testing.assert_equal(snapshot(own.averages), averages)


def test_groups_have_rates_of_their_own() -> None:
    weights = variables()
    own = make(weights, name="SGD", optimizer_more={"groups": (("head/*", 10.0), ("*/bias", 0.0))})
    given = gradients(1)
    run(own, given, step=0)
    for path, variable in weights.items():
        factor = {"head/kernel": 1.0, "one/bias": 0.0, "two/bias": 0.0}.get(path, 0.1)
        expected = random(path, 0) - factor * given[path].numpy()
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_taken_whole() -> None:
    weights = variables()
    own = make(weights, name="SGD")
    given: dict[str, Any] = gradients(1)
    slices = tf.IndexedSlices(tf.ones([3, 4]), [0, 2, 0], tf.constant([3, 4]))
    run(own, given | {"one/kernel": slices}, step=0)
    expected = random("one/kernel", 0) - np.float32(0.1) * np.array([[2.0], [0.0], [1.0]])
    np.testing.assert_allclose(weights["one/kernel"], expected, rtol=1e-5, atol=1e-6)


def test_a_network_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(errors.ParamsError, match="nothing to train: every weight is frozen, or"):
        make({}, statistics())


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"clip_norm": 0.0}, r"clip_norm=0.0 must be above 0 and finite; None turns clipping off"),
        ({"clip_norm": float("nan")}, r"clip_norm=nan must be above 0 and finite; None turns"),
        (
            {"finite_guard": False, "loss_scale": optim.LossScale.Params()},
            "loss_scale.dynamic needs finite_guard",
        ),
    ],
)
def test_params_that_do_not_fit_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ParamsError, match=text):
        make(variables(), **more)
