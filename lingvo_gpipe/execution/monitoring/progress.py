"""How far each device has come in the pass that runs, which another thread can read.

For each device there is a variable beside it: number of the pass, and how many of the pass's calls
have returned there. Each call is followed by one assignment on its device's host, after the one
before it; nothing else waits for it but the end of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import packing
from lingvo_gpipe.schedule import progress
from lingvo_gpipe.schedule.slot import Slot

_NONE = -1


class Progress:
    """The progress of every device, for the passes that are traced after it is made."""

    def __init__(self, devices: Sequence[str]) -> None:
        """Make it.

        Args:
            devices: name of each device of the table.
        """
        self.devices = tuple(devices)
        self._passes: list[list[list[Slot]]] = []
        self._counters = []
        for name in self.devices:
            with tf.device(packing.host(name)):
                self._counters.append(
                    tf.Variable([_NONE, 0], dtype=tf.int64, trainable=False, name="progress")
                )

    def new_pass(self) -> PassProgress:
        """Return what follows a pass that is being traced."""
        orders: list[list[Slot]] = [[] for _ in self.devices]
        self._passes.append(orders)
        return PassProgress(len(self._passes) - 1, orders, self._counters)

    def read(self) -> list[progress.DeviceState] | None:
        """Return what each device does; None where no pass has begun."""
        read = [_values(counter) for counter in self._counters]
        if any(number == _NONE for number, _ in read):
            return None
        running = [
            number
            for device, (number, count) in enumerate(read)
            if count < len(self._passes[number][device])
        ]
        # Devices begin a pass at once: one that is done with another pass has not begun this one.
        current = running[0] if running else read[0][0]
        done = [count if number == current or not running else 0 for number, count in read]
        return progress.states(self._passes[current], done)


class PassProgress:
    """Writes the progress of one pass: see `Progress`."""

    def __init__(
        self, number: int, orders: list[list[Slot]], counters: Sequence[tf.Variable]
    ) -> None:
        self._number = number
        self._orders = orders
        self._counters = counters
        self._last: dict[int, tf.Operation] = {}

    def start(self, device: int) -> tf.Operation:
        """Note that no call has returned on a device; its first call must wait for this."""
        return self._assign(device)

    def returned(self, device: int, slot: Slot, operation: tf.Operation) -> None:
        """Note that the call of a slot has returned, which is the operation."""
        self._orders[device].append(slot)
        with tf.control_dependencies([operation, self._last[device]]):
            self._assign(device)

    def _assign(self, device: int) -> tf.Operation:
        counter = self._counters[device]
        with tf.device(counter.device):
            value = tf.constant([self._number, len(self._orders[device])], tf.int64)
            self._last[device] = counter.assign(value, read_value=False)
        return self._last[device]


def _values(variable: tf.Variable) -> list[int]:
    values: list[int] = variable.numpy().tolist()
    return values
