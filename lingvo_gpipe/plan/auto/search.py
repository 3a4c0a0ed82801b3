"""Planning candidates of a task within the memory of a device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.network.cutting import partition
from lingvo_gpipe.network.params import stated_cuts
from lingvo_gpipe.plan import hosts, step_plan
from lingvo_gpipe.plan.auto import finalists
from lingvo_gpipe.plan.auto.candidate import Candidate, Kind
from lingvo_gpipe.task import Task

POLICIES = ("full", "early", "never", "except_last")
_KEEPS_MORE = {"except_last": "never"}  # which is as fast or faster, where it fits
_MOST_CELLS = 3  # per device
_MIXED = 4  # of how many of the fastest candidates some cells may keep their forwards
_MOST_TRIED = 16  # ways to do so, of each: with up to 8 cells all that may fit
_LINK_SHARES = (1.0, 0.25)  # of the time that a link takes, counted as work of both its cells
_LEAST_GAIN = 0.005  # of a step, for which another cut is taken


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """All candidates for one M; `fitting` by time, `too_large` by memory."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]


class Search:
    """Plans candidates of a task within the memory of a device."""

    def __init__(
        self, task: Task.Params, *, profile: bool = False, cluster: hosts.Hosts | None = None
    ) -> None:
        self._task = task
        self._profile = profile
        self._cluster = cluster
        self._known: dict[int | None, step_plan.Known] = {}
        self._ratios: dict[Kind, float] = {}
        limits = [cluster.memory if cluster else None]
        if task.model.device_memory is not None:
            limits.append(units.parse_size(task.model.device_memory))
        self.limit_bytes = min(filter(None, limits), default=None)

    def known(self, count: int | None) -> step_plan.Known:
        """Return what is known of all plans for an M; measured times are those of each M."""
        key = count if self._profile else None
        if key not in self._known:
            task = unscheduled(self._task, count)
            self._known[key] = step_plan.known_of(task, profile=self._profile)
        return self._known[key]

    def attempt(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its plan, or with the error that refused it.

        A cut that it had is forgotten. That of the params balances work alone, and knows neither
        memory nor links that only the hosts state: where others fit, or are faster, the fastest is
        taken.
        """
        first = self._planned(dataclasses.replace(candidate, even=None))
        found = first
        for settings in self._other_cuts(first):
            other = self._planned(dataclasses.replace(candidate, even=first.plan), **settings)
            wanted_s = (1 - _LEAST_GAIN) * found.step_s if self.fits(found) else math.inf
            if self.fits(other) and other.step_s < wanted_s:
                found = other
        return found

    def _other_cuts(self, first: Candidate) -> Iterator[dict[str, Any]]:
        """Yield params of the network that may cut it better than it is cut.

        Args:
            first: a candidate with the cut of its params.
        """
        model, cluster = self._task.model, self._cluster
        if first.plan is None or cluster is None or stated_cuts(model) is not None:
            return
        within: dict[str, Any] = {}
        if self.limit_bytes is not None:
            within["device_memory"] = f"{self.limit_bytes}B"
        if not self.fits(first):
            yield within
        order, counts_links = first.plan.order, first.plan.counts_links
        if order is None or not counts_links or model.link_cost_per_byte:
            return
        slowest = hosts.slowest_link(cluster, order, first.plan.analysis)
        if slowest is not None:
            unit = 1.0 if self._profile else float(cluster.flops or 1)  # of layers' costs
            for share in _LINK_SHARES:
                yield {"link_cost_per_byte": share * unit / slowest, **within}

    def _planned(self, candidate: Candidate, **settings: Any) -> Candidate:
        """Return a candidate with its plan, or with the error that refused it.

        Args:
            candidate: what is planned.
            settings: params of the network, name → value.
        """
        tried = self._task.copy()
        dataclasses.replace(candidate, even=None).set_in(tried)
        tried.model.set(**settings)
        known = self.known(candidate.num_micro_batches)
        try:
            plan = step_plan.make_for(tried, cluster=self._cluster, known=known)
        except errors.UserError as error:
            return dataclasses.replace(
                candidate,
                plan=None,
                refusal=str(error).splitlines()[0],
                refused_by_memory=isinstance(error, partition.NoCutFitsError),
            )
        return self._corrected(dataclasses.replace(candidate, plan=plan))

    def correct(self, found: Found) -> Found:
        """Measure the programs of the fastest candidates, which correct all times from now on.

        Args:
            found: candidates, of which at least one fits.

        Returns:
            The same candidates with corrected times.
        """
        self._ratios = finalists.ratios(found.fitting, self.measured_s)
        fitting = sorted(map(self._corrected, found.fitting), key=lambda one: one.step_s)
        return dataclasses.replace(found, fitting=tuple(fitting))

    def measured_s(self, candidate: Candidate) -> float | None:
        """Return the seconds of a candidate's step by the programs of its cells.

        Args:
            candidate: one that has a plan.

        Returns:
            None if they cannot be measured: for lack of memory, or because there is no loss.
        """
        tried = self._task.copy()
        candidate.set_in(tried)
        known = self.known(candidate.num_micro_batches)
        try:
            plan = step_plan.make_for(tried, profile=True, cluster=self._cluster, known=known)
        except tf.errors.ResourceExhaustedError:
            return None
        return plan.mini_batch_s if plan.by_programs else None

    def _corrected(self, candidate: Candidate) -> Candidate:
        largest = max(self._ratios.values(), default=1.0)
        ratio = self._ratios.get(candidate.kind, largest)
        return dataclasses.replace(candidate, correction=ratio)

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate has a plan within the memory."""
        if candidate.plan is None:
            return False
        return self.limit_bytes is None or candidate.plan.heaviest_bytes <= self.limit_bytes

    def all(self, count: int | None) -> Found:
        """Plan every schedule that the task leaves open, for one M."""
        wanted = self._task.model.cells_per_device
        schedules = [each for each in _schedules() if wanted in (None, each[1])]
        if not schedules:
            raise errors.ScheduleError(
                f"cells_per_device={wanted}, but --schedule=auto tries 1 to {_MOST_CELLS}. Name a "
                "schedule, or leave --cells_per_device out"
            )
        recompute = self._task.model.recompute
        policies = POLICIES if recompute == "full" else (recompute,)
        candidates = [
            candidate
            for name, cells in schedules
            for candidate in self._with_each(Candidate(name, cells, "", count), policies)
        ]
        planned = [candidate for candidate in candidates if candidate.plan is not None]
        too_large = itertools.filterfalse(self.fits, planned)
        return Found(
            fitting=tuple(sorted(filter(self.fits, planned), key=lambda one: one.step_s)),
            too_large=tuple(sorted(too_large, key=lambda one: one.planned.heaviest_bytes)),
            refused=tuple(c for c in candidates if c.plan is None),
        )

    def _with_each(self, start: Candidate, policies: Sequence[str]) -> Iterator[Candidate]:
        """Yield a candidate with each policy; not with one that keeps less than one that fits."""
        fitting: set[str] = set()
        for policy in policies:
            if _KEEPS_MORE.get(policy) in fitting:
                continue
            candidate = self.attempt(dataclasses.replace(start, recompute=policy))
            if self.fits(candidate):
                fitting.add(policy)
            yield candidate

    def fastest(self, probes: Iterable[Candidate], count: int | None) -> Candidate | None:
        """Return the fastest of some candidates with another M; None: none of them fits."""
        others = (dataclasses.replace(one, num_micro_batches=count) for one in probes)
        return min(
            filter(self.fits, map(self.attempt, others)), key=lambda one: one.step_s, default=None
        )

    def with_mixed(self, fitting: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates, and those that are faster because some cells keep their forwards."""
        if self.limit_bytes is None:
            return list(fitting)
        recomputing = [one for one in fitting if one.recompute != "never"][:_MIXED]
        mixed = map(self._kept_where_it_fits, recomputing)
        return sorted([*filter(None, mixed), *fitting], key=lambda one: one.step_s)

    def _kept_where_it_fits(self, start: Candidate) -> Candidate | None:
        """Return a candidate with `never` where memory is left; None: it is not faster.

        Cells are tried from the one that computes longest on: all together, then by halves.
        """
        found = start
        cells = start.planned.cells
        policies = [start.recompute] * len(cells)
        groups = [sorted(range(len(cells)), key=lambda k: -cells[k].forward_s)]
        for _ in range(_MOST_TRIED):
            if not groups:
                break
            group = groups.pop(0)
            tried = ["never" if k in group else policy for k, policy in enumerate(policies)]
            candidate = self.attempt(dataclasses.replace(start, recompute=",".join(tried)))
            if self.fits(candidate) and candidate.step_s <= found.step_s:
                found, policies = candidate, tried
            elif len(group) > 1:
                half = (len(group) + 1) // 2
                groups[:0] = [group[:half], group[half:]]
        return found if found.step_s < start.step_s and len(set(policies)) > 1 else None


def unscheduled(task: Task.Params, count: int | None = None) -> Task.Params:
    """Return a task with a schedule that can always be made.

    Args:
        task: params of a task.
        count: M; None: that of the task.
    """
    result = task.copy()
    Candidate("gpipe", 1, "full", count).set_in(result)
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
