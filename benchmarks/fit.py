"""What does `fit` of a pipelined Keras model cost beside plain `fit`, and until its first step?

`python -m benchmarks.fit [--quick]` measures on two cores:

- an epoch of eight dense layers (six mini-batches of 2,048 examples, SGD): plain `fit`, `fit` with
  K=1 and M=1, `fit` with K=2 and M=32 on two devices and on one, and the same steps in a loop of
  `value_and_gradients`;
- the first step of Transformers with K=4 and M=4, from the plain model to the end of one
  `train_on_batch`, and the same of plain Keras;
- a step of GPT-2 with 124M weights and sequences of 64, for micro-batches of several sizes: each of
  them adds the gradients of all weights;
- time and memory of a step with `accuracy` whose logits are [16, 1024, 50304], K=2 and M=16.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from benchmarks.support import networks, processes

EPOCHS = ("plain", "fit 1 1", "fit 2 32", "fit 2 32 on one device", "loop 2 32")
FIRST = ((12, 768), (24, 128), (48, 128))  # layers, units
STEPS = (  # rows of 64 ids, K, M, policy; K=0 is plain Keras
    "4,0,0,",
    "4,1,1,never",
    "4,1,4,never",
    "4,2,4,never",
    "4,2,4,full",
    "16,0,0,",
    "16,1,4,never",
    "16,2,4,never",
)
LOGITS = (16, 1024, 50_304)
ROWS, BATCHES, LENGTH = 2048, 6, 64


def measure(configuration: str) -> dict[str, float]:
    """Return the seconds of `epoch,WAY`, `first,LAYERS,UNITS,WAY` or `step,ROWS,K,M,POLICY`.

    And seconds and GiB of `logits,WAY`.
    """
    kind, *arguments = configuration.split(",")
    if kind == "epoch":
        return {"s": _epoch_s(arguments[0])}
    if kind == "first":
        layers, units, way = arguments
        return {"s": _first_s(int(layers), int(units), way)}
    if kind == "logits":
        return {"s": _logits_s(arguments[0]), "GiB": _peak_gib()}
    rows, partitions, micro_batches, policy = arguments
    return {"s": _step_s(int(rows), int(partitions), int(micro_batches), policy)}


def _epoch_s(way: str) -> float:
    """Return the median seconds of an epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import lingvo_gpipe as lg

    kind, *sizes = way.split(" ")[:3]
    is_one = way.endswith("one device")
    partitions, micro_batches = map(int, sizes or (1, 1))
    lg.prepare_logical_cpus(partitions)
    tf.config.threading.set_inter_op_parallelism_threads(1 if is_one else 2)
    tf.config.threading.set_intra_op_parallelism_threads(1 if partitions > 1 else 2)
    random = np.random.default_rng(1)
    features = random.random((ROWS * BATCHES, 512), np.float32)
    labels = random.integers(0, 10, len(features))
    x = inputs = keras.Input([512])
    for _ in range(8):
        x = keras.layers.Dense(1024, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    settings: dict[str, Any] = {
        "num_partitions": partitions,
        "num_micro_batches": micro_batches,
        "schedule": "1f1b",
        "devices": [f"/device:CPU:{0 if is_one else n}" for n in range(partitions)],
    }
    if kind == "loop":
        step = _loss_and_gradients(model, settings)
        batches = tf.data.Dataset.from_tensor_slices((features, labels)).batch(ROWS)
        return networks.step_s(lambda: [step(*batch) for batch in batches], count=3)
    if kind == "fit":
        model = lg.PipelinedModel(model, **settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return networks.step_s(
        lambda: model.fit(features, labels, ROWS, verbose=0, shuffle=False), count=3
    )


def _loss_and_gradients(model: Any, settings: dict[str, Any]) -> Callable[[Any, Any], float]:
    """Return a function of a mini-batch that computes its gradients, and returns its loss."""
    import lingvo_gpipe as lg

    network = lg.keras_layers.from_keras_model(model)
    loss = lg.layers.Loss.Params(
        loss="SparseCategoricalCrossentropy",
        config={"from_logits": True},
        reads=(network.outputs, "label"),
    )
    pipe = lg.PipeliningLayer.Params(
        layers=[*network.layers, loss], inputs=network.inputs, **settings
    ).instantiate()
    return lambda x, y: float(pipe.value_and_gradients({network.inputs: x, "label": y}).loss)


def _gpt2(layers: int, units: int, rows: int) -> tuple[Any, dict[str, Any], Any]:
    """Return a plain GPT-2, and inputs and labels of a mini-batch."""
    import tensorflow as tf

    from benchmarks.accelerator import gpt2, speed

    model = speed.keras_model(gpt2.Gpt2(layers, units, heads=units // 64, length=LENGTH))
    target, position, label = (
        tf.random.stateless_uniform([rows, LENGTH], [seed, 1], 0, LENGTH, tf.int32)
        for seed in range(3)
    )
    return model, {"target": target, "position": position}, label


def _compiled(model: Any, settings: dict[str, Any]) -> Any:
    """Return a model that can be trained; in a pipeline if there are settings."""
    import keras

    import lingvo_gpipe as lg

    if settings:
        model = lg.PipelinedModel(model, **settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def _first_s(layers: int, units: int, way: str) -> float:
    """Return the seconds until the first step has ended."""
    import lingvo_gpipe as lg

    lg.prepare_logical_cpus(1 if way == "plain" else 4)
    plain, inputs, label = _gpt2(layers, units, rows=4)
    settings = {} if way == "plain" else {"num_partitions": 4, "num_micro_batches": 4}
    begun_s = time.perf_counter()
    float(_compiled(plain, settings).train_on_batch(inputs, label))
    return time.perf_counter() - begun_s


def _step_s(rows: int, partitions: int, micro_batches: int, policy: str) -> float:
    """Return the median seconds of a step of GPT-2; no partitions: of plain Keras."""
    import lingvo_gpipe as lg

    lg.prepare_logical_cpus(max(partitions, 1))
    plain, inputs, label = _gpt2(12, 768, rows)
    settings = {
        "num_partitions": partitions,
        "num_micro_batches": micro_batches,
        "recompute": policy,
    }
    model = _compiled(plain, settings if partitions else {})
    return networks.step_s(lambda: float(model.train_on_batch(inputs, label)), count=3)


def _logits_s(way: str) -> float:
    """Return the seconds of the second step of a model with large outputs."""
    import keras
    import tensorflow as tf

    import lingvo_gpipe as lg

    rows, length, vocabulary = LOGITS
    ids = keras.Input([length], dtype="int32")
    embedded = keras.layers.Embedding(vocabulary, 8)(ids)
    model = keras.Model(ids, keras.layers.Dense(vocabulary)(embedded))
    if way == "pipelined":
        model = lg.PipelinedModel(model, num_partitions=2, num_micro_batches=rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
    x = tf.random.stateless_uniform([rows, length], [1, 2], 0, vocabulary, tf.int32)
    model.train_on_batch(x, x)
    begun_s = time.perf_counter()
    model.train_on_batch(x, x)
    return time.perf_counter() - begun_s


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Measure all and print a table."""
    options = processes.rounds_parser(__doc__).parse_args()
    names = [f"epoch,{way}" for way in EPOCHS]
    names += [
        f"first,{size[0]},{size[1]},{way}" for size in FIRST for way in ("plain", "pipelined")
    ]
    names += [f"step,{step}" for step in STEPS]
    names += ["logits,plain", "logits,pipelined"]
    runs = processes.measured(options, "benchmarks.fit", names, measure)
    print(f"{'what':<32} {'s':>7}")
    for name in names:
        of_name = runs[name]
        print(f"{name:<32} {processes.median(of_name, 's'):7.3f}  {processes.spread(of_name, 's')}")
        if "GiB" in of_name[0]:
            print(f"{'':<32} {processes.median(of_name, 'GiB'):7.3f} GiB")


if __name__ == "__main__":
    main()
