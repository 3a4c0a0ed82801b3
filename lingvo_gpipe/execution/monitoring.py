"""What a pass shows while it runs: how far each device is, when each slot runs, and a watchdog.

For `DeviceProgress` and `Stamps`, each device has a variable on its host. A pass that is traced
adds assignments to them; nothing but the end of the pass waits for these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from lingvo_gpipe import packing
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Slot

_NONE = -1  # number of the pass before the first
_DESCRIBED_WITHIN_S = 10.0
_Item = TypeVar("_Item")


class DeviceProgress:
    """How far each device is in the pass that runs, which another thread can read.

    It follows the passes that are traced after it is made. A device's variable holds the number of
    the pass, and how many of the pass's calls have returned there.

    Attributes:
        devices: name of each device of the table, replica after replica.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        """Make it; see the class."""
        self.devices = tuple(devices)
        self._passes: list[PassProgress] = []
        self._counters = []
        for name in self.devices:
            with tf.device(packing.host(name)):
                self._counters.append(
                    tf.Variable([_NONE, 0], dtype=tf.int64, trainable=False, name="progress")
                )

    def new_pass(self) -> PassProgress:
        """Return what follows a pass that is being traced."""
        self._passes.append(PassProgress(len(self._passes), self._counters))
        return self._passes[-1]

    def lines(self) -> list[str]:
        """Return what the devices do: first the slot that the others wait for.

        That is the first slot, in the order in which a pass issues its calls, that has not
        returned: no slot needs one that is issued later.
        """
        counts = [counter.numpy().tolist() for counter in self._counters]
        if any(number == _NONE for number, _ in counts):
            return ["no slot has begun; its graph is being built, or its input is awaited"]
        running = [
            number
            for device, (number, count) in enumerate(counts)
            if count < len(self._passes[number].slots[device])
        ]
        # Devices begin a pass at once: one that is done with another pass has not begun this one.
        current = running[0] if running else counts[0][0]
        waiting, lines = [], []
        for device, (number, count) in enumerate(counts):
            slots = self._passes[current].slots[device]
            returned = count if number == current or not running else 0
            name = f"device {device} ({self.devices[device]})"
            line = f"{name}: {returned} of {len(slots)} calls returned"
            if returned < len(slots):
                place, slot = slots[returned]
                waiting.append((place, f"it waits for slot {slot} on {name}"))
                line += f", next {slot}"
            lines.append(line)
        return [min(waiting)[1] if waiting else "no slot is running", *lines]


class PassProgress:
    """Writes the progress of one pass; see `DeviceProgress`."""

    def __init__(self, number: int, counters: Sequence[tf.Variable]) -> None:
        # For each device, those with calls, and their places in the order of all calls.
        self.slots: list[list[tuple[int, Slot]]] = [[] for _ in counters]
        self._number = number
        self._counters = counters
        self._last: dict[int, tf.Operation] = {}

    def start(self, device: int) -> tf.Operation:
        """Note that no call has returned on a device; its first call must wait for this."""
        return self._assign(device)

    def returned(self, device: int, slot: Slot, operation: tf.Operation) -> None:
        """Note that the call of a slot has returned, which is the operation."""
        self.slots[device].append((sum(map(len, self.slots)), slot))
        with tf.control_dependencies([operation, self._last[device]]):
            self._assign(device)

    def _assign(self, device: int) -> tf.Operation:
        counter = self._counters[device]
        with tf.device(counter.device):
            value = tf.constant([self._number, len(self.slots[device])], tf.int64)
            self._last[device] = counter.assign(value, read_value=False)
        return self._last[device]


class Stamps:
    """When each slot starts and ends on its device, for the passes that are traced from now on.

    There are two `Timestamp` operations for each call: one between the last of its inputs and the
    call, one after the call. The clock is that of the device's host, in seconds since 1970.

    Attributes:
        hosts: CPU of each device's process, replica after replica: their clocks count.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        """Make it.

        Args:
            devices: name of each device of the table, replica after replica.
        """
        self._passes: list[PassStamps] = []
        self.hosts = tuple(map(packing.host, devices))
        self._times = []
        for host in self.hosts:
            with tf.device(host):
                self._times.append(
                    tf.Variable(
                        [[_NONE, _NONE]],
                        dtype=tf.float64,
                        trainable=False,
                        name="times",
                        shape=[None, 2],
                    )
                )

    def new_pass(self) -> PassStamps:
        """Return what notes the times of a pass that is being traced."""
        self._passes.append(PassStamps(len(self._passes), self._times))
        return self._passes[-1]

    def read(self) -> list[simulate.Span]:
        """Return when each slot of the last pass ran, device after device; empty: none has run."""
        spans = []
        for device, variable in enumerate(self._times):
            (number, _), *times = variable.numpy().tolist()
            slots = [] if number == _NONE else self._passes[int(number)].slots[device]
            for slot, (start_s, end_s) in zip(slots, times, strict=True):
                spans.append(simulate.Span(device, slot, start_s, end_s))
        return spans


class PassStamps:
    """Notes the times of one pass; see `Stamps`."""

    def __init__(self, number: int, times: Sequence[tf.Variable]) -> None:
        self.slots: list[list[Slot]] = [[] for _ in times]  # with calls, for each device
        self._number = number
        self._times = times
        self._values: list[list[tf.Tensor]] = [[] for _ in times]
        self._begun: dict[int, tf.Tensor] = {}

    def start(self, device: int, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Note when these tensors have arrived on a device; return what its call must wait for."""
        with tf.control_dependencies([tf.identity(tensor).op for tensor in inputs]):
            self._begun[device] = _now()
        return self._begun[device].op

    def returned(self, device: int, slot: Slot, operation: tf.Operation) -> tf.Operation:
        """Note when the call of a slot has returned, which is the operation.

        Returns:
            What the device's next call must wait for: it might take the thread of this one.
        """
        with tf.control_dependencies([operation]):
            end = _now()
        self._values[device] += [self._begun[device], end]
        self.slots[device].append(slot)
        return end.op

    def finish(self) -> None:
        """Note the times of the whole pass; all of its calls were issued."""
        for values, variable in zip(self._values, self._times, strict=True):
            with tf.device(variable.device):
                number = tf.constant(self._number, tf.float64)
                flat = tf.stack([number, number, *values])
                variable.assign(tf.reshape(flat, [-1, 2]), read_value=False)


def _now() -> tf.Tensor:
    """Return the time at which the operation runs, in no order with other operations."""
    value = tf.timestamp()
    # No public method frees an operation from the order of those with effects.
    order = tf.compat.v1.get_default_graph().experimental_acd_manager
    if order is not None:  # an outer function may have none
        order.run_independently(value.op)
    return value


class Watchdog:
    """A thread that reports work that does not end, after 1, 2, 4, 8 … times a limit.

    dog = Watchdog(300.0, describe=lambda: [...], report=print)
    with dog, dog.watching("step 7"):
        ...
    """

    def __init__(
        self,
        stall_after_s: float,
        describe: Callable[[], Sequence[str]],
        report: Callable[[str], None],
        end: Callable[[], None] | None = None,
    ) -> None:
        """Make it; `with` starts its thread.

        Args:
            stall_after_s: how long one piece of work may take; 0: forever.
            describe: lines that follow the first, called in the thread.
            report: receives lines for the user.
            end: called after the first report; None: the work goes on.
        """
        self._stall_after_s = stall_after_s
        self._describe = describe
        self._report = report
        self._end = end
        self._work: tuple[str, float] | None = None  # name, and when it began
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
    def watching(self, name: str) -> Iterator[None]:
        """Watch the `with` block, which lines for the user call `name`."""
        self._work = name, time.monotonic()
        try:
            yield
        finally:
            self._work = None

    def each(self, items: Iterable[_Item], name: str) -> Iterator[_Item]:
        """Yield `items`; from one to the next is one piece of work."""
        try:
            self._work = name, time.monotonic()
            for item in items:
                yield item
                self._work = name, time.monotonic()
        finally:
            self._work = None

    def _watch(self) -> None:
        last: tuple[str, float] | None = None
        allowed_s = self._stall_after_s
        while not self._ended.wait(min(5.0, self._stall_after_s / 8)):
            work = self._work
            if work is None:
                continue
            if work is not last:
                last, allowed_s = work, self._stall_after_s
            name, begun_s = work
            if time.monotonic() - begun_s < allowed_s:
                continue
            allowed_s *= 2
            lines = self._described()
            if self._work is not work:
                continue  # it has ended meanwhile
            self._report(f"{name} has taken {time.monotonic() - begun_s:.0f} s: {lines[0]}")
            for line in lines[1:]:
                self._report(f"    {line}")
            if self._end is not None:
                self._end()

    def _described(self) -> Sequence[str]:
        """Return the lines of `describe`, which may wait for a device that does not answer."""
        answers: list[Sequence[str]] = []

        def describe() -> None:
            try:
                answers.append(self._describe())
            except tf.errors.OpError as error:
                why = error.message.partition("\n")[0]
                answers.append([f"what its devices do is unknown: one cannot be read ({why})"])

        thread = threading.Thread(target=describe, daemon=True)
        thread.start()
        thread.join(_DESCRIBED_WITHIN_S)
        return answers[0] if answers else ["what its devices do is unknown: one does not answer"]


def exit_at_stall(folder: str, report: Callable[[str], None]) -> Callable[[], None]:
    """Return what ends the chief at a stall: an operation that does not return goes on for ever.

    Args:
        folder: of the run's checkpoints.
        report: receives lines for the user.
    """

    def end() -> None:
        report(f"the chief ends, to be started again from {folder}")
        os._exit(os.EX_TEMPFAIL)  # its supervisor starts it again

    return end
