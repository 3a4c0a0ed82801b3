"""What a training step will need before it is run: bytes per device and link, time, bubble.

Numbers alone, for tests and TensorBoard; `plan` makes the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_gpipe import network, optim
from lingvo_gpipe.plan import describe, memory_timeline, profiling
from lingvo_gpipe.schedule import recompute, simulate

# A slot of no time would hold nothing. So small a part of the longest is none in the result, and
# yet no rounding error behind a million of them.
_LEAST = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What one cell needs.

    Attributes:
        layers: names, in order.
        cost_share: its share of all cells' cost, as the partition saw it.
        forward_s: seconds (FLOPs, where nothing was measured) of one micro-batch's forward, by
            its device's relative speed.
        backward_s: of its backward, recomputation included.
        parameter_bytes: of its own variables, frozen ones and statistics too.
        gradient_bytes: of the gradients of its weights, tied ones of other cells too; twice, old
            and new sums, where an update has several mini-batches.
        slot_bytes: of the optimizer's slots and of moving averages.
        copy_bytes: of weights in the compute dtype and of tied ones from other cells.
        activation_bytes: the most its device holds at once besides these, all its cells together.
        update_bytes: the most its update holds in place of copies and activations, which are gone
            by then: new values of one layer.
        live_micro_batches: the most micro-batches that are under way on its device at once.
        is_estimate: whether activations are by formula, in part at least.
    """

    layers: tuple[str, ...]
    cost_share: float
    forward_s: float
    backward_s: float
    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    copy_bytes: int
    activation_bytes: int
    update_bytes: int
    live_micro_batches: int
    is_estimate: bool

    @property
    def total_bytes(self) -> int:
        """Bytes of everything together; of its device, where no other cell lives there."""
        return _device_bytes([self])


def _device_bytes(cells: Sequence[PartitionPlan]) -> int:
    """Return what the cells of one device need together."""
    kept = sum(cell.parameter_bytes + cell.gradient_bytes + cell.slot_bytes for cell in cells)
    # Activations are the peak of the device, whichever of its cells holds them.
    step = cells[0].activation_bytes + sum(cell.copy_bytes for cell in cells)
    return kept + max(step, *(cell.update_bytes for cell in cells))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training step of a network needs.

    Attributes:
        partitions: per cell.
        links: what goes from cell to cell.
        timeline: the simulated step; its unit is a FLOP where nothing was measured.
        step_bytes: the most that a step holds at once on all devices together, besides variables
            and slots: gradients, and activations and copies of weights or an update's new values.
        device_memory: as the params have it.
        parameters: elements of the trained weights that inference uses.
        profiled: whether times were measured and activations read from traced programs, as far
            as these tell them (`PartitionPlan.is_estimate`).
        analysis: of the network.
    """

    partitions: tuple[PartitionPlan, ...]
    links: tuple[memory_timeline.Link, ...]
    timeline: simulate.Timeline
    step_bytes: int
    device_memory: str | None
    parameters: int
    profiled: bool
    analysis: network.Analysis

    @property
    def bubble_share(self) -> float:
        """Share of all devices' time in which they wait."""
        return self.timeline.bubble_share

    @property
    def heaviest_bytes(self) -> int:
        """Bytes of the device that needs most, all its cells together."""
        devices: dict[int, list[PartitionPlan]] = {}
        for k, cell in enumerate(self.partitions):
            devices.setdefault(self.analysis.table.device_of(k), []).append(cell)
        return max(map(_device_bytes, devices.values()))

    @property
    def together_bytes(self) -> int:
        """The most bytes of all devices together at one moment of a step."""
        kept = (cell.parameter_bytes + cell.slot_bytes for cell in self.partitions)
        return self.step_bytes + sum(kept)


def make(
    params: Any,
    fields: Mapping[str, Any],
    *,
    optimizer_params: Any = None,
    averages: bool = False,
    accumulate: int = 1,
    profile: bool = False,
) -> Plan:
    """Plan a training step.

    Args:
        params: a `network.PipelineParams`.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.
        optimizer_params: an `optim.Optimizer.Params`; None: no slots, and no update.
        averages: whether moving averages of weights and statistics are kept.
        accumulate: mini-batches of an update.
        profile: runs each layer to cut by its time, and reads activations from traced programs;
            cuts that `params` state are kept. Else nothing is run, and nothing traced.
    """
    analysis = network.analyze(params, fields)
    net = memory_timeline.Network(params, analysis)
    if profile:
        times = profiling.layer_times(params, fields)
        reuses = [cell.reuse for cell in analysis.cells]
        costs = recompute.costs(reuses, [time.work for time in times])
        analysis = network.analyze(params, fields, costs=costs)
        net = memory_timeline.Network(params, analysis)
    else:
        times = tuple(
            _stated(params, n, info, info.has_gradient) for n, info in enumerate(analysis.layers)
        )
    seconds = [_seconds(net, cell.index, times).on(cell.device_speed) for cell in analysis.cells]
    line = _timeline(net, seconds)
    cells = range(len(net.cells))
    needs = (
        profiling.cell_bytes(net) if profile else [memory_timeline.estimate(net, k) for k in cells]
    )
    table = analysis.table
    peaks = memory_timeline.peak_activations(net, line, needs)
    owned = memory_timeline.parameter_bytes(net)
    sums = 1 if accumulate == 1 else 2
    gradients = [sums * held for held in memory_timeline.gradient_bytes(net)]
    copies = memory_timeline.copy_bytes(net)
    slots = _slot_bytes(net, optimizer_params, averages)
    slots_held = [0] * len(net.cells)
    for path, held in slots.items():
        slots_held[net.owner(path)] += held
    updates = [0] * len(net.cells)
    if optimizer_params is not None:
        updates = memory_timeline.update_bytes(net, slots)
    at_once = [0] * table.num_devices
    for k in cells:
        at_once[table.device_of(k)] = max(at_once[table.device_of(k)], updates[k])
    estimated = {table.device_of(k) for k in cells if needs[k].is_estimate}
    loads = describe.cell_costs(analysis)
    return Plan(
        partitions=tuple(
            PartitionPlan(
                layers=tuple(analysis.layers[n].name for n in analysis.cells[k].layers),
                cost_share=loads[k] / (sum(loads) or 1.0),
                forward_s=seconds[k].forward,
                backward_s=seconds[k].whole_backward,
                parameter_bytes=owned[k],
                gradient_bytes=gradients[k],
                slot_bytes=slots_held[k],
                copy_bytes=copies[k],
                activation_bytes=peaks.devices[table.device_of(k)],
                update_bytes=updates[k],
                live_micro_batches=line.peak_live[table.device_of(k)],
                is_estimate=table.device_of(k) in estimated,
            )
            for k in cells
        ),
        links=memory_timeline.links(net),
        timeline=line,
        step_bytes=sum(gradients) + max(peaks.together + sum(copies), sum(at_once)),
        device_memory=params.device_memory,
        parameters=describe.counts(analysis).parameters,
        profiled=profile,
        analysis=analysis,
    )


def _stated(params: Any, number: int, info: network.LayerInfo, flows: bool) -> profiling.LayerTime:
    """Return a layer's FLOPs as its time, or the shares of a cost that was stated."""
    ahead, back = float(info.meta.flops_forward), float(info.meta.flops_backward)
    stated = info.params.cost if params.costs is None else params.costs[number]
    if not flows:
        return profiling.LayerTime(ahead if stated is None else stated, 0.0, 0.0)
    if stated is not None:
        whole = 2 * ahead + back
        shares = (ahead / whole, back / whole) if whole else (0.25, 0.5)
        ahead, back = stated * shares[0], stated * shares[1]
    return profiling.LayerTime(ahead, back, ahead + back)


@dataclasses.dataclass(frozen=True, slots=True)
class _Seconds:
    """What the slots of a cell take.

    Attributes:
        forward: of F.
        backward: of B.
        fused: of F and B as one program.
        input_gradient: of I.
        weight_gradient: of W.
        whole_backward: of a micro-batch's backward, in one slot or two.
    """

    forward: float
    backward: float
    fused: float
    input_gradient: float
    weight_gradient: float
    whole_backward: float

    def on(self, speed: float) -> _Seconds:
        """Return the same on a device that is so many times as fast."""
        return _Seconds(*(seconds / speed for seconds in dataclasses.astuple(self)))


def _seconds(
    net: memory_timeline.Network, cell: int, times: Sequence[profiling.LayerTime]
) -> _Seconds:
    """Return what the slots of a cell take."""
    table = net.analysis.table
    own = [times[n] for n in net.cells[cell].layers]
    ahead = sum(time.forward_s for time in own)
    if not net.cells[cell].has_backward:
        return _Seconds(ahead, 0.0, 0.0, 0.0, 0.0, 0.0)
    from_kept = sum(time.kept_backward_s for time in own)
    # A frozen layer has no backward, but is computed again with its cell.
    again = sum(time.again_s if time.backward_s else time.forward_s for time in own)
    split = table.split()[cell]
    kept = _share(net.cells[cell].kept, split)
    inputs, weights = _halves(net, cell, times, again)
    # From a kept forward, I does all and W nothing.
    inputs = (1 - kept) * inputs + kept * from_kept
    weights = (1 - kept) * weights
    whole_kept = _share(net.cells[cell].kept, frozenset(range(table.num_micro_batches)) - split)
    backward = (1 - whole_kept) * again + from_kept
    share = len(split) / table.num_micro_batches
    whole = (1 - share) * backward + share * (inputs + weights)
    return _Seconds(ahead, backward, ahead + from_kept, inputs, weights, whole)


def _halves(
    net: memory_timeline.Network, cell: int, times: Sequence[profiling.LayerTime], again: float
) -> tuple[float, float]:
    """Return what I and W of a cell take, each with its forward computed again.

    A layer's backward is half the gradient of its inputs, half that of its weights, if it has any
    that are trained. I wants the first halves. W wants the others, and those inputs' gradients on
    which they depend: of all layers behind the first with such weights. Where there is but one of
    the two to give, it takes the whole backward.
    """
    layers = net.cells[cell].layers
    backs = [times[n].kept_backward_s for n in layers]
    trained = [bool(net.analysis.trainable(n)) for n in layers]
    whole = again + sum(backs)
    if not net.wanted[cell]:
        return 0.0, whole
    if not any(trained):
        return whole, 0.0
    shares = [0.5 if own else 1.0 for own in trained]
    inputs = again + sum(share * back for share, back in zip(shares, backs, strict=True))
    first = trained.index(True)
    return inputs, again + sum(backs[first:]) - backs[first] / 2


def _share(some: frozenset[int], of: frozenset[int]) -> float:
    return len(some & of) / len(of) if of else 0.0


def _timeline(net: memory_timeline.Network, seconds: Sequence[_Seconds]) -> simulate.Timeline:
    """Simulate the step; every slot takes some time, and cells wait for what they read alone."""
    least = _LEAST * (max(max(dataclasses.astuple(cell)) for cell in seconds) or 1.0)

    def lengths(times: Iterable[float]) -> list[float]:
        return [max(time, least) for time in times]

    forward = {(net.source(v), cell.index) for cell in net.cells for v in cell.imports}
    back = {(net.source(v), k) for k, wanted in enumerate(net.wanted) for v in wanted}
    return simulate.simulate(
        net.analysis.table,
        lengths(cell.forward for cell in seconds),
        lengths(cell.backward for cell in seconds),
        fused_s=max(seconds[-1].fused, least) if net.cells[-1].fused else None,
        input_gradient_s=lengths(cell.input_gradient for cell in seconds),
        weight_gradient_s=lengths(cell.weight_gradient for cell in seconds),
        link_s={ends: 0.0 for ends in forward if ends[0] != memory_timeline.INPUT},
        no_gradient=forward - back,
    )


def _slot_bytes(
    net: memory_timeline.Network, optimizer_params: Any, averages: bool
) -> dict[str, int]:
    """Return path → bytes of its optimizer slots and of its average."""
    variables = net.analysis.variables
    held = dict.fromkeys(variables, 0)
    if optimizer_params is not None:
        rule: optim.Optimizer = optimizer_params.instantiate()
        for (path, _), slot in rule.slots(variables.values()).items():
            held[path] += slot.size_bytes
    if averages:
        for path, spec in variables.items():
            if spec.trainable or spec.is_state:
                held[path] += spec.size_bytes
    return held


def make_for(task: Any, *, profile: bool = False) -> Plan:
    """Plan the training of a `Task.Params`; see `make`."""
    return make(
        task.model,
        describe.fields_of(task),
        optimizer_params=task.train.optimizer,
        averages=task.train.average is not None,
        accumulate=task.train.accumulate,
        profile=profile,
    )
