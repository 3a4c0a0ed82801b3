"""How close does the executor come to its schedule's bound, when cells only wait?

`python -m benchmarks.bound [--quick]`: K=8, M=32. A cell waits, forward and backward, without using
a core, so that many devices fit on any machine. Every wait measures itself; the step is compared
with the simulation of the table on those measured times. "Pair" is the time of a forward and a
backward of all cells of a device, which share it equally; schedules of two cells a device also run
with twice the pair, so that each cell waits as long as those of the others. The last row has two
replicas.
"""

from __future__ import annotations

from typing import Any

from benchmarks.support import networks, processes
from lingvo_gpipe import schedule

K, M = 8, 32
CELLS_PER_DEVICE = {
    name: named.cells_per_device
    for name, named in schedule.SCHEDULES.items()
    if name != "optimal"  # too long a search for K and M
}
# schedule, milliseconds of a pair, replicas
CONFIGURATIONS = [
    *(f"{name},{pair_ms},1" for pair_ms in (20, 4) for name in CELLS_PER_DEVICE),
    *(f"{name},40,1" for name, num_cells in CELLS_PER_DEVICE.items() if num_cells == 2),
    "1f1b,20,2",
]


def measure(configuration: str) -> dict[str, Any]:
    """Return the step's seconds, the simulated ones, and the share of the second in the first."""
    name, pair_ms, replicas = configuration.split(",")
    import ctypes

    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: wake after 1 ns, not 50 µs
    import tensorflow as tf

    from benchmarks.support import waiting
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.schedule import simulate

    num_cells = K * CELLS_PER_DEVICE[name]
    num_devices = K * int(replicas)
    placement.prepare_logical_cpus(num_devices)
    tf.config.threading.set_inter_op_parallelism_threads(2 * num_devices)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cell = waiting.Wait.Params(seconds=float(pair_ms) / 3e3 / CELLS_PER_DEVICE[name])
    pipe = pipelining.PipeliningLayer.Params(
        layers=[*[cell] * num_cells, waiting.Sum.Params()],
        num_partitions=K,
        num_micro_batches=M * int(replicas),
        num_replicas=int(replicas),
        schedule=name,
        cells_per_device=CELLS_PER_DEVICE[name],
        cuts=(1,) * (num_cells - 1) + (2,),
        fuse=False,  # in one program, F and I would wait at the same time
    ).instantiate()
    batch = {"x": tf.random.stateless_normal([M * int(replicas), 2], [1, 2])}
    pipe.build(batch)

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    step()
    waits = waiting.operation()
    waits.clear()
    step_s = networks.step_s(step, 3)
    num_waits = 5 * M * int(replicas)  # two steps are not counted, but wait as well
    layers = [info.name for info in pipe.analysis.layers[:num_cells]]
    f, i, w = ([waits.mean_s((layer, phase), num_waits) for layer in layers] for phase in "FIW")
    backward = [input_s + weight_s for input_s, weight_s in zip(i, w, strict=True)]
    simulated_s = simulate.simulate(
        pipe.analysis.table, {"F": f, "B": backward, "I": i, "W": w}
    ).makespan_s
    return {"s": step_s, "simulated_s": simulated_s, "share": simulated_s / step_s}


def main() -> None:
    """Measure every schedule and print a table."""
    options = processes.rounds_parser(__doc__).parse_args()
    runs = processes.measured(options, "benchmarks.bound", CONFIGURATIONS, measure, 5)
    print(f"{'schedule':<11} {'pair ms':>7} {'R':>2} {'step s':>7} {'simulated':>9} {'share':>6}")
    for configuration, results in runs.items():
        name, pair_ms, replicas = configuration.split(",")
        step_s, simulated_s, share = (
            processes.median(results, key) for key in ("s", "simulated_s", "share")
        )
        print(
            f"{name:<11} {pair_ms:>7} {replicas:>2} {step_s:7.3f} {simulated_s:9.3f} "
            f"{share:6.3f}  {processes.spread(results, 'share')}"
        )


if __name__ == "__main__":
    main()
