"""What a backward costs whole, cut in two, and from a kept forward.

`python -m benchmarks.parts.phases`: a middle and the last cell of each kind, one thread. Programs
take turns; a figure is the median over rounds of the processor time of a program divided by that of
the other one in the same round. F is a forward, B a backward that computes it again, I and W its
halves; K is a forward that keeps what BK, the backward from it, reads, and IK and WK its halves. FB
is forward and backward of the last cell as one program, as 1F1B runs it; tables that split
backwards run K, IK and WK in its place, if they keep everything.
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
    """Return functions that run the programs of two cells `CALLS` times, by name."""
    import tensorflow as tf

    from lingvo_gpipe import network, pipelining

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
    middle, last = _of_cell(analysis, 1), _of_cell(analysis, 2)
    del middle["FB"]  # only the last cell may run both as one program
    return {**middle, **{f"last {name}": last[name] for name in ("FB", "K+IK+WK")}}


def _of_cell(analysis: Any, number: int) -> dict[str, Callable[[], Any]]:
    """Return functions that run the programs of a cell `CALLS` times, by name."""
    import tensorflow as tf

    from lingvo_gpipe import nests
    from lingvo_gpipe.execution import cell_calls, cell_programs
    from lingvo_gpipe.plan.measured import cell_runner

    cell = analysis.cells[number]
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
        loss_factors=[tf.ones([]) for _ in cell.losses],
        accumulators=[tf.zeros(analysis.variables[path].shape) for path in cell.weights],
    )

    def forward(inputs: Any) -> tf.Tensor:
        return tf.nest.flatten(cut.forward(cell, inputs).as_nest())[0]

    def whole(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        return cut.backward(cell, inputs, upstream).weights

    def halves(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        left = cut.backward(cell, inputs, upstream, "I").left
        return cut.backward(cell, inputs, upstream, "W", left).weights

    def kept(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        held = cut.keep(cell, inputs)[1]
        return cut.backward(cell, inputs, upstream, held=held).weights

    def kept_halves(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        held = cut.keep(cell, inputs)[1]
        left = cut.backward(cell, inputs, upstream, "I", held).left
        return cut.backward(cell, inputs, upstream, "W", left).weights

    def fused(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        return cut.fused(cell, inputs, upstream)[1].weights

    def in_a_row(program: Callable[[Any, Any], list[tf.Tensor]]) -> Callable[[], Any]:
        return _in_a_row(program, inputs, upstream)

    return {
        "F": _forwards(forward, inputs),
        "B": in_a_row(whole),
        "I+W": in_a_row(halves),
        "K+BK": in_a_row(kept),
        "K+IK+WK": in_a_row(kept_halves),
        "FB": in_a_row(fused),
    }


def _in_a_row(
    program: Callable[[Any, Any], list[Any]], inputs: Any, upstream: Any
) -> Callable[[], Any]:
    """Return a function that runs a backward `CALLS` times, each adding to the last one's sums."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def run(inputs: Any, upstream: Any) -> list[tf.Tensor]:
        last: list[Any] = []  # without an order, equal calls would be merged
        for _ in range(CALLS):
            with tf.control_dependencies(last):
                upstream = upstream._replace(accumulators=program(inputs, upstream))
            last = [upstream.accumulators[0].op]
        return list(upstream.accumulators)

    return lambda: run(inputs, upstream)


def _forwards(forward: Callable[[Any], Any], inputs: Any) -> Callable[[], Any]:
    """Return a function that runs a forward `CALLS` times, one after the other."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def run(inputs: Any) -> list[tf.Tensor]:
        results: list[tf.Tensor] = []
        for _ in range(CALLS):
            with tf.control_dependencies([results[-1].op] if results else []):
                results.append(forward(inputs))
        return results

    return lambda: run(inputs)


RATIOS = {
    "(I+W)/B": (("I+W",), ("B",)),
    "(K+BK)/(F+B)": (("K+BK",), ("F", "B")),
    "(K+IK+WK)/(K+BK)": (("K+IK+WK",), ("K+BK",)),
    "last (K+IK+WK)/FB": (("last K+IK+WK",), ("last FB",)),
}
"""Programs whose times are added → those by whose times they are divided."""


def measure(kind: str, rounds: int) -> dict[str, float]:
    """Return the ratios of a kind of cell, and milliseconds of its forward."""
    runs = programs(kind)
    for run in runs.values():
        run()
    ratios: dict[str, list[float]] = {name: [] for name in ("F ms", *RATIOS)}
    for _ in range(rounds):
        spent = {}
        for name, run in runs.items():
            start = time.process_time()
            run()
            spent[name] = time.process_time() - start
        for name, (above, below) in RATIOS.items():
            ratios[name].append(sum(spent[p] for p in above) / sum(spent[p] for p in below))
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
    print(f"{'cell':<12} {'F ms':>7} " + " ".join(f"{name:>17}" for name in RATIOS))
    for kind in breakdown.KINDS:
        load = machine.Load()
        found = measure(kind, rounds)
        runs[kind] = [{**found, "other_load": load.stop()}]
        shown = " ".join(f"{found[name]:17.3f}" for name in RATIOS)
        print(f"{kind:<12} {found['F ms']:7.2f} {shown}", flush=True)
    worst = max(found["(I+W)/B"] for (found,) in runs.values())
    processes.conclude("phases", f"(I+W)/B {worst:.3f}", f"at most {AIM}", runs)


if __name__ == "__main__":
    main()
