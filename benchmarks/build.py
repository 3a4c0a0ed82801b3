"""How long until the first step is done, updates included, and how does it grow with depth?

`python -m benchmarks.build [--quick]`: L layers of two weights, K partitions and M micro-batches,
each in a process of its own, with and without TensorFlow's graph optimizer (grappler's
meta-optimizer).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from benchmarks.support import machine, processes

SIZES = ((8, 4, 16), (32, 4, 16), (128, 4, 16), (128, 8, 32))
"""L, K, M."""
ROUNDS, QUICK_ROUNDS = 3, 1
WIDTH, ROWS = 32, 32
AIM_S = 7.0


def measure(size: tuple[int, ...], optimized: bool) -> dict[str, float]:
    """Return seconds until the first step of a net of a size (L, K, M) is done, by part."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    num_layers, num_partitions, num_micro_batches = size
    placement.prepare_logical_cpus(num_partitions)
    placement.prepare_threads(num_partitions, os.cpu_count() or 1)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not optimized})
    batch = {"x": tf.ones([ROWS, WIDTH]), "target": tf.zeros([ROWS, WIDTH])}
    hidden = [layers.Dense.Params(units=WIDTH, activation="tanh") for _ in range(num_layers)]
    start = time.perf_counter()
    pipe = pipelining.PipeliningLayer.Params(
        layers=[*hidden, layers.MeanSquaredError.Params()],
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
    ).instantiate()
    pipe.build(batch)
    updater = blocks.updater(pipe, clip_norm=1.0)
    built = time.perf_counter()

    @tf.function(autograph=False)
    def step(batch: Any, number: tf.Tensor) -> tf.Tensor:
        result = pipe.value_and_gradients(batch, step=number)
        updater.apply(result.gradients, step=number)
        return result.loss

    number = tf.constant(0, tf.int64)
    concrete = step.get_concrete_function(batch, number)
    traced = time.perf_counter()
    float(step(batch, number))
    first = time.perf_counter()
    float(step(batch, number))
    second = time.perf_counter()
    return {
        "build": built - start,
        "trace": traced - built,
        "first": first - traced,
        "total": first - start,
        "second": second - first,
        "nodes": len(concrete.graph.get_operations()),
    }


def main() -> None:
    """Measure every size in processes of their own, and print a table."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration:
        *wanted, optimized = map(int, options.configuration.split(","))
        print(json.dumps(measure(tuple(wanted), bool(optimized))))
        return
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(
        f"L layers of [{WIDTH}, {WIDTH}] and a bias, Adam, clipping; medians of {count} "
        "interleaved rounds, seconds"
    )
    names = [f"{size[0]},{size[1]},{size[2]},{optimized}" for size in SIZES for optimized in (1, 0)]
    found = processes.rounds("benchmarks.build", names, count)
    print(
        f"{'L':>4} {'K':>2} {'M':>3} {'build':>7} {'trace':>7} {'first':>7} {'total':>7}   without "
        "graph optimizer"
    )
    for size in SIZES:
        name = ",".join(map(str, size))
        runs = processes.quiet(found[f"{name},1"])
        plain = processes.median(processes.quiet(found[f"{name},0"]), "total")
        row = {part: processes.median(runs, part) for part in _PARTS}
        print(
            f"{size[0]:4d} {size[1]:2d} {size[2]:3d} {row['build']:7.2f} {row['trace']:7.2f} "
            f"{row['first']:7.2f} {row['total']:7.2f}   {plain:.2f}, so the optimizer's share is "
            f"{1 - plain / row['total']:.0%}; spread {processes.spread(runs, 'total')}; "
            f"{row['nodes']:.0f} nodes"
        )
    figure = f"{row['total']:.2f} s for L=128, K=8, M=32"
    processes.conclude("build", figure, f"at most {AIM_S:g} s", found)


_PARTS = ("build", "trace", "first", "total", "nodes")


if __name__ == "__main__":
    main()
