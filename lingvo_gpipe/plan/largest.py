"""The largest member of a family of models that fits a device's memory.

The paper's Table 1 asked this way: how large may the model be on K devices?
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.plan import step_plan

PARTITIONS = (1, 2, 4, 8)
# A family whose members are this deep and still fit has no largest one worth waiting for.
_MOST_LAYERS = 20_000


def cut(task: Any, partitions: int | None) -> Any:
    """Return the task with another number of partitions, and nothing that hangs on the old one."""
    if partitions is None or partitions == task.model.num_partitions:
        return task
    copy = task.copy()
    copy.model.set(num_partitions=partitions, cuts=None, devices=None, device_speeds=())
    if "," in copy.model.recompute:
        raise errors.ParamsError(
            f"model.recompute={copy.model.recompute!r} is for {task.model.num_partitions} cells, "
            f"not for {partitions}. Set one policy for all, such as full"
        )
    return copy


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """The largest member of a family that fits.

    Attributes:
        num_partitions: K.
        value: of the field that grows; None: not even the smallest fits.
        plan: of that member, or of the smallest where none fits.
        is_largest: False where the search ended before anything ceased to fit.
        refusal: why the model takes no value at all, where that is so.
    """

    num_partitions: int
    value: int | None
    plan: step_plan.Plan | None
    is_largest: bool = True
    refusal: str = ""


class Family:
    """Tasks that differ in one integer."""

    def __init__(
        self, task: Any, grow: str, rebuild: Callable[[str, int], Any] | None = None
    ) -> None:
        """Find where `grow` lives.

        Args:
            task: a member.
            grow: dotted path of an integer field of the task, or what `rebuild` knows.
            rebuild: see `plan`.

        Raises:
            ParamsError: it is neither, or no integer.
        """
        self._task = task
        self._grow = grow
        self._rebuild = rebuild
        try:
            value = task.get(grow)
        except errors.ParamsError:
            if rebuild is None:
                raise
            self._of_recipe = True
        else:
            self._of_recipe = False
            if isinstance(value, bool) or not isinstance(value, int):
                raise errors.ParamsError(f"--grow={grow}: its value {value!r} is no whole number")

    def member(self, value: int, partitions: int) -> Any:
        """Return the task with the field at `value`, cut into K."""
        if self._of_recipe and self._rebuild is not None:
            task = self._rebuild(self._grow, value)
        else:
            task = self._task.copy()
            task.set_path(self._grow, value)
        fitted = cut(task, partitions).copy()
        fitted.model.device_memory = None  # the question names the memory
        return fitted

    def largest(self, partitions: int, limit_bytes: int, *, together: bool = False) -> Fitted:
        """Find the largest value whose every device stays within `limit_bytes`.

        Doubles while it fits, then halves what lies between. Values that the model refuses (no
        multiple of its heads, fewer layers than partitions) are passed over.

        Args:
            partitions: K.
            limit_bytes: of a device.
            together: of all devices together, which share one memory.
        """

        def fits(plan: step_plan.Plan) -> bool:
            needed = plan.together_bytes if together else plan.heaviest_bytes
            return needed <= limit_bytes

        try:
            smallest = self._smallest(partitions)
        except errors.UserError as refusal:
            return Fitted(partitions, None, None, refusal=str(refusal))
        if not fits(smallest[1]):
            return Fitted(partitions, None, smallest[1])
        best, above = smallest, None
        while above is None:
            if len(best[1].analysis.layers) > _MOST_LAYERS or best[0] > 2**40:
                return Fitted(partitions, *best, is_largest=False)
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
        return Fitted(partitions, *best)

    def _smallest(self, partitions: int) -> tuple[int, step_plan.Plan]:
        """Return the first of some small round values that the model takes.

        Raises:
            UserError: it takes none of them; of the last.
        """
        values = sorted({factor * 2**power for power in range(14) for factor in (1, 3)})
        for value in values[:-1]:
            with contextlib.suppress(errors.UserError):
                return value, self._plan(value, partitions)
        return values[-1], self._plan(values[-1], partitions)

    def _near(self, value: int, above: int, partitions: int) -> tuple[int, step_plan.Plan] | None:
        """Return the first value from `value` down that the model takes, above `above`."""
        for lower in range(value, above, -1):
            try:
                return lower, self._plan(lower, partitions)
            except errors.LayerError:
                continue
        return None

    def _plan(self, value: int, partitions: int) -> step_plan.Plan:
        return step_plan.make_for(self.member(value, partitions))
