"""The shortest table of a few cells and micro-batches, by branch and bound.

A clock ticks; at each tick every free device begins a slot or waits. F, I and W last one tick, B
two. Micro-batches are alike, so each cell takes them in order and the state of a search is only how
many of each slot are done: it is visited once. How far a search goes is a number of states and not
a time, so that the same table is found on every machine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule.slot import Phase, Slot
from lingvo_gpipe.schedule.table import Table

_Step = tuple["tuple[int, Phase] | None", ...]  # per device: cell and phase that begin at a tick


class SearchLimitError(ScheduleError):
    """A search was not done within its number of states."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What a table must be made for.

    Attributes:
        devices: per cell, the number of its device.
        num_micro_batches: M.
        split: whether backwards are I and W; else B.
        most_live: the most micro-batches that may be live on a device; None: any number.
    """

    devices: tuple[int, ...]
    num_micro_batches: int
    split: bool
    most_live: int | None = None

    @property
    def num_devices(self) -> int:
        """K."""
        return 1 + max(self.devices)

    def lower_bound(self) -> int:
        """Return ticks that every table takes, if not more.

        A device cannot begin before the cells before its first one, and has all its slots to run.
        The last cell cannot begin before all others, and what it returns goes back through them.

        >>> Problem((0, 1, 2, 3), 8, split=True).lower_bound()
        27
        """
        M, last = self.num_micro_batches, len(self.devices) - 1
        back = 1 if self.split else 2
        found = []
        for device in range(self.num_devices):
            cells = [cell for cell, home in enumerate(self.devices) if home == device]
            found.append(cells[0] + 3 * M * len(cells) + (0 if self.split else 2 * cells[0]))
        for cell in (0, last):
            found.append(cell + M * (1 + back) + cell * back + self.split)
        found.append((last + 1) * (1 + back) + self.split)
        return max(found)


def table_within(problem: Problem, ticks: int, max_states: int) -> tuple[Table | None, int]:
    """Search a table of at most `ticks`; return it (None: not found) and the number of states.

    Raises:
        SearchLimitError: neither was known after `max_states` states.
    """
    search = _Search(problem, ticks, max_states)
    done = search.run()
    return (search.table() if done else None), search.num_states


def least_ticks(problem: Problem, known: int, max_states: int) -> int | None:
    """Return the ticks of the shortest table, where one of `known` ticks is there.

    Returns:
        None where the search did not come to an end.

    >>> least_ticks(Problem((0, 1, 2, 2, 1, 0), 2, split=True, most_live=4), 16, max_states=1000)
    16
    """
    for ticks in range(problem.lower_bound(), known):
        try:
            found, seen = table_within(problem, ticks, max_states)
        except SearchLimitError:
            return None
        if found is not None:
            return ticks
        max_states -= seen
    return known


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """What has begun before a tick.

    Attributes:
        forwards: per cell, its F.
        backwards: per cell, its I, or its B.
        weights: per device, its W.
        busy: per device, the cell whose B runs for one tick more; -1: none.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    weights: tuple[int, ...]
    busy: tuple[int, ...]


class _Search:
    """Depth first; of states that are equal, one at an earlier tick is as good as any later one."""

    def __init__(self, problem: Problem, ticks: int, max_states: int) -> None:
        self._problem = problem
        self._M = problem.num_micro_batches
        self._back: Phase = "I" if problem.split else "B"
        self._ticks = ticks
        self._max_states = max_states
        self.num_states = 0
        self._failed: dict[_State, int] = {}
        self._steps: list[_Step] = []
        self._cells = [
            [cell for cell, home in enumerate(problem.devices) if home == device]
            for device in range(problem.num_devices)
        ]

    def run(self) -> bool:
        """Return whether there is a table; its steps are then known."""
        none = (0,) * len(self._problem.devices)
        idle = (-1,) * self._problem.num_devices
        first = _State(none, none, (0,) * self._problem.num_devices, idle)
        # A stack in place of recursion: a table may take more ticks than Python allows calls.
        stack = [self._after(first, 0)]
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                if self._steps:
                    self._steps.pop()
                continue
            step, state = following
            self._steps.append(step)
            if self._is_done(state):
                return True
            stack.append(self._after(state, len(self._steps)))
        return False

    def table(self) -> Table:
        """Return the table of the steps that were found."""
        orders: list[list[Slot]] = [[] for _ in self._cells]
        counts: dict[tuple[int, Phase], int] = {}
        waiting: list[list[Slot]] = [[] for _ in self._cells]
        for device, entry in itertools.chain.from_iterable(map(enumerate, self._steps)):
            if entry is None:
                continue
            cell, phase = entry
            if phase == "W":
                orders[device].append(waiting[device].pop(0))
                continue
            number = counts[entry] = counts.get(entry, -1) + 1
            orders[device].append(Slot(cell, phase, number))
            if phase == "I":
                waiting[device].append(Slot(cell, "W", number))
        return Table.on_grid(orders)

    def _is_done(self, state: _State) -> bool:
        if any(count < self._M for count in state.backwards):
            return False
        return not self._problem.split or all(
            count == self._M * len(cells)
            for count, cells in zip(state.weights, self._cells, strict=True)
        )

    def _after(self, state: _State, tick: int) -> Iterator[tuple[_Step, _State]]:
        """Yield what may begin at a tick and the state after it, the most urgent first."""
        self.num_states += 1
        if self.num_states > self._max_states:
            raise SearchLimitError(f"the search was not done after {self._max_states} states")
        if self._failed.get(state, self._ticks) <= tick or not self._may_end(state, tick):
            return
        self._failed[state] = tick
        options = [self._options(state, device) for device in range(len(self._cells))]
        for step in itertools.product(*options):
            if any(step) or any(cell >= 0 for cell in state.busy):
                yield step, self._next(state, step)

    def _options(self, state: _State, device: int) -> list[tuple[int, Phase] | None]:
        """Return the slots that a device may begin; None: it waits, or a B goes on."""
        if state.busy[device] >= 0:
            return [None]
        cells, most_live = self._cells[device], self._problem.most_live
        last = len(self._problem.devices) - 1
        found: list[tuple[int, Phase] | None] = []
        for cell in reversed(cells):
            count = state.backwards[cell]
            received = self._M if cell == last else self._ended(state, cell + 1)
            if count < min(state.forwards[cell], received):
                found.append((cell, self._back))
        begun = sum(state.backwards[cell] for cell in cells)
        ended = state.weights[device] if self._problem.split else begun
        live = sum(state.forwards[cell] for cell in cells) - ended
        for cell in reversed(cells):
            sent = self._M if cell == 0 else state.forwards[cell - 1]
            if state.forwards[cell] < sent and (most_live is None or live < most_live):
                found.append((cell, "F"))
        if self._problem.split and state.weights[device] < begun:
            found.append((cells[0], "W"))  # which one makes no difference; better than waiting
        else:
            found.append(None)
        return found

    def _ended(self, state: _State, cell: int) -> int:
        """Return how many gradients a cell has sent back."""
        return state.backwards[cell] - (state.busy[self._problem.devices[cell]] == cell)

    def _next(self, state: _State, step: _Step) -> _State:
        forwards, backwards = list(state.forwards), list(state.backwards)
        weights, busy = list(state.weights), [-1] * len(self._cells)
        for device, entry in enumerate(step):
            if entry is None:
                continue
            cell, phase = entry
            if phase == "F":
                forwards[cell] += 1
            elif phase == "W":
                weights[device] += 1
            else:
                backwards[cell] += 1
                busy[device] = cell if phase == "B" else -1
        return _State(tuple(forwards), tuple(backwards), tuple(weights), tuple(busy))

    def _may_end(self, state: _State, tick: int) -> bool:
        """Whether no bound says that the table would take too long."""
        left = self._ticks - tick
        M, split, last = self._M, self._problem.split, len(state.forwards) - 1
        back = 1 if split else 2
        for device, cells in enumerate(self._cells):
            own = sum(M - state.forwards[c] + back * (M - state.backwards[c]) for c in cells)
            if split:
                own += M * len(cells) - state.weights[device]
            if own + (state.busy[device] >= 0) > left:
                return False
        for cell, (forwards, backwards) in enumerate(
            zip(state.forwards, state.backwards, strict=True)
        ):
            if backwards == M:
                continue
            own = M - forwards + back * (M - backwards)
            if forwards < M:  # the last micro-batch has to go to the last cell and back
                own = max(own, M - forwards + (last - cell) * (1 + back) + back)
            if own + cell * back + split > left:
                return False
        return True
