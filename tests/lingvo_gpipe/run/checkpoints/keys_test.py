"""Keys of checkpoints: they may not change, because old checkpoints are restored by them."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import optim
from lingvo_gpipe.layers import base
from lingvo_gpipe.run.checkpoints import keys


def test_keys_of_training_are_paths_of_variables_slots_and_averages() -> None:
    weight = base.VariableSpec("one/kernel", (3, 4), tf.float32, base.initializer("zeros"))
    variables = {"one/kernel": tf.Variable(tf.ones([3, 4])), "one/mean": tf.Variable([1.0])}
    updater: optim.Updater = optim.Updater.Params(
        optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.1),
        average=optim.Average.Params(),
        loss_scale=optim.LossScale.Params(),
    ).instantiate(
        variables={"one/kernel": variables["one/kernel"]},
        specs={"one/kernel": weight},
        device_of={"one/kernel": "CPU:0", "one/mean": "CPU:0"}.__getitem__,
        layer_of=lambda path: path.split("/")[0],
        state={"one/mean": variables["one/mean"]},
    )
    assert set(keys.of_training(variables, updater)) == {
        "variables/one/kernel",
        "variables/one/mean",
        "slots/one/kernel/momentums",
        "slots/one/kernel/velocities",
        "average/one/kernel",
        "average/one/mean",
        "loss_scale/scale",
        "loss_scale/good_steps",
        "loss_scale/skipped",
    }
    assert (keys.STEP, keys.POSITION, keys.THREADS) == ("step", "input/position", "threads")
    assert keys.EVALUATED == "eval/step"
    assert (keys.BEST_VALUE, keys.BEST_MISSES) == ("best/value", "best/misses")
