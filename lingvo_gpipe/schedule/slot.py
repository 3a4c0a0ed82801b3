"""One entry of a schedule, its text, and what must be done before it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal, TypeAlias, cast, get_args

from lingvo_gpipe.errors import ScheduleError

Phase: TypeAlias = Literal["F", "R", "B", "I", "W"]
"""F forward; R its recomputation; B backward; I and W are its halves, gradient of the inputs and of
the weights."""

_PHASES = frozenset(get_args(Phase))
_TEXT = re.compile(r"(\d{1,9})([A-Z]+(?:_[A-Z]+)*)(\d{0,9})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A cell's phase for one micro-batch.

    >>> str(Slot(0, "F", 3))
    '0F3'
    >>> Slot.parse("1B0")
    Slot(cell=1, phase='B', micro_batch=0)
    """

    cell: int
    phase: Phase
    micro_batch: int

    def __post_init__(self) -> None:
        if self.cell < 0 or self.micro_batch < 0 or self.phase not in _PHASES:
            raise ScheduleError(
                f"cell={self.cell!r}, phase={self.phase!r}, micro_batch={self.micro_batch!r}: not "
                "a slot. Count cells and micro-batches from 0; phases are F, R, B, I and W"
            )

    def __str__(self) -> str:
        return f"{self.cell}{self.phase}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Read a slot from its text, such as `0F3`.

        Raises:
            ScheduleError: the text is not a slot.
        """
        match = _TEXT.fullmatch(text)
        shown = repr(text if len(text) <= 24 else text[:21] + "...")
        if match is None:
            raise ScheduleError(
                f"{shown} is not a slot. Write cell, phase and micro-batch, such as 0F3"
            )
        cell, phase, micro_batch = match.groups()
        if phase not in _PHASES or not micro_batch:
            raise ScheduleError(
                f"{shown} is not a slot: phases are F, R, B, I and W. Leave out sends and "
                "receives; they follow from these"
            )
        return cls(int(cell), cast(Phase, phase), int(micro_batch))

    def needs(self, num_cells: int) -> Iterator[Slot]:
        """Yield the slots whose results this one reads in a chain of `num_cells` cells.

        A gradient comes from the next cell's B or I: both are named, a table has one of them. An R
        is named although a table may have none.

        >>> [str(slot) for slot in Slot(1, "B", 0).needs(num_cells=3)]
        ['1F0', '1R0', '2B0', '2I0']
        """
        if self.phase == "F":
            if self.cell > 0:
                yield Slot(self.cell - 1, "F", self.micro_batch)
        elif self.phase == "R":
            yield Slot(self.cell, "F", self.micro_batch)
        elif self.phase == "W":
            yield Slot(self.cell, "I", self.micro_batch)
        else:
            yield Slot(self.cell, "F", self.micro_batch)
            yield Slot(self.cell, "R", self.micro_batch)
            if self.cell + 1 < num_cells:
                yield Slot(self.cell + 1, "B", self.micro_batch)
                yield Slot(self.cell + 1, "I", self.micro_batch)
