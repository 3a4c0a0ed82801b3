"""`--schedule=auto`: schedule, cells per device and recompute policies with the shortest step.

Every candidate is planned by the same simulator as any other model. Those that do not fit the
memory of a device are out; of those whose steps are equally short, the one that needs least is
taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import hosts, step_plan
from lingvo_gpipe.task import Task

POLICIES = ("full", "early", "never")
_DEVICES = "model.num_partitions"
_CHOSEN = ("model.schedule", "model.cells_per_device", "model.recompute")
_MOST_CELLS = 3  # per device
_EQUAL_SHARE = 0.005  # steps that differ by less are equally short
_MIXED = 4  # of how many of the fastest candidates some cells may keep their forwards
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the network, and its plan.

    Attributes:
        schedule: name of the schedule.
        cells_per_device: V.
        recompute: recompute policy of every cell, or one for each.
        plan: its plan; None: it cannot be planned.
        refusal: why not.
        refused_by_memory: whether it is that no cut fits a device.
    """

    schedule: str
    cells_per_device: int
    recompute: str
    plan: step_plan.Plan | None
    refusal: str = ""
    refused_by_memory: bool = False

    @property
    def name(self) -> str:
        """Return it as flags are written."""
        cells = f" V={self.cells_per_device}" if self.cells_per_device > 1 else ""
        return f"{self.schedule}{cells} {self.recompute}"

    @property
    def reason(self) -> str:
        """Return why it cannot be planned; one reason for all that a cap on memory refuses."""
        if self.refused_by_memory:
            return "no cut fits"
        return self.refusal.partition(". ")[0]

    def set_in(self, params: Task.Params) -> None:
        """Set its fields in the params of a task."""
        params.model.set(
            schedule=self.schedule,
            cells_per_device=self.cells_per_device,
            recompute=self.recompute,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Candidates, from the best one on.

    Attributes:
        fitting: those that fit, in order.
        too_large: those that need more memory than a device has, the smallest first.
        refused: those that cannot be planned.
        limit_bytes: memory of a device; None: not limited.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    limit_bytes: int | None

    @property
    def best(self) -> Candidate:
        """The one that is taken."""
        return self.fitting[0]

    def lines(self) -> list[str]:
        """Return a table of the best candidates, and why the others are not among them."""
        best = _plan(self.best)
        rows = [["auto", "step", "waiting", "heaviest device"]]
        for candidate in self.fitting[:_SHOWN]:
            plan = _plan(candidate)
            share = plan.step_s / best.step_s
            rows.append(
                [
                    candidate.name,
                    units.percent(share),
                    units.percent(plan.bubble_share),
                    units.size(plan.heaviest_bytes),
                ]
            )
        lines = units.table(rows, "lrrr")
        slower = self.fitting[_SHOWN:]
        if slower:
            shares = [_plan(candidate).step_s / best.step_s for candidate in slower]
            lines.append(
                f"slower, or as fast with more memory: {len(slower)} others, of {min(shares):.0%} "
                f"to {max(shares):.0%}"
            )
        if self.too_large and self.limit_bytes is not None:
            least = _plan(self.too_large[0]).heaviest_bytes
            names = ", ".join(candidate.name for candidate in self.too_large)
            lines.append(
                f"more than {units.size(self.limit_bytes)} on a device, at least "
                f"{units.size(least)}: {names}"
            )
        if self.limit_bytes is None:
            lines.append("memory is not limited; model.device_memory limits it")
        for reason, group in itertools.groupby(self.refused, lambda one: one.reason):
            lines.append(f"{reason}: {', '.join(one.name for one in group)}")
        return lines


def choose(
    task: Task.Params, *, profile: bool = False, cluster: hosts.Hosts | None = None
) -> Choice:
    """Plan all candidates of a task.

    Args:
        task: params of a task, complete. If it sets cells per device, or policies other than
            `full`, only these are tried.
        profile: measures the time of each layer on this machine; else FLOPs count.
        cluster: see `step_plan.make`.

    Raises:
        UserError: no candidate can be planned, or none fits.
    """
    limits = [cluster.memory if cluster else None]
    if task.model.device_memory is not None:
        limits.append(units.parse_size(task.model.device_memory))
    limit_bytes = min(filter(None, limits), default=None)
    known = step_plan.known_of(unscheduled(task), profile=profile)

    def attempt(name: str, cells: int, recompute: str) -> Candidate:
        return _candidate(task, Candidate(name, cells, recompute, None), known, cluster)

    wanted = task.model.cells_per_device
    schedules = [each for each in _schedules() if wanted in (None, each[1])]
    if not schedules:
        raise errors.ScheduleError(
            f"cells_per_device={wanted}, but --schedule=auto tries 1 to {_MOST_CELLS}. Name a "
            "schedule, or leave --cells_per_device out"
        )
    policies = POLICIES if task.model.recompute == "full" else (task.model.recompute,)
    candidates = [
        attempt(name, cells, recompute)
        for (name, cells), recompute in itertools.product(schedules, policies)
    ]
    planned = [candidate for candidate in candidates if candidate.plan is not None]
    if not planned:
        raise errors.PartitionError(f"no schedule can be planned: {candidates[0].refusal}")

    def fits(candidate: Candidate) -> bool:
        return limit_bytes is None or _plan(candidate).heaviest_bytes <= limit_bytes

    fitting = sorted(filter(fits, planned), key=lambda one: _plan(one).step_s)
    if limit_bytes is not None:
        recomputing = [one for one in fitting if one.recompute != "never"][:_MIXED]
        mixed = [_kept_where_it_fits(one, attempt, fits) for one in recomputing]
        fitting = sorted([*filter(None, mixed), *fitting], key=lambda one: _plan(one).step_s)
    too_large = sorted(
        itertools.filterfalse(fits, planned), key=lambda one: _plan(one).heaviest_bytes
    )
    if not fitting:
        least = _plan(too_large[0]).heaviest_bytes
        raise errors.PartitionError(
            f"no schedule fits {units.size(limit_bytes or 0)} on a device: {too_large[0].name} "
            f"needs {units.size(least)}. Raise num_partitions or num_micro_batches"
        )
    return Choice(
        tuple(_ordered(fitting)),
        tuple(too_large),
        tuple(sorted((c for c in candidates if c.plan is None), key=lambda one: one.reason)),
        limit_bytes,
    )


def unscheduled(task: Task.Params) -> Task.Params:
    """Return a task with a schedule that can always be made."""
    result = task.copy()
    result.model.set(schedule="gpipe", cells_per_device=None, recompute="full")
    return result


def _schedules() -> Iterator[tuple[str, int]]:
    """Yield every schedule with each number of cells per device that it may have."""
    for name, named in schedule.SCHEDULES.items():
        if name == "optimal":  # a search, for small tables
            continue
        for cells in range(named.cells_per_device, _MOST_CELLS + 1):
            try:
                schedule.make(name, 2, 2, cells)
            except errors.ScheduleError:
                continue  # it has no such tables
            yield name, cells


def _candidate(
    task: Task.Params,
    candidate: Candidate,
    known: step_plan.Known,
    cluster: hosts.Hosts | None,
) -> Candidate:
    """Plan a candidate; return it with its plan, or with the error that refused it."""
    tried = task.copy()
    candidate.set_in(tried)
    try:
        plan = step_plan.make_for(tried, cluster=cluster, known=known)
    except errors.UserError as error:
        return dataclasses.replace(
            candidate,
            refusal=str(error).splitlines()[0],
            refused_by_memory=isinstance(error, errors.CapacityError),
        )
    return dataclasses.replace(candidate, plan=plan)


def _kept_where_it_fits(
    start: Candidate,
    attempt: Callable[[str, int, str], Candidate],
    fits: Callable[[Candidate], bool],
) -> Candidate | None:
    """Return a candidate with `never` in the cells where memory is left; None: it is not faster.

    Cells are tried one after the other, from the one that computes longest.
    """
    found = start
    cells = _plan(start).cells
    policies = [start.recompute] * len(cells)
    for k in sorted(range(len(cells)), key=lambda k: -cells[k].forward_s):
        tried = [*policies[:k], "never", *policies[k + 1 :]]
        candidate = attempt(start.schedule, start.cells_per_device, ",".join(tried))
        is_faster = candidate.plan is not None and candidate.plan.step_s <= _plan(found).step_s
        if is_faster and fits(candidate):
            found, policies = candidate, tried
    return found if _plan(found).step_s < _plan(start).step_s and len(set(policies)) > 1 else None


def _ordered(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates by time; those that are equally short by memory."""
    left, found = list(fitting), []
    while left:
        shortest_s = _plan(left[0]).step_s
        equal = [c for c in left if _plan(c).step_s <= (1 + _EQUAL_SHARE) * shortest_s]
        found += sorted(equal, key=lambda one: _plan(one).heaviest_bytes)
        left = left[len(equal) :]
    return found


def _plan(candidate: Candidate) -> step_plan.Plan:
    if candidate.plan is None:
        raise ValueError(f"{candidate.name} has no plan")
    return candidate.plan


def resolved(
    task: Task.Params, report: Callable[[str], None], *, kept: Mapping[str, str] | None = None
) -> Task.Params:
    """Return a task whose schedule is chosen, if it is to be.

    Args:
        task: params of a task, complete.
        report: receives the table of the choice.
        kept: path → value as text, of the run that goes on; its choice is kept if it is for as many
            devices.
    """
    if task.model.schedule != schedule.AUTO:
        return task
    result = task.copy()
    same = kept is not None and kept.get(_DEVICES) == repr(task.model.num_partitions)
    if kept is not None and same:
        for path in _CHOSEN:
            if path in kept:  # older runs have not all of them
                result.override(f"{path}={kept[path]}")
        if result.model.schedule != schedule.AUTO:
            return result
    choice = choose(task)
    choice.best.set_in(result)
    report("\n".join(choice.lines()))
    return result
