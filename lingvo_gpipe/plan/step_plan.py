"""What a training step will need before it runs: bytes per device and link, time, bubble.

Numbers only, for tests and TensorBoard; `report` makes the text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from lingvo_gpipe import network, optim
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import host_order, memory_formulas, replicas, traffic
from lingvo_gpipe.network.host_order import HostOrder
from lingvo_gpipe.plan import activations, describe, hosts, profiling, slot_times
from lingvo_gpipe.schedule import recompute, simulate
from lingvo_gpipe.task import Task


@dataclasses.dataclass(frozen=True, slots=True)
class CellPlan:
    """What one cell needs.

    Attributes:
        layers: names, in order.
        cost_share: its share of the cost of all cells, as the partition saw it.
        parameter_bytes: bytes of the variables that it owns, frozen ones and statistics included.
        gradient_bytes: of the gradients of its weights, those tied to other cells included; of
            those that it owns also what other replicas send, and the sum of earlier mini-batches if
            an update has several.
        slot_bytes: bytes of optimizer slots and of moving averages.
        copy_bytes: of weights in the compute dtype and of tied ones from other cells.
        activation_bytes: the most that its device holds at once besides these, for all its cells.
        update_bytes: the most that its update holds, when copies and activations are freed: the
            new values of one layer.
        live_micro_batches: the most micro-batches that its device keeps at once.
        is_estimate: whether some of the activations are by formula.
    """

    layers: tuple[str, ...]
    cost_share: float
    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    copy_bytes: int
    activation_bytes: int
    update_bytes: int
    live_micro_batches: int
    is_estimate: bool

    @property
    def kept_bytes(self) -> int:
        """What it holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """All its bytes; those of its device, if no other cell is there."""
        return _device_bytes([self])


def _device_bytes(cells: Sequence[CellPlan]) -> int:
    """Return what the cells of one device of a replica need together."""
    # Activations are the peak of the device: each of its cells has the same number.
    step = cells[0].activation_bytes + sum(cell.copy_bytes for cell in cells)
    return sum(cell.kept_bytes for cell in cells) + max(
        step, *(cell.update_bytes for cell in cells)
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training step of a network needs.

    Attributes:
        cells: per cell, what it needs in the replica that needs most for it.
        device_bytes: bytes that each device needs, all its cells together: K for each replica.
        links: what goes from cell to cell.
        timeline: the simulated step.
        step_bytes: the most that a step holds at once on all devices together, besides variables
            and slots: gradients, and activations and copies of weights or an update's new values.
        parameters: number of elements of the trained weights that inference uses.
        profiled: whether times were measured and activations read from traced programs, except
            those marked by `CellPlan.is_estimate`.
        in_seconds: whether the unit of times is a second; else it is a FLOP.
        analysis: of the network of one replica.
        num_replicas: R; all but `device_bytes` and `exchange` is of one replica.
        exchange: what replicas send each other.
        step_s: time of a step with what replicas send each other, at most, without the update; in
            the unit of `timeline`.
        cluster: hosts of the devices; None: not known.
        order: which of these devices each cell has; None: no hosts are known.
        reads_on_worker: whether workers read the mini-batches.
        update_s: seconds of the update that follows, and of the call of a step; None: not measured.
    """

    cells: tuple[CellPlan, ...]
    device_bytes: tuple[int, ...]
    links: tuple[traffic.Link, ...]
    timeline: simulate.Timeline
    step_bytes: int
    parameters: int
    profiled: bool
    in_seconds: bool
    analysis: network.Analysis
    num_replicas: int
    exchange: traffic.Exchange
    step_s: float
    cluster: hosts.Hosts | None = None
    order: HostOrder | None = None
    reads_on_worker: bool = False
    update_s: float | None = None

    @property
    def links_text(self) -> str:
        """Whether links take time, as text."""
        if self.in_seconds and self.cluster is not None and self.cluster.states_speeds:
            return "links take time at the speeds of --hosts"
        return "links take no time: that needs speeds in --hosts, and flops= or --profile"

    @property
    def bubble_share(self) -> float:
        """Share of all devices' time in which they wait."""
        return self.timeline.bubble_share

    @property
    def heaviest_bytes(self) -> int:
        """Bytes of the device that needs most."""
        return max(self.device_bytes)

    @property
    def together_bytes(self) -> int:
        """The most bytes of all devices together at one moment of a step."""
        kept = (cell.parameter_bytes + cell.slot_bytes for cell in self.cells)
        return self.step_bytes + sum(kept)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCache:
    """What plans of the same layers share: it does not depend on the cut and the schedule.

    Attributes:
        slots: path → bytes of the variable's optimizer slots and average; see `slot_bytes`.
        layer_times: measured times of the layers; None: FLOPs count.
        programs: times of the programs that were measured so far.
    """

    slots: Mapping[str, int]
    layer_times: Sequence[recompute.Work] | None = None
    programs: profiling.ProgramTimes = dataclasses.field(default_factory=list)


def cache_of(task: Task.Params, *, profile: bool = False) -> PlanCache:
    """Return what all plans of a task share.

    Args:
        task: the task.
        profile: measures the times of the layers.
    """
    fields = describe.fields_of(task)
    variables = network.analyze(network.uncut(task.model), fields).variables
    averages = task.train.average is not None
    return PlanCache(
        slot_bytes(variables, task.train.optimizer, averages=averages),
        profiling.layer_times(task.model, fields) if profile else None,
    )


def make_for(
    task: Task.Params,
    *,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    cache: PlanCache | None = None,
) -> Plan:
    """Plan the training of a task; see `make`."""
    planned = make(
        task.model,
        describe.fields_of(task),
        optimizer_params=task.train.optimizer,
        averages=task.train.average is not None,
        accumulate=task.train.accumulate,
        profile=profile,
        cluster=cluster,
        cache=cache,
    )
    return dataclasses.replace(planned, reads_on_worker=task.input.on_worker)


def with_update(plan: Plan, task: Task.Params) -> Plan:
    """Return the plan of a task with the time of its update, as measured on this machine."""
    update_s = profiling.update_s(task.train, task.model, plan.analysis)
    return dataclasses.replace(plan, update_s=update_s)


def make(
    params: network.PipelineParams,
    fields: Mapping[str, SpecNest],
    *,
    optimizer_params: optim.Optimizer.Params | None = None,
    averages: bool = False,
    accumulate: int = 1,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    cache: PlanCache | None = None,
) -> Plan:
    """Plan a training step.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.
        optimizer_params: None: no slots, and no update.
        averages: whether moving averages of weights and statistics are kept.
        accumulate: mini-batches of an update.
        profile: runs each layer (unless `cache` has its time), cuts by the measured times (unless
            `params` state the cuts), measures the programs of the cells, and reads activations from
            traced programs. Otherwise nothing is run or traced.
        cluster: hosts of the devices. If `profile`, or if they state how fast devices are, links
            take time.
        cache: what other plans of the same layers have computed; None: nothing.
    """
    num_replicas = params.num_replicas
    layer_times = None if cache is None else cache.layer_times
    if profile and layer_times is None:
        layer_times = profiling.layer_times(params, fields)
    analysis = _analyzed(params, fields, layer_times)
    in_seconds = layer_times is not None or bool(cluster and cluster.flops)
    if layer_times is None:
        layer_times = slot_times.by_flops(analysis, (cluster and cluster.flops) or 1.0)
    if cache is None:
        cache = PlanCache(slot_bytes(analysis.variables, optimizer_params, averages=averages))
    all_links = traffic.links(analysis)
    exchange = traffic.exchange(analysis, analysis.owners(num_replicas), num_replicas)
    order = None if cluster is None else _order(cluster, analysis, all_links, exchange)
    link_s, sending = None, None
    if cluster is not None and order is not None and in_seconds:
        link_s = hosts.link_s(cluster, order, analysis, all_links)
        sending = hosts.exchange_times(cluster, order, exchange)
    simulated = functools.partial(slot_times.timeline, analysis, link_s=link_s)
    times = [
        slot_times.of_cell(
            analysis,
            cell,
            slot_times.program_times(analysis, cell, layer_times).__getitem__,
        )
        for cell in analysis.cells
    ]
    timeline = simulated(times)
    if profile:
        needs = activations.traced(analysis)
        num_live = max(timeline.peak_live)
        measured = profiling.cell_times(params, analysis, needs, num_live, cache.programs)
        if measured is not None:
            times = measured
            timeline = simulated(times)
    else:
        needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    peaks = activations.peak_activations(analysis, timeline, needs)
    estimated = {cell.device_number for cell in analysis.cells if needs[cell.index].is_estimate}
    total_cost = sum(cell.cost for cell in analysis.cells)

    def cell_plan(cell: network.Cell, replica: int) -> CellPlan:
        elsewhere = {path for path, owner in exchange.owners.items() if owner != replica}
        held = memory_formulas.variables(
            analysis,
            cell.layers,
            cache.slots,
            elsewhere,
            num_replicas=num_replicas,
            accumulate=accumulate,
        )
        return CellPlan(
            layers=tuple(analysis.layers[n].name for n in cell.layers),
            cost_share=cell.cost / (total_cost or 1.0),
            parameter_bytes=held.variables,
            gradient_bytes=held.gradients,
            slot_bytes=held.slots,
            copy_bytes=held.copies,
            activation_bytes=peaks.devices[cell.device_number],
            update_bytes=(
                0
                if optimizer_params is None
                else memory_formulas.update(analysis, cell.layers, cache.slots, elsewhere)
            ),
            live_micro_batches=timeline.peak_live[cell.device_number],
            is_estimate=cell.device_number in estimated,
        )

    of_replicas = [[cell_plan(cell, r) for cell in analysis.cells] for r in range(num_replicas)]
    heaviest = tuple(
        max(of_cell, key=lambda cell: cell.kept_bytes + cell.copy_bytes)
        for of_cell in zip(*of_replicas, strict=True)
    )
    devices = [
        [cell.index for cell in analysis.cells if cell.device_number == number]
        for number in range(analysis.table.num_devices)
    ]
    update = sum(max(heaviest[k].update_bytes for k in cells) for cells in devices)
    step = peaks.together + sum(cell.copy_bytes for cell in heaviest)
    return Plan(
        cells=heaviest,
        device_bytes=tuple(
            _device_bytes([of_replica[k] for k in cells])
            for of_replica in of_replicas
            for cells in devices
        ),
        links=all_links,
        timeline=timeline,
        step_bytes=sum(cell.gradient_bytes for cell in heaviest) + max(step, update),
        parameters=describe.counts(analysis).parameters,
        profiled=profile,
        in_seconds=in_seconds,
        analysis=analysis,
        cluster=cluster,
        order=order,
        num_replicas=num_replicas,
        exchange=exchange,
        step_s=_step_s(timeline, sending),
    )


def _analyzed(
    params: network.PipelineParams,
    fields: Mapping[str, SpecNest],
    layer_times: Sequence[recompute.Work] | None,
) -> network.Analysis:
    """Return the analysis of one replica, cut as all of them are, by the times of layers if known.

    Args:
        params: params of the network, with all replicas.
        fields: the mini-batch's fields, of all.
        layer_times: measured times; None: FLOPs count.
    """
    one, fields_of_one = replicas.first_share(params, fields)
    # Replicas change an automatic cut within `device_memory` alone.
    are_cut_together = params.num_replicas > 1 and params.device_memory

    def analyze(costs: tuple[tuple[float, ...], ...] | None = None) -> network.Analysis:
        if are_cut_together:
            one.cuts = network.analyze(params, fields, costs=costs).cuts
        return network.analyze(one, fields_of_one, costs=costs)

    analysis = analyze()
    if layer_times is None:
        return analysis
    return analyze(recompute.costs([cell.reuse for cell in analysis.cells], layer_times))


def _order(
    cluster: hosts.Hosts,
    analysis: network.Analysis,
    all_links: Sequence[traffic.Link],
    exchange: traffic.Exchange,
) -> HostOrder:
    """Return which device of the hosts each cell has."""
    places = cluster.place(exchange.num_replicas * exchange.num_devices)
    if analysis.params.devices is not None:
        return host_order.replica_by_replica(places)
    sent = host_order.sent_by_all(analysis, all_links, exchange)
    return host_order.choose(places, exchange.num_devices, sent)


def _step_s(timeline: simulate.Timeline, sending: hosts.ExchangeTimes | None) -> float:
    """Return the seconds of a step with what replicas send each other.

    A device whose weights arrive after it could begin delays all that follow by as much. At the
    end, gradients are on their way.
    """
    if sending is None:
        return timeline.makespan_s
    begins: dict[int, float] = {}
    for span in timeline.spans:
        begins[span.device] = min(span.start_s, begins.get(span.device, span.start_s))
    late = max(sending.weights_s[device] - start_s for device, start_s in begins.items())
    return max(late, 0.0) + max(
        span.end_s + sending.gradients_s[span.device] for span in timeline.spans
    )


def slot_bytes(
    variables: Mapping[str, base.VariableSpec],
    optimizer_params: optim.Optimizer.Params | None,
    *,
    averages: bool,
) -> dict[str, int]:
    """Return the bytes of each variable's optimizer slots and of its average, by path.

    Args:
        variables: path → spec.
        optimizer_params: None: no slots.
        averages: whether moving averages of weights and statistics are kept.
    """
    sizes = dict.fromkeys(variables, 0)
    if optimizer_params is not None:
        optimizer: optim.Optimizer = optimizer_params.instantiate()
        for (path, _), slot in optimizer.slots(variables.values()).items():
            sizes[path] += slot.size_bytes
    if averages:
        for path, spec in variables.items():
            if spec.trainable or spec.is_state:
                sizes[path] += spec.size_bytes
    return sizes
