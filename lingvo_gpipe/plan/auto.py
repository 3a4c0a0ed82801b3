"""`--schedule=auto`: the schedule, cells per device and recompute policy with the shortest step.

Every combination is planned by the same simulator as any other model, and those that need more than
the memory of a device are left out. The number M of micro-batches is chosen, too, if it is not set
and changes results by no more than rounding.

Steps whose times differ by at most 3 % count as equal, because a simulated step is not more exact
than that. Of equal steps, the one with the fewest micro-batches, cells and programs is taken, then
the one that needs least memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from lingvo_gpipe import errors, network, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.execution import micro_batch_dependence
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import describe, hosts, step_plan
from lingvo_gpipe.task import Task

POLICIES = ("never", "except_last", "early", "full")  # each keeps less than the one before
_MOST_CELLS = 3  # per device
_TOLERANCE = 0.03
_CHOSEN = ("schedule", "cells_per_device", "recompute", "cuts")
"""Fields of the network that a run keeps; and M, if it is open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run a network, and its plan.

    Attributes:
        model: params of the network with a schedule, V, a recompute policy and M.
        plan: what its step needs.
    """

    model: network.PipelineParams
    plan: step_plan.Plan

    @property
    def name(self) -> str:
        """What was chosen: `zb_h1 V=2 M=16 never`."""
        model = self.model
        V = f" V={model.cells_per_device}" if model.cells_per_device != 1 else ""
        return f"{model.schedule}{V} M={model.num_micro_batches} {model.recompute}"

    @property
    def programs(self) -> tuple[int, bool, bool]:
        """How many programs a device runs: V, whether backwards are split, whether none is fused.

        The more there are, the longer a step takes than the sum of its layers.
        """
        analysis = self.plan.analysis
        is_fused = any(cell.fused for cell in analysis.cells)
        V = analysis.table.num_cells // analysis.table.num_devices
        return V, any(analysis.table.split()), not is_fused


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that is taken.

    Attributes:
        best: the one that is taken.
        fitting: all candidates that fit the memory of a device.
        num_refused: number of combinations that do not fit, or cannot be made.
        limit_bytes: memory of a device; None: not limited.
        note: why M is not chosen; empty: it is set or chosen.
    """

    best: Candidate
    fitting: tuple[Candidate, ...]
    num_refused: int
    limit_bytes: int | None
    note: str

    def set_in(self, model: network.PipelineParams) -> None:
        """Set what is chosen in the params of a network."""
        for field in (*_CHOSEN, "num_micro_batches"):
            model.set(**{field: self.best.model.get(field)})
        model.cuts = self.best.plan.analysis.cuts

    def lines(self) -> list[str]:
        """Return what was chosen, and from what, as text."""
        plan, limit = self.best.plan, self.limit_bytes
        unlimited = "memory is not limited; model.device_memory limits it"
        memory = unlimited if limit is None else f"within {units.size(limit)}"
        return [
            f"auto: {self.best.name}; devices wait {units.percent(plan.bubble_share)} of the step, "
            f"the heaviest needs {units.size(plan.heaviest_bytes)}",
            f"{len(self.fitting)} combinations were compared, {self.num_refused} do not fit or "
            f"cannot be made; {memory}",
            *([] if plan.cluster is None else [plan.links_text]),
            *filter(None, [self.note]),
        ]


class Planner(Protocol):
    """Plans a step of a network."""

    def __call__(self, model: network.PipelineParams, *, profile: bool) -> step_plan.Plan:
        """Return the plan; with `profile` the programs of its cells are measured."""


def choose(
    task: Task.Params,
    *,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    goes_on: bool = False,
) -> Choice:
    """Plan all combinations that a task leaves open, and take the one with the shortest step.

    Args:
        task: params of a task, complete. If it sets cells per device, or policies other than
            `full`, only these are tried.
        profile: measures the time of each layer on this machine, for each M, and the programs of
            the cells of the most promising candidates; else FLOPs count.
        cluster: see `step_plan.make`.
        goes_on: whether a run goes on, whose M stays.

    Raises:
        UserError: no combination can be planned, or none fits.
    """
    caches: dict[int, step_plan.PlanCache] = {}
    measures_layers = profile

    def plan(model: network.PipelineParams, *, profile: bool) -> step_plan.Plan:
        tried, count = task.copy(), model.num_micro_batches
        tried.set(model=model)
        if count not in caches:
            caches[count] = step_plan.cache_of(tried, profile=measures_layers)
        return step_plan.make_for(tried, cluster=cluster, cache=caches[count], profile=profile)

    fields = describe.fields_of(task)
    tried, note = counts(task.model, fields, is_measured=profile, goes_on=goes_on)
    return choose_for(task.model, plan, tried, memory_limit(task.model, cluster), note, profile)


def choose_for(
    model: network.PipelineParams,
    plan: Planner,
    counts: Sequence[int | None],
    limit_bytes: int | None,
    note: str = "",
    profile: bool = False,
) -> Choice:
    """Take the combination with the shortest step; see `choose`.

    Args:
        model: params of a network.
        plan: plans it.
        counts: numbers M of micro-batches to try; None: that of the network.
        limit_bytes: memory of a device; None: not limited.
        note: see `Choice`.
        profile: see `choose`.
    """
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    refusals: list[str] = []
    for tried in (tried for count in counts for tried in _combinations(model, count)):
        if limit_bytes is not None:  # hosts may state it
            tried.device_memory = f"{limit_bytes}B"
        if fitting and _keeps_more(fitting[-1].model, tried):
            continue
        try:
            candidate = Candidate(tried, plan(tried, profile=False))
        except errors.UserError as error:
            refusals.append(str(error).splitlines()[0])
            continue
        fits = limit_bytes is None or candidate.plan.heaviest_bytes <= limit_bytes
        (fitting if fits else too_large).append(candidate)
    if not fitting:
        raise _refusal(too_large, refusals, limit_bytes)
    best = _fastest_measured(fitting, plan) if profile else _preferred(fitting)
    return Choice(best, tuple(fitting), len(too_large) + len(refusals), limit_bytes, note)


def counts(
    model: network.PipelineParams,
    fields: Mapping[str, SpecNest],
    *,
    is_measured: bool = False,
    goes_on: bool = False,
) -> tuple[Sequence[int | None], str]:
    """Return which M are worth trying, rising, and why M stays if it is open.

    Args:
        model: params of the network; an M of 1 is open.
        fields: a mini-batch, name → nest of `tf.TensorSpec`.
        is_measured: whether the time of each layer is measured for each M.
        goes_on: whether a run goes on, whose M stays.

    Returns:
        Numbers M, or None alone for that of the network; and a reason, or nothing.
    """
    num_examples = micro_batches.batch_size(fields)
    num_devices = model.num_partitions * model.num_replicas
    if model.num_micro_batches != 1 or min(num_devices, num_examples) == 1:
        return [None], ""
    layers = network.layer_params(model)
    if goes_on:
        reason: str | None = "the run began so"
    elif not is_measured and any(layer.cost is not None for layer in layers):
        reason = "costs are stated for micro-batches of one size"
    else:
        reason = micro_batch_dependence.reason(network.analyze(network.uncut(model), fields))
    if reason is not None:
        return [None], f"M stays 1: {reason}. --num_micro_batches sets it"
    return micro_batches.counts(num_examples, model.num_partitions, model.num_replicas), ""


def resolved(
    task: Task.Params,
    report: Callable[[str], None],
    *,
    kept: Mapping[str, str] | None = None,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    trains: bool = True,
) -> Task.Params:
    """Return a task whose schedule is chosen.

    Args:
        task: params of a task, complete.
        report: receives the lines of the choice.
        kept: path → value as text, of the run that goes on; its choice is kept if it is for as many
            devices, of as much memory, and the task sets no other cells per device or policies. Its
            M stays where the task does not set another one.
        profile: see `choose`.
        cluster: see `choose`. A choice that is kept was made before, so this changes nothing of it.
        trains: whether the task is trained; else a run's choice is kept whatever the task sets.

    Raises:
        UserError: see `choose`.
    """
    if task.model.schedule != schedule.AUTO:
        return task
    result = task.copy()
    of_run = kept or {}
    has_devices = of_run.get("model.num_partitions") == repr(task.model.num_partitions)
    fields = ["num_micro_batches"] if task.model.num_micro_batches == 1 else []
    if has_devices and not (trains and _sets_others(task.model, of_run)):
        fields += [field for field in _CHOSEN if field != "cuts" or task.model.cuts is None]
    for path in (f"model.{field}" for field in fields):
        if path in of_run:
            result.override(f"{path}={of_run[path]}")
    if result.model.schedule != schedule.AUTO:
        report(f"the run keeps its schedule, {result.model.schedule}: --schedule=NAME changes it")
        return result
    if kept and not has_devices:
        result.model.cuts = None  # they are for the devices of the run
    choice = choose(result, profile=profile, cluster=cluster, goes_on=kept is not None)
    choice.set_in(result.model)
    report("\n".join(choice.lines()))
    return result


def memory_limit(model: network.PipelineParams, cluster: hosts.Hosts | None) -> int | None:
    """Return the bytes of a device, as params or hosts state them; None: neither does."""
    stated = None if model.device_memory is None else units.parse_size(model.device_memory)
    limits = [stated, None if cluster is None else cluster.memory]
    return min((limit for limit in limits if limit is not None), default=None)


def _sets_others(model: network.PipelineParams, kept: Mapping[str, str]) -> bool:
    """Return whether a task that is to be chosen for sets something else than a run has."""
    stated = ["device_memory"]
    if model.cells_per_device is not None:
        stated.append("cells_per_device")
    if model.recompute != "full":
        stated.append("recompute")
    return any(kept.get(f"model.{field}") not in (None, repr(model.get(field))) for field in stated)


def _combinations(
    model: network.PipelineParams, count: int | None
) -> Iterator[network.PipelineParams]:
    """Yield the network with every schedule, V and recompute policy that it leaves open.

    Raises:
        ScheduleError: no schedule has the number of cells that is stated.
    """
    wanted, recompute = model.cells_per_device, model.recompute
    if wanted is not None and not 1 <= wanted <= _MOST_CELLS:
        raise errors.ScheduleError(
            f"cells_per_device={wanted}, but --schedule=auto tries 1 to {_MOST_CELLS}. Name a "
            "schedule, or leave --cells_per_device out"
        )
    policies = POLICIES if recompute == "full" else (recompute,)
    for name, named in schedule.SCHEDULES.items():
        if name == "optimal":  # a search, for small tables
            continue
        for cells in range(named.cells_per_device, _MOST_CELLS + 1):
            try:
                schedule.make(name, 2, 2, cells)
            except errors.ScheduleError:
                continue  # it has no such tables
            for policy in policies if wanted in (None, cells) else ():
                yield _with(model, count, name, cells, policy)


def _with(
    model: network.PipelineParams,
    count: int | None,
    name: str = "gpipe",
    cells: int = 1,
    policy: str = "full",
) -> network.PipelineParams:
    """Return the network with M micro-batches (None: its own M) and a schedule."""
    result = model.copy()
    result.set(schedule=name, cells_per_device=cells, recompute=policy)
    if count is not None:
        result.num_micro_batches = count
    return result


def _keeps_more(fitting: network.PipelineParams, tried: network.PipelineParams) -> bool:
    """Return whether the first one is the second one with the policy `never`."""
    alike = ("schedule", "cells_per_device", "num_micro_batches")
    return fitting.recompute == "never" and all(
        fitting.get(field) == tried.get(field) for field in alike
    )


def _refusal(
    too_large: Sequence[Candidate], refusals: Sequence[str], limit_bytes: int | None
) -> errors.PartitionError:
    """Return the error of a task of which no combination fits."""
    if not too_large:
        return errors.PartitionError(f"no schedule can be planned: {refusals[0]}")
    least = min(too_large, key=lambda candidate: candidate.plan.heaviest_bytes)
    return errors.PartitionError(
        f"no schedule fits {units.size(limit_bytes or 0)} on a device: {least.name} needs "
        f"{units.size(least.plan.heaviest_bytes)}. Raise num_partitions or num_micro_batches"
    )


def _preferred(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest candidate whose step is at most 3 % longer than the shortest."""
    shortest_s = min(candidate.plan.step_s for candidate in candidates)
    return min(
        (c for c in candidates if c.plan.step_s <= (1 + _TOLERANCE) * shortest_s),
        key=lambda candidate: (
            candidate.model.num_micro_batches,
            candidate.programs,
            candidate.plan.heaviest_bytes,
        ),
    )


def _fastest_measured(candidates: Sequence[Candidate], plan: Planner) -> Candidate:
    """Return the candidate with the shortest step by the measured programs of its cells.

    A cell takes longer than its layers one by one, and the more so the more programs its device
    runs. So candidates with few programs are measured first. One with more is measured, and taken,
    only if it is shorter by more than the tolerance.
    """
    best, best_s = candidates[0], math.inf
    by_programs = sorted(candidates, key=lambda candidate: candidate.programs)
    for _, alike in itertools.groupby(by_programs, key=lambda candidate: candidate.programs):
        candidate = _preferred(list(alike))
        if candidate.plan.step_s < (1 - _TOLERANCE) * best_s:
            measured_s = plan(candidate.model, profile=True).step_s
            if measured_s < (1 - _TOLERANCE) * best_s:
                best, best_s = candidate, measured_s
    return best
