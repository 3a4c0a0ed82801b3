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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lingvo_gpipe import errors, network, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.execution import micro_batch_dependence
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import describe, hosts, step_plan
from lingvo_gpipe.task import Task

POLICIES = ("never", "except_last", "early", "full")  # where `never` fits, no other is faster
_MOST_CELLS = 3  # per device
_TOLERANCE = 0.03
_NUM_MICRO_BATCHES = "model.num_micro_batches"


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the network, and its plan.

    Attributes:
        schedule: name of the schedule.
        cells_per_device: V.
        recompute: recompute policy of every cell.
        num_micro_batches: M; None: that of the task.
        plan: what its step needs.
    """

    schedule: str
    cells_per_device: int
    recompute: str
    num_micro_batches: int | None
    plan: step_plan.Plan

    @property
    def name(self) -> str:
        """What was chosen: `zb_h1 V=2 M=16 never`."""
        V, M = self.cells_per_device, self.num_micro_batches
        count = "" if M is None else f" M={M}"
        return f"{self.schedule}{f' V={V}' if V > 1 else ''}{count} {self.recompute}"

    @property
    def programs(self) -> tuple[int, bool, bool]:
        """How many programs a device runs: V, whether backwards are split, whether none is fused.

        The more there are, the longer a step takes than the sum of its layers.
        """
        analysis = self.plan.analysis
        is_fused = any(cell.fused for cell in analysis.cells)
        return self.cells_per_device, any(analysis.table.split()), not is_fused


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that is taken.

    Attributes:
        best: the one that is taken.
        fitting: all candidates that fit the memory of a device.
        num_refused: number of those that do not fit, or cannot be made.
        limit_bytes: memory of a device; None: not limited.
        note: why M is not chosen; empty: it is set or chosen.
    """

    best: Candidate
    fitting: tuple[Candidate, ...]
    num_refused: int
    limit_bytes: int | None
    note: str

    def set_in(self, params: Task.Params) -> None:
        """Set what is chosen in the params of a task."""
        _set(params, self.best.schedule, self.best.cells_per_device, self.best.recompute)
        if self.best.num_micro_batches is not None:
            params.model.num_micro_batches = self.best.num_micro_batches
        if not params.model.cells:
            params.model.cuts = self.best.plan.analysis.cuts

    def lines(self) -> list[str]:
        """Return what was chosen, and from what, as text."""
        plan = self.best.plan
        if self.limit_bytes is None:
            memory = "memory is not limited; model.device_memory limits it"
        else:
            memory = f"within {units.size(self.limit_bytes)}"
        return [
            f"auto: {self.best.name}; devices wait {units.percent(plan.bubble_share)} of the step, "
            f"the heaviest needs {units.size(plan.heaviest_bytes)}",
            f"{len(self.fitting)} combinations were compared, {self.num_refused} do not fit; "
            f"{memory}",
            *([] if plan.cluster is None else [plan.links_text]),
            *filter(None, [self.note]),
        ]


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
    counts, note = _counts(task, is_measured=profile, goes_on=goes_on)
    limit_bytes = memory_limit(task.model, cluster)
    search = _Search(task, cluster, limit_bytes, profile=profile)
    for count in counts:
        search.plan_all(count)
    if not search.fitting:
        raise search.refusal()
    best = search.fastest_measured() if profile else _preferred(search.fitting)
    return Choice(best, tuple(search.fitting), len(search.refused), limit_bytes, note)


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
    if kept and _NUM_MICRO_BATCHES in kept and _has_open_count(task.model):
        result.override(f"{_NUM_MICRO_BATCHES}={kept[_NUM_MICRO_BATCHES]}")
    if kept and "model.schedule" in kept and _keeps(task.model, kept, trains=trains):
        chosen = ["schedule", "cells_per_device", "recompute"]
        if task.model.cuts is None:
            chosen.append("cuts")
        for path in (f"model.{field}" for field in chosen):
            if path in kept:
                result.override(f"{path}={kept[path]}")
        if result.model.schedule != schedule.AUTO:
            report(
                f"the run keeps its schedule, {result.model.schedule}: --schedule=NAME changes it"
            )
            return result
    if kept and not _has_devices_of(task.model, kept):
        result.model.cuts = None  # they are for the devices of the run
    choice = choose(result, profile=profile, cluster=cluster, goes_on=kept is not None)
    choice.set_in(result)
    report("\n".join(choice.lines()))
    return result


def memory_limit(model: network.PipelineParams, cluster: hosts.Hosts | None) -> int | None:
    """Return the bytes of a device, as params or hosts state them; None: neither does."""
    stated = None if model.device_memory is None else units.parse_size(model.device_memory)
    limits = [stated, None if cluster is None else cluster.memory]
    return min((limit for limit in limits if limit is not None), default=None)


def smallest(task: Task.Params) -> Task.Params:
    """Return a task with a schedule that can always be made, and the smallest micro-batches.

    M is the largest one that `choose` would try.
    """
    return _unscheduled(task, _counts(task, is_measured=False, goes_on=False)[0][-1])


def _keeps(model: network.PipelineParams, kept: Mapping[str, str], *, trains: bool) -> bool:
    """Return whether a run that goes on keeps its choice; see `resolved`."""
    if not _has_devices_of(model, kept):
        return False
    stated = ["device_memory"] if trains else []
    if trains and model.cells_per_device is not None:
        stated.append("cells_per_device")
    if trains and model.recompute != "full":
        stated.append("recompute")
    return all(kept.get(f"model.{field}") in (None, repr(model.get(field))) for field in stated)


def _has_devices_of(model: network.PipelineParams, kept: Mapping[str, str]) -> bool:
    return kept.get("model.num_partitions") == repr(model.num_partitions)


class _Search:
    """Plans candidates of a task.

    Attributes:
        fitting: those that fit the memory of a device.
        too_large: those that do not.
        refused: errors of those that cannot be planned, and what `too_large` needs.
    """

    def __init__(
        self,
        task: Task.Params,
        cluster: hosts.Hosts | None,
        limit_bytes: int | None,
        *,
        profile: bool,
    ) -> None:
        self.fitting: list[Candidate] = []
        self.too_large: list[Candidate] = []
        self.refused: list[str] = []
        self._task = task.copy()
        if limit_bytes is not None:  # hosts may state it
            self._task.model.device_memory = f"{limit_bytes}B"
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._profile = profile
        self._known: dict[int | None, step_plan.Known] = {}

    def plan_all(self, count: int | None) -> None:
        """Plan every combination with M micro-batches; None: as many as the task has."""
        self._known[count] = step_plan.known_of(
            _unscheduled(self._task, count), profile=self._profile
        )
        recompute = self._task.model.recompute
        policies = POLICIES if recompute == "full" else (recompute,)
        for name, cells in _schedules(self._task.model.cells_per_device):
            for policy in policies:
                is_fitting = self._attempt(name, cells, policy, count)
                if is_fitting and policy == POLICIES[0]:
                    break

    def _attempt(self, name: str, cells: int, policy: str, count: int | None) -> bool:
        """Plan a combination; return whether it fits."""
        try:
            plan = self._plan(name, cells, policy, count)
        except errors.UserError as error:
            self.refused.append(str(error).splitlines()[0])
            return False
        fits = self._limit_bytes is None or plan.heaviest_bytes <= self._limit_bytes
        candidate = Candidate(name, cells, policy, count, plan)
        (self.fitting if fits else self.too_large).append(candidate)
        if not fits:
            self.refused.append(f"{candidate.name} needs {units.size(plan.heaviest_bytes)}")
        return fits

    def _plan(
        self, name: str, cells: int, policy: str, count: int | None, *, by_programs: bool = False
    ) -> step_plan.Plan:
        task = _unscheduled(self._task, count)
        _set(task, name, cells, policy)
        known = self._known[count]
        return step_plan.make_for(task, cluster=self._cluster, known=known, profile=by_programs)

    def fastest_measured(self) -> Candidate:
        """Return the candidate with the shortest step by the measured programs of its cells.

        A cell takes longer than its layers one by one, and the more so the more programs its device
        runs. So candidates with few programs are measured first. One with more is measured, and
        taken, only if it is shorter by more than the tolerance.
        """
        best, best_s = self.fitting[0], math.inf
        by_programs = sorted(self.fitting, key=lambda candidate: candidate.programs)
        for _, alike in itertools.groupby(by_programs, key=lambda candidate: candidate.programs):
            candidate = _preferred(list(alike))
            if candidate.plan.mini_batch_s >= (1 - _TOLERANCE) * best_s:
                continue
            measured_s = self._plan(
                candidate.schedule,
                candidate.cells_per_device,
                candidate.recompute,
                candidate.num_micro_batches,
                by_programs=True,
            ).mini_batch_s
            if measured_s < (1 - _TOLERANCE) * best_s:
                best, best_s = candidate, measured_s
        return best

    def refusal(self) -> errors.PartitionError:
        """Return the error of a task of which no combination fits."""
        if not self.too_large:
            return errors.PartitionError(f"no schedule can be planned: {self.refused[-1]}")
        least = min(self.too_large, key=lambda candidate: candidate.plan.heaviest_bytes)
        return errors.PartitionError(
            f"no schedule fits {units.size(self._limit_bytes or 0)} on a device: {least.name} "
            f"needs {units.size(least.plan.heaviest_bytes)}. Raise num_partitions or "
            "num_micro_batches"
        )


def _preferred(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest candidate whose step is at most 3 % longer than the shortest."""
    shortest_s = min(candidate.plan.mini_batch_s for candidate in candidates)
    equal = (c for c in candidates if c.plan.mini_batch_s <= (1 + _TOLERANCE) * shortest_s)
    return min(
        equal,
        key=lambda candidate: (
            candidate.num_micro_batches or 1,
            candidate.programs,
            candidate.plan.heaviest_bytes,
        ),
    )


def _set(params: Task.Params, name: str, cells: int, policy: str) -> None:
    params.model.set(schedule=name, cells_per_device=cells, recompute=policy)


def _unscheduled(task: Task.Params, count: int | None) -> Task.Params:
    """Return a task with a schedule that can always be made, and with M micro-batches."""
    result = task.copy()
    _set(result, "gpipe", 1, "full")
    if count is not None:
        result.model.num_micro_batches = count
    return result


def _schedules(cells_per_device: int | None) -> Iterable[tuple[str, int]]:
    """Return every schedule with each number of cells per device that it may have.

    Raises:
        ScheduleError: none has the number of cells that is stated.
    """

    def all_schedules() -> Iterator[tuple[str, int]]:
        for name, named in schedule.SCHEDULES.items():
            if name == "optimal":  # a search, for small tables
                continue
            for cells in range(named.cells_per_device, _MOST_CELLS + 1):
                try:
                    schedule.make(name, 2, 2, cells)
                except errors.ScheduleError:
                    continue  # it has no such tables
                yield name, cells

    found = [each for each in all_schedules() if cells_per_device in (None, each[1])]
    if not found:
        raise errors.ScheduleError(
            f"cells_per_device={cells_per_device}, but --schedule=auto tries 1 to {_MOST_CELLS}. "
            "Name a schedule, or leave --cells_per_device out"
        )
    return found


def _counts(
    task: Task.Params, *, is_measured: bool, goes_on: bool
) -> tuple[Sequence[int | None], str]:
    """Return which M are tried, rising (None: that of the task), and why M stays if it is open."""
    model, fields = task.model, describe.fields_of(task)
    num_examples = micro_batches.batch_size(fields, model.batch_dim, model.unbatched)
    num_devices = model.num_partitions * model.num_replicas
    if not _has_open_count(model) or min(num_devices, num_examples) == 1:
        return [None], ""
    layers = network.layer_params(model)
    if goes_on:
        reason: str | None = "the run began so"
    elif not is_measured and (model.costs or any(layer.cost is not None for layer in layers)):
        reason = "costs are stated for micro-batches of one size"
    else:
        reason = micro_batch_dependence.reason(network.analyze(network.uncut(model), fields))
    if reason is not None:
        return [None], f"M stays 1: {reason}. --num_micro_batches sets it"
    return micro_batches.counts(num_examples, model.num_partitions, model.num_replicas), ""


def _has_open_count(model: network.PipelineParams) -> bool:
    """Return whether nobody has set how a mini-batch is divided."""
    return model.num_micro_batches == 1 and model.micro_batch_size is None
