"""A thread that reports work that does not end, and what each device does meanwhile.

dog = Watchdog(300.0, describe=lambda: [...], report=print)
with dog, dog.watching("step 7"):
    ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from lingvo_gpipe.execution.executor import Executor
from lingvo_gpipe.execution.monitoring.progress import Progress

_Item = TypeVar("_Item")
TIMES_LONGEST = 5.0
"""How many times as long as the longest of its kind so far work may take, where that is a limit.

The first of a kind builds graphs, as does any that has another shape.
"""
_DESCRIBED_WITHIN_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Work that is being done.

    Attributes:
        name: what it is.
        kind: what other work has in common with it; None: nothing.
        begun_s: when it began, in seconds of a monotonic clock.
        allowed_s: how long it may take.
    """

    name: str
    kind: str | None
    begun_s: float
    allowed_s: float


class Watchdog:
    """Reports each time that one piece of work takes 1, 2, 4, 8 … times as long as it may."""

    def __init__(
        self,
        stall_after_s: float,
        describe: Callable[[], Sequence[str]],
        report: Callable[[str], None],
        end: Callable[[], None] | None = None,
        shortest_s: float | None = None,
    ) -> None:
        """Make it; `with` starts its thread.

        Args:
            stall_after_s: how long one piece of work may take; 0: forever.
            describe: lines that follow the first, called in the thread.
            report: receives lines for the user.
            end: called after the first report; None: the work goes on.
            shortest_s: work of a kind may take `TIMES_LONGEST` as long as the longest of that kind
                so far, but this in any case, and `stall_after_s` at most; None: the latter always.
        """
        self._shortest_s = shortest_s
        self._longest_s: dict[str, float] = {}
        self._stall_after_s = stall_after_s
        self._describe = describe
        self._report = report
        self._end = end
        self._work: _Work | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._stall_after_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextlib.contextmanager
    def watching(self, name: str, kind: str | None = None) -> Iterator[None]:
        """Watch the `with` block, which lines for the user call `name`."""
        work = self._work = self._begun(name, kind)
        try:
            yield
            self._note_end(work)
        finally:
            self._work = None

    def each(self, items: Iterable[_Item], name: str, kind: str | None = None) -> Iterator[_Item]:
        """Yield `items`; from one to the next is one piece of work."""
        source = iter(items)
        try:
            while True:
                work = self._work = self._begun(name, kind)
                try:
                    item = next(source)
                except StopIteration:
                    return
                yield item
                self._note_end(work)
        finally:
            self._work = None

    def _begun(self, name: str, kind: str | None) -> _Work:
        allowed_s = self._stall_after_s
        if self._shortest_s is not None and kind in self._longest_s:
            learned_s = max(self._shortest_s, TIMES_LONGEST * self._longest_s[kind])
            allowed_s = min(allowed_s, learned_s)
        return _Work(name, kind, time.monotonic(), allowed_s)

    def _note_end(self, work: _Work) -> None:
        if work.kind is not None:
            took_s = time.monotonic() - work.begun_s
            self._longest_s[work.kind] = max(took_s, self._longest_s.get(work.kind, 0.0))

    def _watch(self) -> None:
        last: _Work | None = None
        allowed_s = 0.0
        shortest_s = min(self._stall_after_s, self._shortest_s or self._stall_after_s)
        while not self._ended.wait(min(5.0, shortest_s / 8)):
            work = self._work
            if work is None:
                continue
            if work is not last:
                last, allowed_s = work, work.allowed_s
            if time.monotonic() - work.begun_s < allowed_s:
                continue
            allowed_s *= 2
            lines = self._described()
            if self._work is not work:
                continue  # it has ended meanwhile
            waited_s = time.monotonic() - work.begun_s
            self._report(f"{work.name} has taken {waited_s:.0f} s: {lines[0]}")
            for line in lines[1:]:
                self._report(f"    {line}")
            if self._end is not None:
                self._end()

    def _described(self) -> Sequence[str]:
        """Return the lines of `describe`, which may wait for a device that does not answer."""
        found: list[Sequence[str]] = []

        def describe() -> None:
            try:
                found.append(self._describe())
            except tf.errors.OpError as error:
                why = error.message.partition("\n")[0]
                found.append([f"what its devices do is unknown: one cannot be read ({why})"])

        thread = threading.Thread(target=describe, daemon=True)
        thread.start()
        thread.join(_DESCRIBED_WITHIN_S)
        return found[0] if found else ["what its devices do is unknown: one does not answer"]


def of_executor(
    executor: Executor,
    stall_after_s: float,
    report: Callable[[str], None],
    end: Callable[[], None] | None = None,
    shortest_s: float | None = None,
) -> Watchdog:
    """Return a watchdog that follows the progress of an executor's passes.

    Args:
        executor: runs the passes; none is traced yet.
        stall_after_s: as in `Watchdog`.
        report: as in `Watchdog`.
        end: as in `Watchdog`.
        shortest_s: as in `Watchdog`.
    """
    if not stall_after_s:
        return Watchdog(0.0, lambda: [], report)
    describe = functools.partial(_describe, executor.follow_progress())
    return Watchdog(stall_after_s, describe, report, end, shortest_s)


def _describe(progress: Progress) -> list[str]:
    """Return what the devices of a pipeline do: first the slot that the others wait for."""
    states = progress.read()
    if states is None:
        return ["no slot has begun; its graph is being built, or its input is awaited"]
    running = [
        f"slot {state.slot} on device {state.device} ({progress.devices[state.device]})"
        for state in states
        if state.is_running
    ]
    lines = [
        f"device {state.device} ({progress.devices[state.device]}): {state.line()}"
        for state in states
    ]
    if not running:
        return ["no slot is running", *lines]
    return [f"it waits for {', '.join(running)}", *lines]
