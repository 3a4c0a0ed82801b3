"""How long until the first step is done, updates included, and how does it grow with depth?

`python -m benchmarks.build`: L layers of two weights, K=4, M=16, each L in a process of its own,
with and without TensorFlow's graph optimizer (grappler's meta-optimizer).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

DEPTHS = (8, 32, 128)
ROUNDS = 3
K, M, WIDTH, ROWS = 4, 16, 32, 32


def measure(num_layers: int, optimized: bool) -> dict[str, float]:
    """Return seconds until the first step of an L-layer net is done, by part."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from benchmarks import blocks
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    placement.prepare_logical_cpus(K)
    placement.prepare_threads(K, os.cpu_count() or 1)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not optimized})
    batch = {"x": tf.ones([ROWS, WIDTH]), "target": tf.zeros([ROWS, WIDTH])}
    hidden = [layers.Dense.Params(units=WIDTH, activation="tanh") for _ in range(num_layers)]
    start = time.perf_counter()
    pipe = pipelining.PipeliningLayer.Params(
        layers=[*hidden, layers.MeanSquaredError.Params()],
        num_partitions=K,
        num_micro_batches=M,
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
    """Measure every depth in processes of their own, and print a table."""
    from benchmarks import machine

    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2] == "optimized")))
        return
    print(machine.describe())
    print(
        f"K={K}, M={M}, L layers of [{WIDTH}, {WIDTH}] and a bias, Adam, clipping; medians of "
        f"{ROUNDS} interleaved rounds, seconds"
    )
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    load = machine.Load()
    for _ in range(ROUNDS):
        for depth in DEPTHS:
            for kind in ("optimized", "plain"):
                command = [sys.executable, "-m", "benchmarks.build", str(depth), kind]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found.setdefault((depth, kind), []).append(json.loads(out.splitlines()[-1]))
    print(f"{'L':>4} {'build':>7} {'trace':>7} {'first':>7} {'total':>7}   without graph optimizer")
    for depth in DEPTHS:
        row = {part: _median(found[depth, "optimized"], part) for part in _PARTS}
        plain = _median(found[depth, "plain"], "total")
        spread = [run["total"] for run in found[depth, "optimized"]]
        print(
            f"{depth:4d} {row['build']:7.2f} {row['trace']:7.2f} {row['first']:7.2f} "
            f"{row['total']:7.2f}   {plain:.2f}, so the optimizer's share is "
            f"{1 - plain / row['total']:.0%}; spread {min(spread):.2f} to {max(spread):.2f}; "
            f"{row['nodes']:.0f} nodes"
        )
    ratio = _median(found[128, "optimized"], "total") / _median(found[32, "optimized"], "total")
    print(f"L=128 / L=32: {ratio:.2f}; other load {load.stop():.2f} cores")


_PARTS = ("build", "trace", "first", "total", "nodes")


def _median(runs: list[dict[str, float]], part: str) -> float:
    values = sorted(run[part] for run in runs)
    return values[len(values) // 2]


if __name__ == "__main__":
    main()
