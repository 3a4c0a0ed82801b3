"""Cells that only wait: how close does the executor come to its schedule's bound?

A cell waits, forward and backward, without using a core, so that many devices fit on any machine.
Part of the backward waits for the gradient of the cell's input (I), part for that of its weight
(W). Every wait measures itself (`benchmarks.support.measured_wait`); the step is compared with the
simulation of the table on those measured times.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.support.measured_wait import Waits


@dataclasses.dataclass(frozen=True, slots=True)
class CellWaits:
    """How long a cell waits for one micro-batch.

    Attributes:
        forward_s: seconds of its forward.
        input_s: of the gradient of its input.
        weight_s: of that of its weight.
    """

    forward_s: float
    input_s: float
    weight_s: float


def measure(
    schedule: str,
    pair_ms: float,
    num_partitions: int,
    num_micro_batches: int,
    num_replicas: int = 1,
    cells_per_device: int = 1,
) -> dict[str, Any]:
    """Return the step's seconds, the simulated ones, and the share of the second in the first.

    Args:
        schedule: name of the schedule.
        pair_ms: milliseconds of the forward and backward of a device's cells together.
        num_partitions: K.
        num_micro_batches: M.
        num_replicas: R.
        cells_per_device: V.
    """
    third_s = pair_ms / 3e3 / cells_per_device
    return measure_cells(
        [CellWaits(third_s, third_s, third_s)] * (num_partitions * cells_per_device),
        schedule,
        num_micro_batches,
        num_replicas=num_replicas,
        cells_per_device=cells_per_device,
    )


def measure_cells(
    cells: Sequence[CellWaits],
    schedule: str,
    num_micro_batches: int,
    *,
    num_replicas: int = 1,
    cells_per_device: int = 1,
) -> dict[str, Any]:
    """Return the same of cells that differ.

    Args:
        cells: how long each of them waits.
        schedule: name of the schedule.
        num_micro_batches: M.
        num_replicas: R.
        cells_per_device: V.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import ctypes

    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: wake after 1 ns, not 50 µs
    import tensorflow as tf

    from benchmarks.support import blocks
    from benchmarks.support.measured_wait import Waits
    from lingvo_gpipe import pipelining
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.schedule import simulate

    num_cells = len(cells)
    num_partitions = num_cells // cells_per_device
    num_devices = num_replicas * num_partitions
    placement.prepare_logical_cpus(num_devices)
    tf.config.threading.set_inter_op_parallelism_threads(2 * num_devices)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    waits = Waits()
    wait_layer, sum_layer = _wait_layer(waits), _sum_layer()
    pipe = pipelining.PipeliningLayer.Params(
        layers=[
            *(wait_layer.Params(**dataclasses.asdict(cell)) for cell in cells),
            sum_layer.Params(),
        ],
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        schedule=schedule,
        cells_per_device=cells_per_device,
        cuts=(1,) * (num_cells - 1) + (2,),
        fuse=False,  # in one program, F and I would wait at the same time
    ).instantiate()
    batch = {"x": tf.random.stateless_normal([num_micro_batches, 2], [1, 2])}
    pipe.build(batch)

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    step()
    waits.clear()
    step_s = blocks.seconds(step, 3)
    names = [info.name for info in pipe.analysis.layers[:num_cells]]
    table = pipe.analysis.table
    waited = waits.waited()
    runs = 5  # two of `seconds` are not counted, but wait as well
    if any(each.count != num_micro_batches * runs for each in waited.values()):
        sys.exit("a wait ran twice or never: the figures would mean nothing")
    of_phase = {phase: [waited[name, phase].mean_s for name in names] for phase in "FIW"}
    simulated = simulate.simulate(
        table,
        of_phase["F"],
        [i + w for i, w in zip(of_phase["I"], of_phase["W"], strict=True)],
        input_gradient_s=of_phase["I"],
        weight_gradient_s=of_phase["W"],
    ).makespan_s
    return {"s": step_s, "simulated_s": simulated, "share": simulated / step_s}


def _wait_layer(waits: Waits) -> Any:
    """Return a layer that waits in each phase."""
    import tensorflow as tf

    from lingvo_gpipe import hyperparams
    from lingvo_gpipe.layers import base
    from lingvo_gpipe.nests import Nest, SpecNest

    class Wait(base.Layer):
        """x → x, after a while."""

        class Params(base.Layer.Params):
            forward_s: float = hyperparams.required("Seconds of the forward.")
            input_s: float = hyperparams.required("Seconds of the gradient of the input.")
            weight_s: float = hyperparams.required("Seconds of the gradient of the weight.")

            def _meta(self, *inputs: SpecNest) -> base.Meta:
                scale = base.VariableSpec("scale", (), inputs[0].dtype, base.initializer("ones"))
                return base.Meta(inputs[0], (scale,), 1, 2)

        params: Params

        def fprop(self, theta: Any, inputs: Any, ctx: base.Context) -> Nest:
            params = self.params

            def waited(x: tf.Tensor, scale: tf.Tensor) -> Any:
                def back(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                    of_input = waits.wait((ctx.path, "I"), params.input_s, dy)  # W waits after it
                    of_weight = waits.wait((ctx.path, "W"), params.weight_s, of_input)
                    return of_input * scale, tf.reduce_sum(of_weight)

                return waits.wait((ctx.path, "F"), params.forward_s, x * scale), back

            waiting: Any = tf.custom_gradient(waited)
            return waiting(inputs, theta["scale"])

    return Wait


def _sum_layer() -> Any:
    """Return a layer whose loss is a sum."""
    import tensorflow as tf

    from lingvo_gpipe.layers import base
    from lingvo_gpipe.nests import Nest, SpecNest

    class Sum(base.Layer):
        """x → x, and the sum of x as a loss: its gradient needs no recomputation."""

        class Params(base.Layer.Params):
            def _meta(self, *inputs: SpecNest) -> base.Meta:
                one = base.LossSpec("loss", 1.0, lambda fields: tf.ones([], fields["x"].dtype))
                return base.Meta(inputs[0], losses=(one,))

        params: Params

        def fprop(self, theta: Any, inputs: Any, ctx: base.Context) -> Nest:
            del theta
            ctx.add_loss("loss", tf.reduce_sum(inputs))
            return inputs

    return Sum
