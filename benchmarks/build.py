"""How long until the first step is done, update included, and how does it grow with the network?

`python -m benchmarks.build [--quick]`: L layers of two weights, K partitions, M micro-batches, Adam
and clipping; each in a process of its own, from Params to the end of the first update, without the
import of TensorFlow. "Trainer" is an update of the trainer. "Function" is a `tf.function` of a
custom training loop, whose calls TensorFlow's graph optimizer visits one by one.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.support import processes

SIZES = {  # L, K, M → ways
    (8, 4, 16): ("trainer", "function"),
    (32, 4, 16): ("trainer", "function"),
    (128, 4, 16): ("trainer", "function"),
    (128, 8, 32): ("trainer", "function"),
    (8, 2, 128): ("trainer",),
    (8, 2, 512): ("trainer",),
}
WIDTH = 32


def measure(configuration: str) -> dict[str, float]:
    """Return seconds until the first update of `L,K,M,WAY` is done."""
    *size, way = configuration.split(",")
    num_layers, num_partitions, num_micro_batches = map(int, size)
    import tensorflow as tf

    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(num_partitions)
    placement.prepare_threads(num_partitions, os.cpu_count() or 1)
    shape = [max(32, 8 * num_micro_batches), WIDTH]
    batch = {"x": tf.ones(shape), "target": tf.zeros(shape)}
    hidden = [layers.Dense.Params(units=WIDTH, activation="tanh") for _ in range(num_layers)]
    model = pipelining.PipeliningLayer.Params(
        layers=[*hidden, layers.MeanSquaredError.Params()],
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
    )
    start = time.perf_counter()
    if way == "function":
        function(model, batch)
    else:
        trainer(model, batch)
    return {"s": time.perf_counter() - start}


def trainer(model: Any, batch: dict[str, Any]) -> None:
    """Make the trainer's first update."""
    from benchmarks.support import networks

    float(networks.learner_of(model, batch, clip_norm=1.0).update([batch]).loss)


def function(model: Any, batch: dict[str, Any]) -> None:
    """Make the first update of gradients and update in one `tf.function`."""
    import tensorflow as tf

    from lingvo_gpipe import optim

    pipe = model.instantiate()
    pipe.build(batch)
    updater = optim.Updater.Params(
        optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.001), clip_norm=1.0
    ).instantiate(
        variables=pipe.weights,
        specs=pipe.analysis.variables,
        device_of=pipe.executor.device_of,
        layer_of=pipe.analysis.layer_of,
    )

    @tf.function(autograph=False)
    def step(batch: dict[str, tf.Tensor], number: tf.Tensor) -> tf.Tensor:
        result = pipe.value_and_gradients(batch, step=number)
        updater.apply(result.gradients, step=number)
        return result.loss

    float(step(batch, tf.constant(0, tf.int64)))


def main() -> None:
    """Measure every size and print a table."""
    options = processes.rounds_parser(__doc__).parse_args()
    names = [",".join(map(str, (*size, way))) for size, ways in SIZES.items() for way in ways]
    runs = processes.measured(options, "benchmarks.build", names, measure)
    print(f"{'L':>4} {'K':>2} {'M':>5} {'way':<9} {'s':>6}")
    for name in names:
        L, K, M, way = name.split(",")
        print(
            f"{L:>4} {K:>2} {M:>5} {way:<9} {processes.median(runs[name], 's'):6.2f}  "
            f"{processes.spread(runs[name], 's')}"
        )


if __name__ == "__main__":
    main()
