"""The shortest table of a few cells and micro-batches, by branch and bound.

A clock ticks; at each tick every device begins F, I or W, which last one tick, or waits.
Micro-batches are alike, so each cell takes them in order and the state of a search is only how many
of each slot are done: it is visited once. How far a search goes is a number of states and not a
time, so that the same table is found on every machine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import orders
from lingvo_gpipe.schedule.table import Phase, Slot

_Step = tuple["tuple[int, Phase] | None", ...]  # per device: cell and phase that begin at a tick


class SearchLimitError(ScheduleError):
    """A search was not done within its number of states."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What a table must be made for.

    Attributes:
        devices: per cell, the number of its device.
        num_micro_batches: M.
        most_live: the most micro-batches that may be live on a device; None: any number.
    """

    devices: tuple[int, ...]
    num_micro_batches: int
    most_live: int | None = None

    @property
    def cells(self) -> list[list[int]]:
        """The cells of each device."""
        return [
            [cell for cell, home in enumerate(self.devices) if home == device]
            for device in range(1 + max(self.devices))
        ]

    def lower_bound(self) -> int:
        """Return ticks that every table takes, if not more.

        A device cannot begin before the cells before its first one, and has all its slots to run.
        The last cell cannot begin before all others, and what it returns goes back through them.

        >>> Problem((0, 1, 2, 3), 8).lower_bound()
        27
        """
        M = self.num_micro_batches
        busy = [cells[0] + 3 * M * len(cells) for cells in self.cells]
        return max(*busy, 2 * (len(self.devices) - 1) + 2 * M + 1)


def shortest_with_fewest_live(problem: Problem, max_states: int) -> list[list[Slot]]:
    """Return each device's order in a shortest table, of those one with the fewest live.

    Raises:
        SearchLimitError: it was not found, or not proved, within `max_states` states.
    """
    ticks, rows = problem.lower_bound() - 1, None
    while rows is None:
        ticks += 1
        rows, visited = orders_within(problem, ticks, max_states)
        max_states -= visited
    while True:
        most_live = max(map(orders.most_live, rows))
        fewer = dataclasses.replace(problem, most_live=most_live - 1)
        better, visited = orders_within(fewer, ticks, max_states)
        max_states -= visited
        if better is None:
            return rows
        rows = better


def orders_within(
    problem: Problem, ticks: int, max_states: int
) -> tuple[list[list[Slot]] | None, int]:
    """Search a table of at most `ticks`.

    Returns:
        Each device's order, or None if there is no such table; and the number of states visited.

    Raises:
        SearchLimitError: neither was known after `max_states` states.
    """
    search = _Search(problem, ticks, max_states)
    return (search.orders() if search.run() else None), search.num_states


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """What has begun before a tick.

    Attributes:
        forwards: per cell, its F.
        gradients: per cell, its I.
        weights: per device, its W.
    """

    forwards: tuple[int, ...]
    gradients: tuple[int, ...]
    weights: tuple[int, ...]


class _Search:
    """Depth first; of states that are equal, one at an earlier tick is as good as any later one."""

    def __init__(self, problem: Problem, ticks: int, max_states: int) -> None:
        self._problem = problem
        self._M = problem.num_micro_batches
        self._last = len(problem.devices) - 1
        self._ticks = ticks
        self._max_states = max_states
        self.num_states = 0
        self._failed: dict[_State, int] = {}
        self._steps: list[_Step] = []
        self._cells = problem.cells

    def run(self) -> bool:
        """Return whether there is a table; its steps are then known."""
        none = (0,) * len(self._problem.devices)
        # A stack in place of recursion: a table may take more ticks than Python allows calls.
        stack = [self._after(_State(none, none, (0,) * len(self._cells)), 0)]
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                if self._steps:
                    self._steps.pop()
                continue
            step, state = following
            self._steps.append(step)
            if sum(state.weights) == self._M * len(self._problem.devices):
                return True
            stack.append(self._after(state, len(self._steps)))
        return False

    def orders(self) -> list[list[Slot]]:
        """Return each device's order in the steps that were found."""
        rows: list[list[Slot]] = [[] for _ in self._cells]
        counts: dict[tuple[int, Phase], int] = {}
        weights: list[list[Slot]] = [[] for _ in self._cells]
        for device, entry in itertools.chain.from_iterable(map(enumerate, self._steps)):
            if entry is None:
                continue
            cell, phase = entry
            if phase == "W":
                rows[device].append(weights[device].pop(0))
                continue
            number = counts[entry] = counts.get(entry, -1) + 1
            rows[device].append(Slot(cell, phase, number))
            if phase == "I":
                weights[device].append(Slot(cell, "W", number))
        return rows

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
            if any(step):
                yield step, _next(state, step)

    def _options(self, state: _State, device: int) -> list[tuple[int, Phase] | None]:
        """Return the slots that a device may begin; None: it waits."""
        cells, most_live = self._cells[device], self._problem.most_live
        options: list[tuple[int, Phase] | None] = []
        for cell in reversed(cells):
            received = self._M if cell == self._last else state.gradients[cell + 1]
            if state.gradients[cell] < min(state.forwards[cell], received):
                options.append((cell, "I"))
        live = sum(state.forwards[cell] for cell in cells) - state.weights[device]
        for cell in reversed(cells):
            sent = self._M if cell == 0 else state.forwards[cell - 1]
            if state.forwards[cell] < sent and (most_live is None or live < most_live):
                options.append((cell, "F"))
        # Which W makes no difference, and any is better than waiting.
        has_weights = state.weights[device] < sum(state.gradients[cell] for cell in cells)
        options.append((cells[0], "W") if has_weights else None)
        return options

    def _may_end(self, state: _State, tick: int) -> bool:
        """Whether no bound says that the table would take too long."""
        left, M = self._ticks - tick, self._M
        for device, cells in enumerate(self._cells):
            done = sum(state.forwards[cell] + state.gradients[cell] for cell in cells)
            if 3 * M * len(cells) - done - state.weights[device] > left:
                return False
        for cell, (forwards, gradients) in enumerate(
            zip(state.forwards, state.gradients, strict=True)
        ):
            if gradients == M:
                continue
            needed = 2 * M - forwards - gradients
            if forwards < M:  # the last micro-batch has to go to the last cell and back
                needed = max(needed, M - forwards + 2 * (self._last - cell) + 1)
            if needed + cell + 1 > left:
                return False
        return True


def _next(state: _State, step: _Step) -> _State:
    forwards, gradients = list(state.forwards), list(state.gradients)
    weights = list(state.weights)
    for device, entry in enumerate(step):
        if entry is None:
            continue
        cell, phase = entry
        if phase == "W":
            weights[device] += 1
        else:
            (forwards if phase == "F" else gradients)[cell] += 1
    return _State(tuple(forwards), tuple(gradients), tuple(weights))
