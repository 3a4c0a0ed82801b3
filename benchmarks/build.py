"""How long until the first step is done, update included, and how does it grow with depth?

`python -m benchmarks.build [--quick]`: L layers of two weights, K partitions and M micro-batches,
each in a process of its own: an update as the trainer runs it (from Params to the end of the first
one, without the import of TensorFlow); the same in a `tf.function` of a custom training loop,
whose graph TensorFlow's graph optimizer (grappler's meta-optimizer) visits, call by call; and that
without the graph optimizer.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from benchmarks.support import machine, processes

SIZES = ((8, 4, 16), (32, 4, 16), (128, 4, 16), (128, 8, 32))
"""L, K, M."""
WAYS = ("trainer", "function", "unoptimized")
ROUNDS, QUICK_ROUNDS = 3, 1
WIDTH, ROWS = 32, 32
AIM_S = 7.0


def measure(way: str, size: tuple[int, ...]) -> dict[str, float]:
    """Return seconds until the first step of a net of a size (L, K, M) is done, by part."""
    import tensorflow as tf

    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    num_layers, num_partitions, num_micro_batches = size
    placement.prepare_logical_cpus(num_partitions)
    placement.prepare_threads(num_partitions, os.cpu_count() or 1)
    batch = {"x": tf.ones([ROWS, WIDTH]), "target": tf.zeros([ROWS, WIDTH])}
    hidden = [layers.Dense.Params(units=WIDTH, activation="tanh") for _ in range(num_layers)]
    model = pipelining.PipeliningLayer.Params(
        layers=[*hidden, layers.MeanSquaredError.Params()],
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
    )
    if way == "trainer":
        return trainer(model, batch)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": way == "unoptimized"})
    return function(model, batch)


def trainer(model: Any, batch: Any) -> dict[str, float]:
    """Return seconds of the trainer's update."""
    import tensorflow as tf

    from lingvo_gpipe import input as inputs
    from lingvo_gpipe import optim, task
    from lingvo_gpipe.run import learner

    adam = optim.Optimizer.Params(name="Adam", learning_rate=0.001)
    start = time.perf_counter()
    params = task.Task.Params(
        model=model,
        input=inputs.InMemory.Params(batch_size=ROWS),  # not read
        train=task.Train(optimizer=adam, clip_norm=1.0, max_steps=1),
    )
    learned = learner.Learner(params, tf.nest.map_structure(tf.TensorSpec.from_tensor, batch))
    built = time.perf_counter()
    float(learned.update([batch]).loss)
    first = time.perf_counter()
    return {"build": built - start, "first": first - built, "total": first - start}


def function(model: Any, batch: Any) -> dict[str, float]:
    """Return seconds of gradients and update in one `tf.function`, and its operations."""
    import tensorflow as tf

    from benchmarks.support import blocks

    start = time.perf_counter()
    pipe = model.instantiate()
    pipe.build(batch)
    updater = blocks.updater(pipe, clip_norm=1.0)
    built = time.perf_counter()

    @tf.function(autograph=False)
    def step(batch: Any, number: tf.Tensor) -> tf.Tensor:
        result = pipe.value_and_gradients(batch, step=number)
        updater.apply(result.gradients, step=number)
        return result.loss

    number = tf.constant(0, tf.int64)
    nodes = len(step.get_concrete_function(batch, number).graph.get_operations())
    float(step(batch, number))
    first = time.perf_counter()
    return {
        "build": built - start,
        "first": first - built,
        "total": first - start,
        "nodes": nodes,
    }


def main() -> None:
    """Measure every size in processes of their own, and print a table."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration:
        way, *size = options.configuration.split(",")
        print(json.dumps(measure(way, tuple(map(int, size)))))
        return
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(
        f"L layers of [{WIDTH}, {WIDTH}] and a bias, Adam, clipping; medians of {count} "
        "interleaved rounds, seconds"
    )
    names = [",".join(map(str, (way, *size))) for size in SIZES for way in WAYS]
    found = processes.rounds("benchmarks.build", names, count)
    print(f"{'L':>4} {'K':>2} {'M':>3} {'build':>6} {'first':>6} {'total':>6}  in a function")
    for size in SIZES:
        runs = {way: processes.quiet(found[",".join(map(str, (way, *size)))]) for way in WAYS}
        total = {way: processes.median(runs[way], "total") for way in WAYS}
        row = {part: processes.median(runs["trainer"], part) for part in ("build", "first")}
        print(
            f"{size[0]:4d} {size[1]:2d} {size[2]:3d} {row['build']:6.2f} {row['first']:6.2f} "
            f"{total['trainer']:6.2f}  {total['function']:5.2f}, without the graph optimizer "
            f"{total['unoptimized']:5.2f}; {processes.median(runs['function'], 'nodes'):.0f} "
            f"nodes; spread {processes.spread(runs['trainer'], 'total')}, "
            f"{processes.spread(runs['function'], 'total')}"
        )
    L, K, M = size
    figure = (
        f"{total['trainer']:.2f} s for L={L}, K={K}, M={M}; in a custom loop's function "
        f"{total['function']:.2f} s"
    )
    processes.conclude("build", figure, f"at most {AIM_S:g} s", found)


if __name__ == "__main__":
    main()
