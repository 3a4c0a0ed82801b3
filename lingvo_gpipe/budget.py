"""What a training step will need before it is run: bytes per device and link, time, bubble.

Numbers alone, for tests and TensorBoard; `plan` makes the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gpipe import describe, footprint, measure, network, optimizer, simulate


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What one cell needs.

    Attributes:
        layers: names, in order.
        cost_share: its share of all cells' cost, as the partition saw it.
        forward_s: seconds (FLOPs, where nothing was measured) of one micro-batch's forward.
        backward_s: of its backward, recomputation included.
        parameter_bytes: of its own variables, frozen ones and statistics too.
        gradient_bytes: of the gradients of its weights, tied ones of other cells too; twice, old
            and new sums, where an update has several mini-batches.
        slot_bytes: of the optimizer's slots and of moving averages.
        copy_bytes: of weights in the compute dtype and of tied ones from other cells.
        activation_bytes: the most it holds at once besides these.
        live_micro_batches: the most micro-batches that are under way in it at once.
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
    live_micro_batches: int

    @property
    def total_bytes(self) -> int:
        """Bytes of everything together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.slot_bytes
            + self.copy_bytes
            + self.activation_bytes
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training step of a network needs.

    Attributes:
        partitions: per cell.
        links: what goes from cell to cell.
        timeline: the simulated step; its unit is a FLOP where nothing was measured.
        step_bytes: the most that a step holds at once on all devices together, besides variables
            and slots: activations, gradients, copies of weights.
        device_memory: as the params have it.
        parameters: elements of the trained weights that inference uses.
        profiled: whether times were measured and activations read from traced programs.
        analysis: of the network.
    """

    partitions: tuple[PartitionPlan, ...]
    links: tuple[footprint.Link, ...]
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
        table = self.analysis.table
        devices: dict[int, int] = {}
        for k, cell in enumerate(self.partitions):
            # Activations are the peak of the device, whichever of its cells holds them.
            held = devices.setdefault(table.device_of(k), cell.activation_bytes)
            devices[table.device_of(k)] = held + cell.total_bytes - cell.activation_bytes
        return max(devices.values())

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
        optimizer_params: an `optimizer.Optimizer.Params`; None: no slots.
        averages: whether moving averages of weights and statistics are kept.
        accumulate: mini-batches of an update.
        profile: runs each layer to cut by its time, and reads activations from traced programs;
            cuts that `params` state are kept. Else nothing is run, and nothing traced.
    """
    analysis = network.analyze(params, fields)
    net = footprint.Network(params, analysis)
    if profile:
        times = measure.layer_times(params, fields)
        analysis = network.analyze(params, fields, costs=_costs(net, times))
        net = footprint.Network(params, analysis)
    else:
        times = tuple(_stated(params, n, info) for n, info in enumerate(analysis.layers))
    forward, backward, fused = _seconds(net, times)
    line = simulate.simulate(
        analysis.table, forward, backward, fused_s=fused if net.fused else None
    )
    cells = range(len(net.cells))
    needs = measure.cell_bytes(net) if profile else [footprint.estimate(net, k) for k in cells]
    table = analysis.table
    peaks = footprint.peak_activations(net, line, needs)
    owned = footprint.parameter_bytes(net)
    sums = 1 if accumulate == 1 else 2
    gradients = [sums * held for held in footprint.gradient_bytes(net)]
    copies = footprint.copy_bytes(net)
    slots = _slot_bytes(net, optimizer_params, averages)
    costs = describe.cell_costs(analysis)
    return Plan(
        partitions=tuple(
            PartitionPlan(
                layers=tuple(analysis.layers[n].name for n in analysis.routes[k].layers),
                cost_share=costs[k] / (sum(costs) or 1.0),
                forward_s=forward[k],
                backward_s=backward[k],
                parameter_bytes=owned[k],
                gradient_bytes=gradients[k],
                slot_bytes=slots[k],
                copy_bytes=copies[k],
                activation_bytes=peaks.devices[table.device_of(k)],
                live_micro_batches=line.peak_live[table.device_of(k)],
            )
            for k in cells
        ),
        links=footprint.links(net),
        timeline=line,
        step_bytes=peaks.together + sum(gradients) + sum(copies),
        device_memory=params.device_memory,
        parameters=describe.counts(analysis).parameters,
        profiled=profile,
        analysis=analysis,
    )


def _stated(params: Any, number: int, info: network.LayerInfo) -> measure.LayerTime:
    """Return a layer's FLOPs as its time, or the shares of a cost that was stated."""
    ahead, back = float(info.meta.flops_forward), float(info.meta.flops_backward)
    stated = info.params.cost if params.costs is None else params.costs[number]
    if stated is not None:
        whole = 2 * ahead + back
        shares = (ahead / whole, back / whole) if whole else (0.25, 0.5)
        ahead, back = stated * shares[0], stated * shares[1]
    return measure.LayerTime(ahead, back, ahead + back)


def _costs(
    net: footprint.Network, times: Sequence[measure.LayerTime]
) -> tuple[tuple[float, ...], ...]:
    """Return per cell what each layer would cost in it, by measured times."""
    saved = [len(kept) / net.analysis.table.num_micro_batches for kept in net.kept]
    if net.fused:
        saved[-1] = len(net.fused) / net.analysis.table.num_micro_batches
    rows = {
        share: tuple(share * time.fused_s + (1 - share) * time.inner_s for time in times)
        for share in set(saved)
    }
    return tuple(rows[share] for share in saved)


def _seconds(
    net: footprint.Network, times: Sequence[measure.LayerTime]
) -> tuple[list[float], list[float], float]:
    """Return per cell the seconds of forward and backward, and those of the last cell fused."""
    forward, backward, fused = [], [], 0.0
    for k, route in enumerate(net.analysis.routes):
        own = [times[n] for n in route.layers]
        kept = len(net.kept[k]) / net.analysis.table.num_micro_batches
        ahead = sum(time.forward_s for time in own)
        from_kept = sum(time.kept_backward_s for time in own)
        recomputed = sum(time.backward_s for time in own)
        # A slot of no time at all would be one that holds nothing.
        forward.append(ahead or 1e-9)
        backward.append((kept * from_kept + (1 - kept) * recomputed) or 1e-9)
        fused = (ahead + from_kept) or 1e-9
    return forward, backward, fused


def _slot_bytes(net: footprint.Network, optimizer_params: Any, averages: bool) -> list[int]:
    totals = [0] * len(net.cells)
    variables = net.analysis.variables
    if optimizer_params is not None:
        rule: optimizer.Optimizer = optimizer_params.instantiate()
        for (path, _), slot in rule.slots(variables.values()).items():
            totals[net.owner(path)] += slot.size_bytes
    if averages:
        for path, spec in variables.items():
            if spec.trainable or spec.is_state:
                totals[net.owner(path)] += spec.size_bytes
    return totals


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
