"""RMSProp compared with that of TensorFlow 1, update by update."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import optim
from lingvo_gpipe.layers import base

PUBLISHED = {"decay": 0.9, "momentum": 0.9, "epsilon": 1.0}


def spec(shape: tuple[int, ...], dtype: tf.DType = tf.float32) -> base.VariableSpec:
    return base.VariableSpec("layer/kernel", shape, dtype, base.initializer("zeros"))


def begin(
    rule: optim.Rule, shape: tuple[int, ...], dtype: tf.DType = tf.float32
) -> dict[str, tf.Tensor]:
    return {
        slot.slot: tf.fill(slot.shape, tf.cast(slot.initial, slot.dtype))
        for slot in rule.slots("layer/kernel", shape, dtype)
    }


@pytest.mark.parametrize(
    "config", [PUBLISHED, {"decay": 0.5, "momentum": 0.0, "epsilon": 1e-10}], ids=str
)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)], ids=str)
def test_updates_are_those_of_tensorflow_1(
    config: dict[str, float], shape: tuple[int, ...]
) -> None:
    random = np.random.RandomState(0)
    start, *gradients = (np.asarray(random.randn(*shape), np.float32) for _ in range(6))
    rates = [0.1, 0.1, 0.05, 0.0, 0.2]

    expected = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=start, use_resource=True)
        rate = tf.compat.v1.placeholder(tf.float32, [])
        gradient = tf.compat.v1.placeholder(tf.float32, shape)
        theirs = tf.compat.v1.train.RMSPropOptimizer(rate, **config)
        apply = theirs.apply_gradients([(gradient, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        for g, r in zip(gradients, rates, strict=True):
            session.run(apply, {gradient: g, rate: r})
            expected.append(session.run(variable))

    rule = optim.RMSProp.Params(**config).instantiate()
    weight, slots = tf.constant(start), begin(rule, shape)
    program = tf.function(
        lambda *values: rule.update(optim.RuleInputs("layer/kernel", *values)), autograph=False
    )
    for step, (g, r) in enumerate(zip(gradients, rates, strict=True)):
        weight, slots = program(weight, tf.constant(g), slots, tf.constant(r), tf.constant(step))
        np.testing.assert_allclose(weight, expected[step], rtol=1e-6, atol=1e-7)


def test_one_update_gives_the_published_figure_and_not_that_of_keras() -> None:
    rule = optim.RMSProp.Params(**PUBLISHED).instantiate()
    keras_rule = optim.KerasRule.Params(
        name="RMSprop", config={"rho": 0.9, "momentum": 0.9, "epsilon": 1.0}
    ).instantiate()
    keras_slots = {
        slot.slot: tf.fill(slot.shape, slot.initial)
        for slot in keras_rule.slots("w", (), tf.float32)
    }
    numbers = tf.constant(1.0), tf.constant(2.0)
    found = [
        float(r.update(optim.RuleInputs("w", *numbers, s, tf.constant(0.1), zero))[0])
        for zero in [tf.constant(0, tf.int64)]
        for r, s in ((rule, begin(rule, ())), (keras_rule, keras_slots))
    ]
    assert [round(value, 4) for value in found] == [0.8681, 0.8310]


def test_slots_take_the_weights_dtype_and_there_is_one_without_momentum() -> None:
    own = optim.Optimizer.Params(
        rule=optim.RMSProp.Params(**PUBLISHED), learning_rate=0.1
    ).instantiate()
    told = own.slots([spec((3, 4), tf.float64)])
    assert [(slot.slot, slot.initial) for slot in told.values()] == [
        ("mean_square", 1.0),
        ("momentum", 0.0),
    ]
    assert sum(slot.size_bytes for slot in told.values()) == 2 * 8 * 12
    bare = optim.RMSProp.Params().instantiate()
    assert list(begin(bare, (2,))) == ["mean_square"]
    inputs = optim.RuleInputs(
        "layer/kernel",
        tf.ones([3, 4], tf.float64),
        tf.ones([3, 4], tf.float64),
        begin(own.rule, (3, 4), tf.float64),
        own.rate(tf.constant(0)),
        tf.constant(0),
    )
    weight, slots = own.rule.update(inputs)
    assert {weight.dtype, *(value.dtype for value in slots.values())} == {tf.float64}
