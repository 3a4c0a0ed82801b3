"""What a cell's slots hold, read from its traced programs (`graphs.traced_memory`)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import nests, network
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.execution.cell_calls import BackwardInputs, CellInputs
from lingvo_gpipe.graphs import traced_memory
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.network.memory_formulas import CellBytes


def cell_bytes(analysis: network.Analysis, threads: int | None = None) -> list[CellBytes]:
    """Trace the programs of every cell and return what they hold, for the largest micro-batch.

    Nothing is run, and no variable is created. The bodies of loops and conditions are not read: a
    cell with such operations holds at least what the layers' formulas say, and is marked as an
    estimate.

    Args:
        analysis: analysis of the network.
        threads: how many operations of a cell run at a time; None: as many as TensorFlow has for
            operations in this process, all of which a device may use while others wait.
    """
    if threads is None:
        # 0 is TensorFlow's own choice: the number of cores.
        threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    layers = [info.params.instantiate() for info in analysis.layers]
    return [_traced(analysis, cell, layers, threads) for cell in analysis.cells]


def _traced(
    analysis: network.Analysis, cell: network.Cell, layers: Sequence[base.Layer], threads: int
) -> CellBytes:
    programs = cell_programs.CellPrograms(cell.index, analysis, layers, jit=False)
    specs = _input_specs(analysis, cell)
    graphs = _program_graphs(
        programs,
        cell,
        specs,
        is_last=cell is analysis.cells[-1],
        is_split=bool(analysis.table.split()[cell.index]),
    )
    is_complete = all(map(traced_memory.is_complete, graphs.values()))
    peaks = {name: traced_memory.peak_bytes(graph, threads) for name, graph in graphs.items()}
    if not cell.has_backward:
        return CellBytes(peaks["F"])

    def left(name: str, num_others: int) -> int:
        """Return the bytes that a program leaves for the next one, after its other outputs."""
        graph = graphs.get(name)
        if graph is None:
            return 0
        return traced_memory.kept_bytes(graph, range(num_others, len(graph.outputs)))

    num_leaves = sum(len(nests.floating(analysis.specs[v])) for v in cell.imports_with_gradient)
    of_kept = left("IK", num_leaves)
    result = CellBytes(
        forward=peaks["F"],
        backward=peaks["B"],
        fused=peaks.get("FB", peaks["B"]),
        kept_forward=peaks["K"],
        residual=left("K", len(graphs["F"].outputs)),
        kept_backward=peaks["BK"],
        import_gradients=peaks.get("I", 0),
        kept_import_gradients=peaks.get("IK", 0),
        weight_gradients=peaks.get("W", 0),
        left_residual=max(0, left("I", num_leaves) - of_kept),
        left_gradients=of_kept,
        is_estimate=False,
    )
    return result if is_complete else result.at_least(memory_formulas.cell_bytes(analysis, cell))


def _program_graphs(
    programs: cell_programs.CellPrograms,
    cell: network.Cell,
    specs: tuple[CellInputs, BackwardInputs],
    *,
    is_last: bool,
    is_split: bool,
) -> dict[str, tf.Graph]:
    """Return the graphs of the programs that a cell may run; see `CellPrograms.graphs`."""

    def call_all(inputs: CellInputs, upstream: BackwardInputs) -> Nest:
        results: list[Nest] = [programs.forward(cell, inputs).exports]
        if not cell.has_backward:
            return results
        held = programs.keep(cell, inputs)[1]
        results += [
            programs.backward(cell, inputs, upstream).weights,
            programs.backward(cell, inputs, upstream, held=held).weights,
        ]
        if is_last:
            results.append(programs.fused(cell, inputs, upstream)[1].weights)
        if is_split and cell.computes("I") and cell.computes("W"):
            programs.backward(cell, inputs, upstream, "I", held)
            left = programs.backward(cell, inputs, upstream, "I").left
            results.append(programs.backward(cell, inputs, upstream, "W", left).weights)
        return results

    tf.function(call_all, autograph=False).get_concrete_function(*specs)
    return dict(programs.graphs)


def _input_specs(
    analysis: network.Analysis, cell: network.Cell
) -> tuple[CellInputs, BackwardInputs]:
    """Return the specs of the arguments of a cell's programs, and the backward's further ones."""

    def read(path: str) -> tf.TensorSpec:
        return tf.TensorSpec(analysis.variables[path].shape, analysis.variables[path].read_dtype)

    inputs = CellInputs(
        weights=[read(path) for path in cell.weights],
        untrained=[read(path) for path in cell.untrained],
        imports={v: analysis.specs[v] for v in cell.imports},
        seed=tf.TensorSpec([2], tf.int32),
        step=tf.TensorSpec([], tf.int64),
    )
    master = analysis.params.policy.variable
    upstream = BackwardInputs(
        exports={v: nests.floating(analysis.specs[v]) for v in cell.exports_with_gradient},
        loss_factors=[tf.TensorSpec([], master) for _ in cell.losses],
        accumulators=[
            tf.TensorSpec(analysis.variables[path].shape, analysis.variables[path].dtype)
            for path in cell.weights
        ],
    )
    return inputs, upstream
