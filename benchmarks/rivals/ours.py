"""Our side: the reference, a step on K devices of one thread each, and a step beside plain Keras.

`python -m benchmarks.rivals.ours KIND,WHAT FILE` prints one JSON object. WHAT is reference, which
writes FILE; a recompute policy, for a step of 1F1B with the automatic cut; or keras, for steps of
the MLP with K=1, M=1, everything kept, turn by turn with those of a plain Keras model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.rivals.reference import MIB, Reference
from benchmarks.support import networks

KERAS_ROWS, KERAS_TURNS = 512, 40


def write_reference(kind: str, path: Path) -> None:
    """Write the first weights of the uncut network, its loss and its gradients."""
    from lingvo_gpipe import pipelining

    layers, batch = networks.blocks(kind)
    pipe = pipelining.PipeliningLayer.Params(layers=layers, recompute="never").instantiate()
    result = pipe.value_and_gradients(batch)
    Reference(
        loss=float(result.loss),
        batch={"x": batch["x"].numpy()},
        weights={path: weight.numpy() for path, weight in pipe.weights.items()},
        gradients={path: value.numpy() for path, value in result.gradients.items()},
    ).write(path)


def measure(kind: str, policy: str, path: Path) -> dict[str, Any]:
    """Return the seconds of a step, its peak of tensors, and how far its gradients are off."""
    from benchmarks.support import tensor_bytes
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(networks.K)
    placement.prepare_threads(networks.K, networks.K)
    reference = Reference.read(path)
    layers, batch = networks.blocks(kind)
    pipe = pipelining.PipeliningLayer.Params(
        layers=layers,
        num_partitions=networks.K,
        num_micro_batches=networks.M,
        schedule="1f1b",
        recompute=policy,
    ).instantiate()
    result = pipe.value_and_gradients(batch)
    gradients = {name: value.numpy() for name, value in result.gradients.items()}
    loss = float(result.loss)
    del result

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    return {
        "loss": loss,
        "error": reference.worst_error(gradients),
        "paths": list(gradients),
        "s": networks.step_s(step),
        "device_mib": tensor_bytes.peak(step) / networks.K / MIB,
    }


def measure_beside_keras() -> dict[str, float]:
    """Return seconds of a step of plain Keras, and how much longer ours takes, as a share."""
    import keras
    import tensorflow as tf

    from lingvo_gpipe import pipelining

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers, batch = networks.blocks("mlp")
    batch = {name: value[:KERAS_ROWS] for name, value in batch.items()}
    pipe = pipelining.PipeliningLayer.Params(layers=layers, recompute="never").instantiate()
    pipe.build(batch)
    model = keras.Sequential([keras.Input(batch["x"].shape[1:])])
    for weight in pipe.weights.values():
        dense = keras.layers.Dense(weight.shape[1], activation="gelu", use_bias=False)
        model.add(dense)
        dense.set_weights([weight.numpy()])

    @tf.function(autograph=False)
    def keras_step(x: tf.Tensor, target: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - target))
        return loss, tape.gradient(loss, [variable.value for variable in model.variables])

    times: dict[str, list[float]] = {"keras": [], "ours": []}
    for _ in range(KERAS_TURNS + 3):
        start = time.perf_counter()
        keras_loss = float(keras_step(batch["x"], batch["target"])[0])
        middle = time.perf_counter()
        our_loss = float(pipe.value_and_gradients(batch).loss)
        times["keras"].append(middle - start)
        times["ours"].append(time.perf_counter() - middle)
    if abs(our_loss / keras_loss - 1) > 1e-5:
        raise ValueError(f"the losses differ: ours is {our_loss}, that of Keras {keras_loss}")
    pairs = zip(times["ours"][3:], times["keras"][3:], strict=True)
    over = statistics.median(ours / theirs for ours, theirs in pairs) - 1
    return {"s": statistics.median(times["keras"][3:]), "over": over}


def main() -> None:
    """Do one of the three, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", help="KIND,WHAT")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, what = options.configuration.split(",")
    result: dict[str, Any] = {}
    if what == "reference":
        write_reference(kind, options.file)
    elif what == "keras":
        result = measure_beside_keras()
    else:
        result = measure(kind, what, options.file)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
