"""What each device of a running pass does, from the number of calls that have returned there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gpipe.schedule.slot import Slot


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceState:
    """What a device does.

    Attributes:
        device: number of the device: its row in the table.
        done: how many of its slots are done.
        total: how many slots it has.
        slot: the slot that it runs or waits with; None: all are done.
        needs: slots of other devices whose results are missing; empty: it runs `slot`.
    """

    device: int
    done: int
    total: int
    slot: Slot | None = None
    needs: tuple[Slot, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether it runs a slot."""
        return self.slot is not None and not self.needs

    def line(self) -> str:
        """Return it as text: `3 of 8 calls returned, 0B0 waits for 1B0`."""
        text = f"{self.done} of {self.total} calls returned"
        if self.slot is None:
            return text
        waits = " and ".join(map(str, self.needs))
        return f"{text}, {self.slot} {f'waits for {waits}' if waits else 'is running'}"


def states(orders: Sequence[Sequence[Slot]], done: Sequence[int]) -> list[DeviceState]:
    """Return what each device does.

    Args:
        orders: per device, the slots that it computes, in order. A backward that is fused with its
            forward is not among them.
        done: per device, how many of them are done.

    >>> f, b = Slot(0, "F", 0), Slot(0, "B", 0)
    >>> [state.line() for state in states([[f, b], [Slot(1, "F", 0)]], [1, 0])]
    ['1 of 2 calls returned, 0B0 waits for 1F0', '0 of 1 calls returned, 1F0 is running']
    """
    computed = {slot for order in orders for slot in order}
    missing = {slot for order, n in zip(orders, done, strict=True) for slot in order[n:]}
    num_cells = 1 + max((slot.cell for slot in computed), default=0)
    device_states = []
    for device, (order, n) in enumerate(zip(orders, done, strict=True)):
        if n >= len(order):
            device_states.append(DeviceState(device, n, len(order)))
            continue
        needs = []
        for need in order[n].needs(num_cells):
            # What has no call of its own is done with the forward of its cell, or not needed.
            made_by = need if need in computed else dataclasses.replace(need, phase="F")
            has_other = need not in computed and any(
                dataclasses.replace(need, phase=phase) in computed for phase in ("B", "I")
            )
            if made_by in missing and not has_other:
                needs.append(made_by)
        device_states.append(
            DeviceState(device, n, len(order), order[n], tuple(dict.fromkeys(needs)))
        )
    return device_states
