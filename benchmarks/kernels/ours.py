"""A layer of ours as a cell's programs run it, on one thread.

`python -m benchmarks.kernels.ours CASE` prints one JSON object: milliseconds of processor time, and
the share of each type of TensorFlow's operations.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from benchmarks.kernels.cases import CASES, RUNS, SIDE, Case, processor_ms


def layer_of(case: Case) -> Any:
    """Return the params of the case's layer."""
    from lingvo_gpipe import layers
    from lingvo_gpipe.tasks.image.model import operations
    from lingvo_gpipe.tasks.mt.model import encoder

    width = case.shape[-1]
    if case.kind == "feed_forward":
        middle = layers.Dense.Params(units=case.hidden, activation="gelu")
        return layers.Sequential.Params(layers=[middle, layers.Dense.Params(units=width)])
    if case.kind == "attention":
        return layers.MultiHeadAttention.Params(
            units=width, heads=case.size, dropout=case.dropout, reads=("x", "mask")
        )
    if case.kind == "transformer":
        return encoder.EncoderLayer.Params(
            units=width,
            heads=case.size,
            head_dim=width // case.size,
            hidden=case.hidden,
            dropout=case.dropout,
            attention_dropout=case.dropout,
            relu_dropout=case.dropout,
            reads=("x", "mask"),
        )
    if case.kind == "layer_norm":
        return layers.LayerNorm.Params()
    if case.kind == "batch_norm":
        return layers.BatchNorm.Params()
    if case.kind == "separable":
        name = f"separable_{case.size}x{case.size}_2"
        return operations.Operation.Params(operation=name, filters=width)
    return layers.Conv2D.Params(filters=width, kernel_size=case.size, use_bias=False)


class Programs:
    """The programs of a cell between two others, each of one layer of the case."""

    def __init__(self, params: Any, fields: dict[str, Any]) -> None:
        """Analyse the network.

        Args:
            params: params of the layer, which is all of the cell.
            fields: of one micro-batch: name → spec.
        """
        from lingvo_gpipe import layers, network, pipelining
        from lingvo_gpipe.execution import cell_programs

        loss = layers.MeanSquaredError.Params()
        model = pipelining.PipeliningLayer.Params(
            layers=[params, params, params, loss], num_partitions=3, cuts=(1, 1, 2)
        )
        self.analysis = network.analyze(model, fields)
        self.cell = self.analysis.cells[1]
        made = [info.params.instantiate() for info in self.analysis.layers]
        self.programs = cell_programs.CellPrograms(1, self.analysis, made, jit=False)

    def values(self) -> Any:
        """Return (inputs, what comes from upstream)."""
        import tensorflow as tf

        from lingvo_gpipe import nests
        from lingvo_gpipe.execution import cell_calls
        from lingvo_gpipe.plan.measured import cell_runner

        specs = [self.analysis.variables[path] for path in self.cell.weights]
        upstream = cell_calls.BackwardInputs(
            exports={
                v: [
                    tf.random.stateless_normal(spec.shape, (3, 4), dtype=spec.dtype)
                    for spec in nests.floating(self.analysis.specs[v])
                ]
                for v in self.cell.exports_with_gradient
            },
            loss_factors=[],
            accumulators=[tf.zeros(spec.shape, spec.dtype) for spec in specs],
        )
        return cell_runner.values(self.analysis, self.cell), upstream

    def forward(self, inputs: Any) -> list[Any]:
        """Run a forward that keeps nothing."""
        import tensorflow as tf

        return tf.nest.flatten(self.programs.forward(self.cell, inputs).as_nest())

    def both(self, inputs: Any, upstream: Any) -> tuple[list[Any], list[Any]]:
        """Run a forward that keeps what its backward reads, then that; return the sums last."""
        import tensorflow as tf

        outputs, held = self.programs.keep(self.cell, inputs)
        gradients = self.programs.backward(self.cell, inputs, upstream, held=held)
        return [*tf.nest.flatten(outputs.as_nest()), *tf.nest.flatten(gradients.imports)], list(
            gradients.weights
        )


def fields_of(case: Case) -> dict[str, Any]:
    """Return the fields of a micro-batch."""
    import tensorflow as tf

    x = tf.TensorSpec(case.shape, tf.float32)
    mask = {"mask": tf.TensorSpec(case.shape[:2], tf.int32)} if len(case.shape) == 3 else {}
    return {"x": x, "target": x, **mask}


def measure(case: Case) -> dict[str, Any]:
    """Return milliseconds of forward, forward and backward, and a product; and operations."""
    import tensorflow as tf

    from lingvo_gpipe.execution import outer_function

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    programs = Programs(layer_of(case), fields_of(case))
    inputs, upstream = programs.values()
    in_a_row = 8

    def forward(inputs: Any) -> Any:
        ended: list[Any] = []  # without an order, equal calls would be merged
        for _ in range(in_a_row):
            with tf.control_dependencies(ended):
                ended = [tensor.op for tensor in programs.forward(inputs)]
        with tf.control_dependencies(ended):
            return tf.constant(0)

    def both(inputs: Any, upstream: Any) -> Any:
        ended: list[Any] = []
        for _ in range(in_a_row):
            with tf.control_dependencies(ended):
                results, sums = programs.both(inputs, upstream)
            upstream = upstream._replace(accumulators=sums)
            ended = [tensor.op for tensor in (*results, *sums)]
        with tf.control_dependencies(ended):
            return tf.constant(0)

    def nothing(*arguments: Any) -> Any:
        del arguments
        return tf.constant(0)

    def milliseconds(calls: Any, *arguments: Any) -> float:
        run = outer_function.OuterFunction(calls)
        return processor_ms(lambda: run(*arguments))

    matrix = tf.random.stateless_normal([SIDE, SIDE], (5, 6))
    multiply = tf.function(lambda: tf.matmul(matrix, matrix), autograph=False)
    call_ms = milliseconds(nothing, inputs, upstream)
    return {
        "forward_ms": (milliseconds(forward, inputs) - call_ms) / in_a_row,
        "both_ms": (milliseconds(both, inputs, upstream) - call_ms) / in_a_row,
        "product_ms": processor_ms(multiply),
        "operations": operations_ms(programs),
    }


def operations_ms(programs: Programs) -> dict[str, float]:
    """Return the milliseconds of each type of operation in a forward and backward.

    TensorFlow's own trace of a session: what it adds to each operation is in them.
    """
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.Session(graph=graph) as session:
        nest = programs.values()
        known = session.run(tf.nest.flatten(nest))
        fed = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in known]
        inputs, upstream = tf.nest.pack_sequence_as(nest, fed)
        results, sums = programs.both(inputs, upstream)
        run = [tensor.op for tensor in (*results, *sums)]
        feeds = dict(zip(fed, known, strict=True))
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        spent: Counter[str] = Counter()
        for number in range(RUNS + 3):
            trace = tf.compat.v1.RunMetadata()
            session.run(run, feeds, options=options, run_metadata=trace)
            if number < 3:
                continue
            for device in trace.step_stats.dev_stats:
                for node in device.node_stats:
                    _, _, label = node.timeline_label.partition(" = ")
                    kind = label.partition("(")[0]
                    if kind and "PartitionedCall" not in kind:
                        spent[kind] += node.op_end_rel_nanos - node.op_start_rel_nanos
    return {kind: ns / 1e6 / RUNS for kind, ns in spent.most_common()}


def main() -> None:
    """Measure one case and print it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(json.dumps(measure(CASES[sys.argv[1]])))


if __name__ == "__main__":
    main()
