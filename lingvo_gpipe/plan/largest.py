"""The largest member of a family of models that fits a device's memory.

This is the question of the paper's Table 1: how large can the model be on K devices?
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gpipe import errors
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.task import Task

PARTITIONS = (1, 2, 4, 8)
# The search ends at this depth, even if deeper members fit.
_MOST_LAYERS = 20_000

Rebuild: TypeAlias = Callable[[str, int], Task.Params]
"""(name, value) → task whose recipe has another value of an integer, such as a number of layers."""


def with_partitions(task: Task.Params, partitions: int | None) -> Task.Params:
    """Return the task with another number of partitions, without what was set for the old one.

    Raises:
        ParamsError: the task has a recompute policy for each cell.
    """
    if partitions is None or partitions == task.model.num_partitions:
        return task
    copy = task.copy()
    copy.model.set(num_partitions=partitions, cuts=None, devices=None, device_speeds=())
    if "," in copy.model.recompute:
        raise errors.ParamsError(
            f"model.recompute={copy.model.recompute!r} is for the cells of "
            f"num_partitions={task.model.num_partitions}, not of {partitions}. Set one policy for "
            "all, such as full"
        )
    return copy


@dataclasses.dataclass(frozen=True, slots=True)
class LargestMember:
    """The largest member of a family that fits.

    Attributes:
        num_partitions: K.
        value: value of the field that grows; None: not even the smallest member fits.
        plan: plan of that member, or of the smallest one if none fits.
        is_largest: False if the search ended before a member did not fit.
        refusal: why the model accepts no value at all, or not the next one, if that is not for a
            layer's sake; else empty.
    """

    num_partitions: int
    value: int | None
    plan: step_plan.Plan | None
    is_largest: bool = True
    refusal: str = ""


class Family:
    """Tasks that differ in one integer."""

    def __init__(self, task: Task.Params, grow: str, rebuild: Rebuild | None = None) -> None:
        """Make it.

        Args:
            task: a member.
            grow: dotted path of an integer field of the task, or a name that `rebuild` accepts.
            rebuild: None: only fields of the task can grow.

        Raises:
            ParamsError: `grow` is neither, or the field is not an integer.
        """
        self._task = task
        self._grow = grow
        self._rebuild = rebuild
        self._refusals: dict[tuple[int, int], str] = {}  # by partitions and value
        try:
            value = task.get(grow)
        except errors.ParamsError:
            if rebuild is None:
                raise
            self._is_of_recipe = True
        else:
            self._is_of_recipe = False
            if isinstance(value, bool) or not isinstance(value, int):
                raise errors.ParamsError(f"--grow={grow}: its value {value!r} is not an integer")

    def member(self, value: int, partitions: int) -> Task.Params:
        """Return the task whose field has this value, with this many partitions."""
        if self._is_of_recipe and self._rebuild is not None:
            task = self._rebuild(self._grow, value)
        else:
            task = self._task.copy()
            task.set_path(self._grow, value)
        member = with_partitions(task, partitions).copy()
        member.model.device_memory = None  # `largest` has a limit of its own
        return member

    def largest(
        self, partitions: int, limit_bytes: int, *, together: bool = False
    ) -> LargestMember:
        """Find the largest value with which every device stays within `limit_bytes`.

        Doubles the value while it fits, then bisects. Values that the model refuses (not a multiple
        of its heads, fewer layers than partitions) are skipped.

        Args:
            partitions: K.
            limit_bytes: memory of a device.
            together: the limit is that of all devices together, which share one memory.
        """

        def fits(plan: step_plan.Plan) -> bool:
            needed = plan.together_bytes if together else plan.heaviest_bytes
            return needed <= limit_bytes

        try:
            smallest = self._smallest(partitions)
        except errors.UserError as refusal:
            return LargestMember(partitions, None, None, refusal=str(refusal))
        if not fits(smallest[1]):
            return LargestMember(partitions, None, smallest[1])
        best, above = smallest, None
        while above is None:
            if len(best[1].analysis.layers) > _MOST_LAYERS or best[0] > 2**40:
                return LargestMember(partitions, *best, is_largest=False)
            tried = self._near(2 * best[0], best[0], partitions)
            if tried is None or not fits(tried[1]):
                above = 2 * best[0]
            else:
                best = tried
        while above - best[0] > 1:
            middle = (best[0] + above) // 2
            tried = self._near(middle, best[0], partitions)
            if tried is not None and fits(tried[1]):
                best = tried
            else:
                above = middle if tried is None else tried[0]
        return LargestMember(
            partitions, *best, refusal=self._refusals.get((partitions, best[0] + 1), "")
        )

    def _smallest(self, partitions: int) -> tuple[int, step_plan.Plan]:
        """Return the first of some small round values that the model accepts, and its plan.

        Raises:
            UserError: it accepts none of them; the error is that of the last.
        """
        values = sorted({factor * 2**power for power in range(14) for factor in (1, 3)})
        for value in values[:-1]:
            with contextlib.suppress(errors.UserError):
                return value, self._plan(value, partitions)
        return values[-1], self._plan(values[-1], partitions)

    def _near(self, value: int, above: int, partitions: int) -> tuple[int, step_plan.Plan] | None:
        """Return the largest value in (above, value] that the model accepts, and its plan."""
        for lower in range(value, above, -1):
            try:
                return lower, self._plan(lower, partitions)
            except errors.LayerError:
                continue
            except errors.UserError as refusal:
                self._refusals[partitions, lower] = str(refusal)
        return None

    def _plan(self, value: int, partitions: int) -> step_plan.Plan:
        return step_plan.make_for(self.member(value, partitions))
