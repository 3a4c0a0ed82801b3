"""The choice of `--schedule=auto`, its table, and a run that keeps it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import hosts
from lingvo_gpipe.plan.auto import compilation
from lingvo_gpipe.plan.auto.candidate import Candidate, equality, near, ordered
from lingvo_gpipe.plan.auto.counts import counts_of, has_open_count
from lingvo_gpipe.plan.auto.search import Found, Search, unscheduled
from lingvo_gpipe.task import Task

_DEVICES = "model.num_partitions"
_CUTS = "model.cuts"
_NUM_MICRO_BATCHES = "model.num_micro_batches"
_JIT = "model.jit_compile"
_CELLS_PER_DEVICE = "model.cells_per_device"
_RECOMPUTE = "model.recompute"
_MEMORY = "model.device_memory"
_CHOSEN = ("model.schedule", _CELLS_PER_DEVICE, _RECOMPUTE)
_NEARLY_EQUAL_SHARE = 0.03  # by formula, which does not count what a call costs
_PROBED = 2  # of the fastest candidates for one M, for which other M are tried
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Candidates, from the best one on, all for the same M.

    Attributes:
        fitting: those that fit, in order.
        too_large: those that need more memory than a device has, the smallest first.
        refused: those that cannot be planned.
        limit_bytes: memory of a device; None: not limited.
        other_counts: the fastest that was found for each other M.
        note: how M was chosen, or why it was not; empty: it is set.
        is_measured: whether by measured times, by which cells are then cut, too.
        compiled: which cells of the best one XLA compiles; None: not to be chosen.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    limit_bytes: int | None
    other_counts: tuple[Candidate, ...] = ()
    note: str = ""
    is_measured: bool = False
    compiled: compilation.Compilation | None = None

    @property
    def best(self) -> Candidate:
        """The one that is taken."""
        return self.fitting[0]

    def set_in(self, params: Task.Params) -> None:
        """Set what is chosen in the params of a task."""
        self.best.set_in(params)
        if self.is_measured:  # on another day, times would be others
            params.model.cuts = self.best.cuts
        if self.compiled is not None:
            self.compiled.set_in(params)

    def lines(self) -> list[str]:
        """Return a table of the best candidates, and why the others are not among them."""
        best = self.best.planned
        rows = [["auto", "step", "waiting", "heaviest device"]]
        for candidate in (*self.fitting[:_SHOWN], *self.other_counts):
            plan = candidate.planned
            share = candidate.step_s / self.best.step_s
            rows.append(
                [
                    candidate.name,
                    units.percent(share),
                    units.percent(plan.bubble_share),
                    units.size(plan.heaviest_bytes),
                ]
            )
        lines = [*units.table(rows, "lrrr"), *filter(None, [self.note])]
        lines += filter(None, [self._cut()])
        if any(one.step_s < self.best.step_s for one in self.fitting):
            lines.append(equality(is_measured=self.is_measured))
        slower = self.fitting[_SHOWN:]
        if slower:
            shares = [candidate.step_s / self.best.step_s for candidate in slower]
            lines.append(
                f"slower, or as fast with more {'cells or ' * self.is_measured}memory: "
                f"{len(slower)} others, of {min(shares):.0%} to {max(shares):.0%}"
            )
        if self.too_large and self.limit_bytes is not None:
            least = self.too_large[0].planned.heaviest_bytes
            names = ", ".join(one.name_at_equal_count for one in self.too_large)
            lines.append(
                f"more than {units.size(self.limit_bytes)} on a device, at least "
                f"{units.size(least)}: {names}"
            )
        if self.limit_bytes is None:
            lines.append("memory is not limited; model.device_memory limits it")
        if best.cluster is not None and best.cluster.states_speeds:
            lines.append(
                "links count at the speeds of --hosts"
                if best.counts_links
                else "links are taken as free: they count with flops= of --hosts, or --profile"
            )
        for reason, group in itertools.groupby(self.refused, lambda one: one.reason):
            lines.append(f"{reason}: {', '.join(one.name_at_equal_count for one in group)}")
        if self.compiled is not None:
            lines.append(self.compiled.line())
        return lines

    def _cut(self) -> str:
        """Return why the best one is not cut evenly; nothing if it is."""
        even, best = self.best.even, self.best.planned
        if even is None:
            return ""
        cuts = ", ".join(map(str, self.best.cuts))
        if self.limit_bytes is not None and even.heaviest_bytes > self.limit_bytes:
            why = f"needs {units.size(even.heaviest_bytes)} on a device"
        else:
            why = f"takes {even.mini_batch_s / best.mini_batch_s - 1:.1%} longer over these links"
        return f"cells of {cuts} layers: the even cut {why}"


def choose(
    task: Task.Params,
    *,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    goes_on: bool = False,
) -> Choice:
    """Plan the candidates of a task.

    Without measured times, M is the smallest one with which the step is nearly as short as with any
    other: more micro-batches always shorten a step whose time is counted in FLOPs, and only
    measured times show what a call costs.

    Args:
        task: params of a task, complete. If it sets cells per device, or policies other than
            `full`, only these are tried.
        profile: measures the time of each layer on this machine, for each M, and the programs of
            the cells of the fastest candidates; else FLOPs count.
        cluster: see `step_plan.make`.
        goes_on: whether a run goes on, whose M stays.

    Raises:
        UserError: no candidate can be planned, or none fits.
    """
    compilation.check(task.model, profile=profile)
    search = Search(task, profile=profile, cluster=cluster)
    counts = counts_of(task, is_measured=profile, goes_on=goes_on)
    searched: dict[int | None, Found] = {}
    for count in counts.in_turn:
        searched[count] = search.all(count)
        if searched[count].fitting:
            break
    else:
        raise _refusal(searched, search.limit_bytes)
    if profile:
        searched[count] = search.correct(searched[count])
    probes = _probes(searched[count])
    by_count = {each: search.fastest(probes, each) for each in counts.numbers if each != count}
    fastest = [searched[count].fitting[0], *filter(None, by_count.values())]
    fastest.sort(key=lambda one: one.step_s)
    best = _with_best_count(fastest, is_measured=profile)
    chosen = best.num_micro_batches
    if chosen not in searched:
        searched[chosen] = search.all(chosen)
    found = searched[chosen]
    choice = Choice(
        tuple(ordered(search.with_mixed(found.fitting), is_measured=profile)),
        found.too_large,
        tuple(sorted(found.refused, key=lambda one: one.reason)),
        search.limit_bytes,
        tuple(sorted((one for one in fastest if one is not best), key=lambda one: one.count)),
        counts.note or _note(fastest, chosen, counts.numbers, is_measured=profile),
        is_measured=profile,
    )
    if not compilation.is_open(task.model):
        return choice
    tried = task.copy()
    choice.set_in(tried)
    return dataclasses.replace(choice, compiled=compilation.choose(tried))


def resolved(
    task: Task.Params,
    report: Callable[[str], None],
    *,
    kept: Mapping[str, str] | None = None,
    profile: bool = False,
    cluster: hosts.Hosts | None = None,
    trains: bool = True,
) -> Task.Params:
    """Return a task in which everything is chosen that is to be chosen.

    Args:
        task: params of a task, complete.
        report: receives the table of the choice.
        kept: path → value as text, of the run that goes on; its choice is kept if it is for as many
            devices, of as much memory, and the task sets no other cells per device or policies. Its
            M stays where the task does not set another one.
        profile: see `choose`; cells are then cut by measured times, too.
        cluster: see `choose`. A choice that is kept was made before, so this changes nothing of it.
        trains: whether the task is trained; else a run's choice is kept whatever the task sets.

    Raises:
        UserError: see `choose`.
    """
    if not task.model.has_open_choices:
        return task
    open_task = task.copy()
    chooses_schedule = task.model.schedule == schedule.AUTO
    if chooses_schedule and kept and _NUM_MICRO_BATCHES in kept and has_open_count(task.model):
        open_task.override(f"{_NUM_MICRO_BATCHES}={kept[_NUM_MICRO_BATCHES]}")
    has_devices = kept is not None and kept.get(_DEVICES) == repr(task.model.num_partitions)
    if kept and has_devices and not (trains and _sets_others(open_task, kept)):
        result = _as_kept(open_task, kept)
        if not result.model.has_open_choices:
            if chooses_schedule:
                changed = "--schedule=NAME changes it"
                if cluster is not None and _states_sizes(cluster):
                    changed = "--hosts changes it no more"
                report(f"the run keeps its schedule, {result.model.schedule}: {changed}")
            return result
    result = open_task.copy()
    if chooses_schedule and kept and not has_devices and _text(task, _CUTS) == kept.get(_CUTS):
        open_task.model.cuts = result.model.cuts = None  # they are for the run's devices
    if chooses_schedule:
        choice = choose(open_task, profile=profile, cluster=cluster, goes_on=kept is not None)
        choice.set_in(result)
        report("\n".join(choice.lines()))
    else:
        compilation.check(open_task.model, profile=profile)
        compiled = compilation.choose(open_task)
        compiled.set_in(result)
        report(compiled.line())
    return result


def _states_sizes(cluster: hosts.Hosts) -> bool:
    """Return whether more is known of hosts than how many there are, such as of workers."""
    return cluster != hosts.Hosts(cluster.count)


def _sets_others(task: Task.Params, kept: Mapping[str, str]) -> bool:
    """Return whether a task that is to be chosen for sets something else than a run has.

    Args:
        task: params of the task.
        kept: as in `_as_kept`.
    """
    if task.model.schedule != schedule.AUTO:
        return False
    paths = [_MEMORY]
    if task.model.cells_per_device is not None:
        paths.append(_CELLS_PER_DEVICE)
    if task.model.recompute != "full":
        paths.append(_RECOMPUTE)
    return any(path in kept and kept[path] != _text(task, path) for path in paths)


def _text(task: Task.Params, path: str) -> str:
    """Return the value of a field of the network as in the text of params."""
    return repr(getattr(task.model, path.removeprefix("model.")))


def _as_kept(task: Task.Params, kept: Mapping[str, str]) -> Task.Params:
    """Return a task with what a run has chosen, as far as the task leaves it open.

    Args:
        task: params of the task.
        kept: path → value as text, of the run; those of older runs have not all paths.
    """
    result = task.copy()
    paths = _CHOSEN if task.model.schedule == schedule.AUTO else ()
    if compilation.is_open(task.model):
        paths = (*paths, _JIT)
    for path in paths:
        if path in kept:
            result.override(f"{path}={kept[path]}")
    if task.model.cuts is None and _CUTS in kept:
        result.override(f"{_CUTS}={kept[_CUTS]}")
    return result


def smallest(task: Task.Params) -> Task.Params:
    """Return a task with a schedule that can always be made, and the smallest micro-batches.

    M is the largest one that `choose` would try.
    """
    return unscheduled(task, counts_of(task, is_measured=False, goes_on=False).numbers[-1])


def _probes(found: Found) -> list[Candidate]:
    """Return the candidates that are tried for other M.

    They are the fastest ones, the fastest of each policy, and the one that needs least memory.
    """
    by_policy = {one.recompute: one for one in reversed(found.fitting)}
    smallest = min(found.fitting, key=lambda one: one.planned.heaviest_bytes)
    probes = [*found.fitting[:_PROBED], *by_policy.values(), smallest]
    return list({one.name: one for one in probes}.values())


def _with_best_count(by_time: Sequence[Candidate], *, is_measured: bool) -> Candidate:
    """Return the candidate with the best M, from the fastest of each."""
    if is_measured:
        return ordered(by_time)[0]
    return min(near(by_time, _NEARLY_EQUAL_SHARE), key=lambda one: one.count)


def _note(
    fastest: Sequence[Candidate],
    chosen: int | None,
    counts: Sequence[int | None],
    *,
    is_measured: bool,
) -> str:
    """Return how M was chosen; nothing if there is no other."""
    if len(counts) == 1:
        return ""
    fitting = sorted(one.count for one in fastest)
    left = [str(count) for count in counts if count not in fitting]
    longest = f"at most {_NEARLY_EQUAL_SHARE:.0%} longer than the shortest"
    rule = "the shortest step" if is_measured else f"the smallest M whose step is {longest}"
    unfit = f"; of the fastest, none can run with {', '.join(left)}" if left else ""
    return f"M={chosen} of {', '.join(map(str, fitting))}: {rule}{unfit}"


def _refusal(
    searched: Mapping[int | None, Found], limit_bytes: int | None
) -> errors.PartitionError:
    """Return the error of a task of which no candidate fits, from those for each M."""
    too_large = [one for found in searched.values() for one in found.too_large]
    if not too_large:
        last = searched[max(searched, key=lambda count: count or 1)]
        return errors.PartitionError(f"no schedule can be planned: {last.refused[0].refusal}")
    smallest = min(too_large, key=lambda one: one.planned.heaviest_bytes)
    return errors.PartitionError(
        f"no schedule fits {units.size(limit_bytes or 0)} on a device: {smallest.name} needs "
        f"{units.size(smallest.planned.heaviest_bytes)}. Raise num_partitions or num_micro_batches"
    )
