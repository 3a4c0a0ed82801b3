"""Optimizers as pure functions: bit-equal to Keras' own `apply`, slots known before they exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, optim
from lingvo_gpipe.layers import base
from lingvo_gpipe.optim import keras_rule

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"clipvalue": 0.5}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "beta_1": 0.8}),
    ("Adam", {"clipnorm": 0.5}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Nadam", {}),
    ("Ftrl", {"l1_regularization_strength": 0.01, "l2_shrinkage_regularization_strength": 0.1}),
    ("Lion", {}),
    ("Lamb", {}),
    ("Adafactor", {}),
    ("Muon", {}),
]
SHAPES = [(), (5,), (3, 4), (2, 2, 3, 4)]
BY_RANK = {"SGD", "Adafactor", "Muon"}  # the rules of the last two depend on the number of axes
# Keras' TensorFlow version reads its slot after it has written it; see the test of its values.
NOT_AS_APPLY = {"ScheduleFreeAdamW"}
WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer"}


def make(name: str, config: Mapping[str, Any] | None = None, **more: Any) -> optim.Optimizer:
    more = {"learning_rate": 0.1, **more}
    params = optim.Optimizer.Params(name=name, config=dict(config or {}), **more)
    made: optim.Optimizer = params.instantiate()
    return made


def spec(path: str, shape: tuple[int, ...], dtype: tf.DType = tf.float32, **more: Any) -> Any:
    return base.VariableSpec(path, shape, dtype, base.initializer("zeros"), **more)


def random(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.RandomState(seed).randn(*shape), np.float32)


def begin(own: optim.Optimizer, path: str, weight: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return the first values of a weight's slots."""
    slots = own.slots([spec(path, tuple(weight.shape), weight.dtype)])
    return {
        name: weight
        if slot.initial is None
        else tf.fill(slot.shape, tf.cast(slot.initial, slot.dtype))
        for (_, name), slot in slots.items()
    }


def test_every_keras_optimizer_is_a_case() -> None:
    known = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert known - {"Optimizer"} == {name for name, _ in CASES} | NOT_AS_APPLY | WRAPPERS


@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [
        (name, config, shape)
        for name, config in CASES
        for shape in SHAPES
        if shape in SHAPES[1:3] or name in BY_RANK
    ],
    ids=str,
)
def test_an_update_is_bit_equal_to_apply(
    name: str, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    own = make(name, config)
    variable = keras.Variable(random(shape, 0), name="kernel")
    theirs = getattr(keras.optimizers, name)(learning_rate=0.1, **config)
    theirs.build([variable])
    weight = tf.constant(random(shape, 0))
    slots = begin(own, "layer/kernel", weight)
    for number in range(4):
        gradient = tf.constant(random(shape, number + 1))
        step = tf.constant(number, tf.int64)
        weight, slots = own.rule.update(
            optim.RuleInputs("layer/kernel", weight, gradient, slots, own.rate(step), step)
        )
        theirs.apply([gradient], [variable])
        np.testing.assert_array_equal(weight, variable.numpy())
    kept = [v.numpy() for v in theirs.variables[2:]]
    assert len(kept) == len(slots)
    for mine, value in zip(slots.values(), kept, strict=True):
        np.testing.assert_array_equal(mine, value)


def test_schedule_free_adamw_follows_its_formula() -> None:
    own = make("ScheduleFreeAdamW", {"beta_1": 0.9, "beta_2": 0.5, "epsilon": 1e-8})
    weight = tf.constant(random((3, 4), 0), tf.float64)
    slots = begin(own, "w", weight)
    y = z = x = weight.numpy()
    v = np.zeros_like(y)
    for number in range(4):
        gradient = random((3, 4), number + 1).astype(np.float64)
        step = tf.constant(number, tf.int64)
        weight, slots = own.rule.update(
            optim.RuleInputs("w", weight, tf.constant(gradient), slots, own.rate(step), step)
        )
        t = number + 1
        v = 0.5 * v + 0.5 * gradient**2
        z = z - np.float64(np.float32(0.1)) * gradient / (np.sqrt(v / (1 - 0.5**t)) + 1e-8)
        x = (1 - 1 / t) * x + z / t
        y = 0.1 * z + 0.9 * x
        # Keras takes its constants by way of float32.
        np.testing.assert_allclose(weight, y, rtol=1e-6)


def test_a_program_is_pure() -> None:
    own = make("Nadam")
    weight = tf.constant(random((3, 4), 0))
    slots = begin(own, "w", weight)
    program = tf.function(
        lambda *values: own.rule.update(optim.RuleInputs("w", *values)), autograph=False
    ).get_concrete_function(weight, weight, slots, tf.constant(0.1), tf.constant(0, tf.int64))
    assert not [op.name for op in program.graph.get_operations() if op._is_stateful]
    assert not program.captured_inputs


def test_slot_names_are_stable_and_unique() -> None:
    names = {name: [s for _, s in make(name).slots([spec("w", (3, 4))])] for name, _ in CASES}
    assert names["Adam"] == ["momentums", "velocities"]
    assert names["Adafactor"] == ["r", "c", "v"]
    assert names["Nadam"] == ["momentums", "velocities", "u_product"]
    assert names["SGD"] == []


def test_slots_of_a_huge_weight_need_no_memory() -> None:
    told = make("Adam").slots([spec("table", (1 << 22, 1 << 20), tf.float32)])
    assert sum(slot.size_bytes for slot in told.values()) == 2 * 4 * (1 << 42)


def test_tied_frozen_and_state_variables_have_no_slots() -> None:
    specs = [
        spec("a", (2,), trainable=False),
        spec("b", (2,), is_state=True, trainable=False),
        spec("c", (2,), tie="d"),
        spec("d", (2,)),
    ]
    assert list(make("SGD", {"momentum": 0.5}).slots(specs)) == [("d", "momentums")]


def test_muon_leaves_embeddings_to_adam() -> None:
    told = make("Muon").slots([spec("embedding/table", (4, 4)), spec("dense/kernel", (4, 4))])
    assert [key for key in told if key[1] == "adam_velocities"] == [
        ("embedding/table", "adam_velocities")
    ]


def test_a_slot_that_begins_as_its_weight_says_so() -> None:
    told = make("ScheduleFreeAdamW").slots([spec("w", (3,))])
    assert told["w", "momentums"].initial is None
    assert told["w", "velocities"].initial == 0.0


def test_what_a_rule_found_about_slots_serves_equal_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"momentum": 0.375}
    first = make("SGD", config).slots([spec("a", (3, 5))])
    template = keras_rule._Template
    made: list[tuple[Any, ...]] = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return template(*arguments)

    monkeypatch.setattr(keras_rule, "_Template", counted)
    again = make("SGD", config).slots([spec("b", (3, 5))])
    assert again["b", "momentums"] == dataclasses.replace(first["a", "momentums"], path="b")
    assert not made
    assert make("SGD").slots([spec("b", (3, 5))]) == {}  # without momentum
    make("SGD", config).slots([spec("b", (5, 3))])
    assert (5, 3) in [shape for _, _, shape, _ in made]


class Drawn(keras.optimizers.SGD):
    """Has a slot that begins with random numbers."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.drawn = [
            self.add_variable(v.shape, name="drawn", initializer="normal") for v in variables
        ]


def test_a_slot_that_begins_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.optimizers, "Drawn", Drawn, raising=False)
    with pytest.raises(errors.ParamsError, match="Drawn: its slot 'drawn' begins neither with"):
        make("Drawn").slots([spec("w", (3,))])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("CosineDecay", {"initial_learning_rate": 0.5, "decay_steps": 10, "warmup_steps": 3}),
        ("PiecewiseConstantDecay", {"boundaries": [2, 5], "values": [0.3, 0.2, 0.1]}),
        ("ExponentialDecay", {"initial_learning_rate": 1.0, "decay_steps": 2, "decay_rate": 0.5}),
        ("PolynomialDecay", {"initial_learning_rate": 1.0, "decay_steps": 7}),
        ("InverseTimeDecay", {"initial_learning_rate": 1.0, "decay_steps": 2, "decay_rate": 0.5}),
        ("CosineDecayRestarts", {"initial_learning_rate": 1.0, "first_decay_steps": 3}),
    ],
)
def test_a_keras_learning_rate_is_that_of_keras_by_update_number(
    name: str, config: dict[str, Any]
) -> None:
    learning_rate = optim.KerasLearningRate.Params(name=name, config=config)
    own = make("SGD", learning_rate=learning_rate)
    theirs = getattr(keras.optimizers.schedules, name)(**config)
    rate = tf.function(own.rate, autograph=False)
    for step in range(9):
        expected = float(theirs(step))
        assert float(rate(tf.constant(step, tf.int64))) == pytest.approx(expected, rel=1e-6)
    assert rate.experimental_get_tracing_count() == 1


def test_the_first_group_that_matches_has_the_factor() -> None:
    own = make("SGD", groups=(("head/*", 10.0), ("*bias", 2.0)))
    paths = ["stem/kernel", "stem/bias", "head/bias"]
    assert own.factors(paths) == {"stem/kernel": 1.0, "stem/bias": 2.0, "head/bias": 10.0}
    with pytest.raises(errors.ParamsError, match=r"'head/\*' matches no weight; nearest 'heads/b"):
        own.factors(["heads/b", "stem/bias"])


class Halving(optim.Rule):
    """Halves the weight: a rule that does not come from Keras."""

    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> Any:
        del shape
        return (optim.SlotSpec(path, "count", (), dtype, 3.0),)

    def update(self, inputs: optim.RuleInputs) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return inputs.weight / 2, {"count": inputs.slots["count"] + 1}


def test_a_custom_rule_takes_the_place_of_keras() -> None:
    own = make("Adam", rule=Halving.Params())
    told = own.slots([spec("w", (3,))])
    assert list(told) == [("w", "count")]
    slots = {"count": tf.constant(3.0)}
    weight, slots = own.rule.update(
        optim.RuleInputs("w", tf.ones([3]), tf.ones([3]), slots, own.rate(0), 0)
    )
    assert (float(weight[0]), float(slots["count"])) == (0.5, 4.0)


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("Adamm", {}, "no Keras optimizer 'Adamm'; nearest 'Adam'"),
        ("qqq", {}, "no Keras optimizer 'qqq'; there are 'Adadelta', 'Adafactor'"),
        ("Adam", {"beta_3": 1}, r"Keras optimizer Adam\(beta_3=1, .*beta_3"),
        ("SGD", {"momentum": 3}, "momentum` must be a float"),
        ("Adam", {"learning_rate": 1.0}, "'learning_rate' cannot be used here; set the optim"),
        ("Adam", {"global_clipnorm": 1.0}, "set the update's field clip_norm"),
        ("Adam", {"use_ema": True}, "set the update's field average"),
        ("Adam", {"loss_scale_factor": 2.0}, "set the update's field loss_scale"),
        ("Adam", {"gradient_accumulation_steps": 2}, "set the field train.accumulate"),
        ("LossScaleOptimizer", {}, "wraps other optimizers .* loss_scale"),
        ("MultiOptimizer", {}, "wraps other optimizers .* groups"),
    ],
)
def test_a_wrong_optimizer_is_refused(name: str, config: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ParamsError, match=text):
        make(name, config)


def test_a_wrong_learning_rate_is_refused() -> None:
    learning_rate = optim.KerasLearningRate.Params(name="CosinDecay")
    with pytest.raises(errors.ParamsError, match="schedule 'CosinDecay'; nearest 'CosineDecay'"):
        make("SGD", learning_rate=learning_rate)
    with pytest.raises(errors.ParamsError, match="learning_rate"):
        optim.Optimizer.Params(name="SGD").instantiate()
    for rate in (float("nan"), float("inf")):
        with pytest.raises(errors.ParamsError, match=f"learning_rate={rate} is not a finite n"):
            make("SGD", learning_rate=rate)
