"""What a cell's slots hold, read from its traced programs (`graphs.traced_memory`)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import nests, network, precision
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
    graphs = _program_graphs(programs, cell, specs, is_last=cell is analysis.cells[-1])
    is_complete = all(map(traced_memory.is_complete, graphs.values()))
    peaks = {phase: traced_memory.peak_bytes(graph, threads) for phase, graph in graphs.items()}
    if cell.has_backward:
        # Only now: the gradient adds outputs to the forward's graph.
        pair = _kept_pair(programs, cell, specs)
        result = CellBytes(
            forward=peaks["F"],
            backward=peaks["B"],
            fused=peaks.get("FB", peaks["B"]),
            kept_forward=traced_memory.peak_bytes(pair.forward, threads),
            residual=traced_memory.kept_bytes(pair.forward, pair.kept),
            kept_backward=traced_memory.peak_bytes(pair.backward, threads),
            is_estimate=False,
        )
    else:
        result = CellBytes(peaks["F"], 0, 0, 0, 0, 0, is_estimate=False)
    return result if is_complete else result.at_least(memory_formulas.cell_bytes(analysis, cell))


def _program_graphs(
    programs: cell_programs.CellPrograms,
    cell: network.Cell,
    specs: tuple[CellInputs, BackwardInputs],
    *,
    is_last: bool,
) -> dict[str, tf.Graph]:
    """Return the graphs of F, of B, and of the last cell's FB, forward and backward fused."""

    def call_all(inputs: CellInputs, upstream: BackwardInputs) -> Nest:
        results: list[Nest] = [programs.forward(cell, inputs).exports]
        if cell.has_backward:
            results.append(programs.backward(cell, inputs, upstream).weights)
        if cell.has_backward and is_last:
            results.append(programs.fused(cell, inputs, upstream)[1].weights)
        return results

    tf.function(call_all, autograph=False).get_concrete_function(*specs)
    return dict(programs.graphs)


def _kept_pair(
    programs: cell_programs.CellPrograms,
    cell: network.Cell,
    specs: tuple[CellInputs, BackwardInputs],
) -> traced_memory.DifferentiatedCall:
    """Return the graphs of a kept forward and of the backward from it."""

    def forward_and_back(inputs: CellInputs, upstream: BackwardInputs) -> Nest:
        kept = programs.keep(cell, inputs)
        gradients = kept.gradients(upstream._replace(accumulators=()))
        return gradients.weights, gradients.imports

    traced = tf.function(forward_and_back, autograph=False).get_concrete_function(*specs)
    return traced_memory.split_call(traced.graph)


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
    master = precision.policy(analysis.params.dtype).variable
    upstream = BackwardInputs(
        exports={v: nests.floating(analysis.specs[v]) for v in cell.exports_with_gradient},
        loss_factors=[tf.TensorSpec([], master) for _ in cell.losses],
        accumulators=[
            tf.TensorSpec(analysis.variables[path].shape, analysis.variables[path].dtype)
            for path in cell.weights
        ],
    )
    return inputs, upstream
