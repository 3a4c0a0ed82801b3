"""What a backward costs whole, cut in two, and from a kept forward.

`python -m benchmarks.parts.phases`: one cell of each kind, one thread. Programs take turns; a
figure is the median over rounds of the processor time of a program divided by that of the other one
in the same round. F is a forward, B a backward that computes it again, I and W its halves; K is a
forward that keeps what BK, the backward from it, reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import breakdown
from benchmarks.support import blocks, machine, processes

CALLS = 8  # of each program in a row, in one function
ROUNDS, QUICK_ROUNDS = 25, 3
AIM = 1.05


def programs(kind: str) -> dict[str, Callable[[], Any]]:
    """Return functions that run the programs of a middle cell `CALLS` times."""
    import tensorflow as tf

    from lingvo_gpipe import nests, network, pipelining
    from lingvo_gpipe.execution import cell_calls, cell_programs
    from lingvo_gpipe.plan.measured import cell_runner

    if kind == "amoebanet":
        task, batch = breakdown.task_of(kind)
        params = task.model.set(num_partitions=3)
    else:
        layers, batch = blocks.network(kind, 3)
        params = pipelining.PipeliningLayer.Params(
            layers=layers, num_partitions=3, num_micro_batches=blocks.M
        )
    specs = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in batch.items()}
    analysis = network.analyze(params, specs)
    cell = analysis.cells[1]
    made = [info.params.instantiate() for info in analysis.layers]
    cut = cell_programs.CellPrograms(cell.index, analysis, made, jit=False)
    inputs = cell_runner.values(analysis, cell)
    upstream = cell_calls.BackwardInputs(
        exports={
            v: [
                tf.random.stateless_normal(spec.shape, [3, 4])
                for spec in nests.floating(analysis.specs[v])
            ]
            for v in cell.exports_with_gradient
        },
        loss_factors=[],
        accumulators=[tf.zeros(analysis.variables[path].shape) for path in cell.weights],
    )

    def whole(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        return cut.backward(cell, inputs, upstream).weights

    def halves(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        left = cut.backward(cell, inputs, upstream, "I").left
        return cut.backward(cell, inputs, upstream, "W", left).weights

    def kept(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        held = cut.keep(cell, inputs)[1]
        return cut.backward(cell, inputs, upstream, held=held).weights

    def in_a_row(program: Callable[[Any, Any], list[tf.Tensor]]) -> Callable[[], Any]:
        @tf.function(autograph=False)
        def run(inputs: Any, upstream: Any) -> list[tf.Tensor]:
            last: list[Any] = []  # without an order, equal calls would be merged
            for _ in range(CALLS):
                with tf.control_dependencies(last):
                    upstream = upstream._replace(accumulators=program(inputs, upstream))
                last = [upstream.accumulators[0].op]
            return list(upstream.accumulators)

        return lambda: run(inputs, upstream)

    @tf.function(autograph=False)
    def forwards(inputs: Any) -> list[tf.Tensor]:
        last: list[Any] = []
        results = []
        for _ in range(CALLS):
            with tf.control_dependencies(last):
                exports = tf.nest.flatten(cut.forward(cell, inputs).exports)
            last = [exports[0].op]
            results.append(exports[0])
        return results

    return {
        "F": lambda: forwards(inputs),
        "B": in_a_row(whole),
        "I+W": in_a_row(halves),
        "K+BK": in_a_row(kept),
    }


def measure(kind: str, rounds: int) -> dict[str, float]:
    """Return the ratios of a kind of cell."""
    runs = programs(kind)
    for run in runs.values():
        run()
    ratios: dict[str, list[float]] = {"(I+W)/B": [], "(K+BK)/(F+B)": [], "F ms": []}
    for _ in range(rounds):
        spent = {}
        for name, run in runs.items():
            start = time.process_time()
            run()
            spent[name] = time.process_time() - start
        both = spent["F"] + spent["B"]
        ratios["(I+W)/B"].append(spent["I+W"] / spent["B"])
        ratios["(K+BK)/(F+B)"].append(spent["K+BK"] / both)
        ratios["F ms"].append(1e3 * spent["F"] / CALLS)
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    """Measure all kinds, and print a table."""
    options = processes.parser(__doc__, measures=False).parse_args()
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print(machine.describe())
    runs: dict[str, list[dict[str, float]]] = {}
    print(f"{'cell':<12} {'F ms':>7} {'(I+W)/B':>9} {'(K+BK)/(F+B)':>13}")
    for kind in breakdown.KINDS:
        load = machine.Load()
        found = measure(kind, rounds)
        runs[kind] = [{**found, "other_load": load.stop()}]
        print(
            f"{kind:<12} {found['F ms']:7.2f} {found['(I+W)/B']:9.3f} "
            f"{found['(K+BK)/(F+B)']:13.3f}",
            flush=True,
        )
    worst = max(found["(I+W)/B"] for (found,) in runs.values())
    processes.conclude("phases", f"(I+W)/B {worst:.3f}", f"at most {AIM}", runs)


if __name__ == "__main__":
    main()
