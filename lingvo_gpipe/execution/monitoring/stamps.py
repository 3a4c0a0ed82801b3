"""When each slot of a pass starts and ends on its device.

Two `Timestamp` operations for each call: one between the last of its inputs and the call, one after
the call. Each device has a variable beside it, which receives the times of a pass when they are all
known. The clock is that of the device's host, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import packing
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Slot

_NONE = -1.0


class Stamps:
    """The times of every device's slots, for the passes that are traced after it is made.

    Attributes:
        hosts: CPU of each device's process, replica after replica: their clocks count.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        """Make it.

        Args:
            devices: name of each device of the table, replica after replica.
        """
        self._passes: list[list[list[Slot]]] = []
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
        slots: list[list[Slot]] = [[] for _ in self._times]
        self._passes.append(slots)
        return PassStamps(len(self._passes) - 1, slots, self._times)

    def read(self) -> list[simulate.Span]:
        """Return when each slot of the last pass ran, device after device; empty: none has run."""
        found = []
        for device, variable in enumerate(self._times):
            (number, _), *times = variable.numpy().tolist()
            if number == _NONE:
                continue
            slots = self._passes[int(number)][device]
            for slot, (start_s, end_s) in zip(slots, times, strict=True):
                found.append(simulate.Span(device, slot, start_s, end_s))
        return found


class PassStamps:
    """Notes the times of one pass: see `Stamps`."""

    def __init__(self, number: int, slots: list[list[Slot]], times: Sequence[tf.Variable]) -> None:
        self._number = number
        self._slots = slots
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
        self._slots[device].append(slot)
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
