"""How the slices of a weight become other slices of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """An axis along which a weight is divided, and the sizes of its slices before and after.

    Attributes:
        shape: of the whole weight.
        axis: the axis.
        before: sizes of the slices that there are.
        after: sizes of the slices that are wanted.

    >>> division = Division.of([(2, 3), (4, 3)], [(5, 3), (1, 3)])
    >>> division
    Division(shape=(6, 3), axis=0, before=(2, 4), after=(5, 1))
    """

    shape: Shape
    axis: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, before: Sequence[Shape], after: Sequence[Shape]) -> Division | None:
        """Return the division between slices of these shapes; None: they are not of one weight.

        Along the axis, sizes add up to the same before and after; all others are equal. There is
        only one such axis, unless `before` and `after` are equal.
        """
        shapes = [*before, *after]
        rank = len(shapes[0])
        for axis in range(rank):
            others = {(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes}
            if len(others) > 1:
                continue
            sizes = [tuple(shape[axis] for shape in part) for part in (before, after)]
            if sum(sizes[0]) == sum(sizes[1]):
                whole = (*shapes[0][:axis], sum(sizes[0]), *shapes[0][axis + 1 :])
                return cls(whole, axis, *sizes)
        return None

    @property
    def shapes_before(self) -> list[Shape]:
        """Shapes of the slices that there are."""
        return [self._shape(size) for size in self.before]

    @property
    def shapes_after(self) -> list[Shape]:
        """Shapes of the slices that are wanted."""
        return [self._shape(size) for size in self.after]

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the whole weight, or a slot of its shape."""
        return np.concatenate(parts, self.axis) if len(parts) > 1 else parts[0]

    def divided(self, whole: Array) -> list[Array]:
        """Return the slices that are wanted of the whole weight, or of a slot of its shape."""
        return np.split(whole, list(itertools.accumulate(self.after[:-1])), self.axis)

    def _shape(self, size: int) -> Shape:
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])
