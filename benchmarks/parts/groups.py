"""What do very many micro-batches cost as groups of at most 128, and as one graph?

`python -m benchmarks.parts.groups [--quick]`: 1F1B of dense layers of 32 units and micro-batches of
8 rows, whose calls are nearly all overhead, and of 512 units and 64 rows. Adam; each case in a
process of its own: seconds from the first mini-batch to the end of its update, milliseconds of an
update after that, and the largest resident memory.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from typing import Any

from benchmarks.support import machine, processes

CASES = (
    # K, layers, units, rows of a micro-batch, M, most micro-batches of a group
    (2, 8, 32, 8, 128, 128),
    (2, 8, 32, 8, 512, 512),
    (2, 8, 32, 8, 512, 128),
    (2, 8, 32, 8, 2048, 128),
    (4, 16, 32, 8, 128, 128),
    (4, 16, 32, 8, 512, 512),
    (4, 16, 32, 8, 512, 128),
    (2, 8, 512, 64, 512, 512),
    (2, 8, 512, 64, 512, 128),
)
ROUNDS, QUICK_ROUNDS = 3, 1
UPDATES = 8


def measure(case: tuple[int, ...]) -> dict[str, float]:
    """Return seconds of the first update, milliseconds of one after it, and MiB of the process."""
    import tensorflow as tf

    from lingvo_gpipe import layers, optim, pipelining, task
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.input import Input
    from lingvo_gpipe.run import learner

    num_partitions, num_layers, units, rows, num_micro_batches, group_size = case
    placement.prepare_logical_cpus(num_partitions)
    placement.prepare_threads(num_partitions, os.cpu_count() or 1)
    hidden = [layers.Dense.Params(units=units, activation="tanh") for _ in range(num_layers)]
    params = task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[*hidden, layers.MeanSquaredError.Params()],
            num_partitions=num_partitions,
            num_micro_batches=num_micro_batches,
            schedule="1f1b",
            group_size=group_size,
            max_build_s=1e6,
        ),
        input=Input.Params(batch_size=rows * num_micro_batches),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-3), max_steps=1
        ),
    )
    shape = [rows * num_micro_batches, units]
    batch = {"x": tf.ones(shape), "target": tf.zeros(shape)}

    def update() -> None:
        float(learned.update([batch]).loss)

    begun = time.perf_counter()
    learned = learner.Learner(params, batch)
    update()
    first_s = time.perf_counter() - begun
    times = []
    for _ in range(UPDATES):
        begun = time.perf_counter()
        update()
        times.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"first_s": first_s, "update_ms": 1e3 * statistics.median(times), "peak_mib": peak}


def main() -> None:
    """Measure every case in processes of their own, and print a table."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration:
        numbers = map(int, options.configuration.split(","))
        print(json.dumps(measure(tuple(numbers))))
        return
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(f"1F1B, Adam; medians of {count} interleaved rounds, least and largest")
    names = [",".join(map(str, case)) for case in CASES]
    found = processes.rounds("benchmarks.parts.groups", names, count)
    rows: dict[str, Any] = {}
    for case, name in zip(CASES, names, strict=True):
        runs = processes.quiet(found[name])
        row = rows[name] = {key: processes.median(runs, key) for key in _KEYS}
        print(
            f"K={case[0]}, {case[1]} layers of {case[2]}, {case[3]} rows, M={case[4]:4d}, groups "
            f"of {min(case[4:]):3d}: first update {row['first_s']:.2f} s "
            f"({processes.spread(runs, 'first_s')}), an update {row['update_ms']:.1f} ms "
            f"({processes.spread(runs, 'update_ms')}), {row['peak_mib']:.0f} MiB"
        )
    least, most = (rows[names[place]] for place in (0, 3))
    figure = f"{most['first_s'] - least['first_s']:.2f} s more for M=2,048 than for M=128"
    processes.conclude("groups", figure, "what 15 more groups compute", found)


_KEYS = ("first_s", "update_ms", "peak_mib")


if __name__ == "__main__":
    main()
