"""In how many slices large layers are shared out more evenly between replicas.

A variable has one owner among the replicas, so one that is larger than all others of its device
together leaves the other owners with little. Slices are variables with owners of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers.sliced import dividing
from lingvo_gpipe.plan import slicing, step_plan
from lingvo_gpipe.task import Task

_LEAST_GAIN = 0.1  # of the bytes of the heaviest device
_NEARLY_EQUAL_SHARE = 0.05
_PER_REPLICA = (1, 2)  # slices for each replica that are tried


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Slices with which the heaviest device needs less.

    Attributes:
        layers: names of the layers that are divided.
        slices: the field `model.slices`.
        before_bytes: what the heaviest device needs now.
        after_bytes: what it needs with these slices.
    """

    layers: tuple[str, ...]
    slices: dict[str, int | tuple[int, ...]]
    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        """Return what is uneven and what to set, in one line."""
        owns = "have one owner each" if len(self.layers) > 1 else "has one owner"
        return (
            f"{', '.join(self.layers)} {owns} among the replicas. In slices, which have their own, "
            f"the heaviest device needs {units.size(self.after_bytes)}, not "
            f'{units.size(self.before_bytes)}: --params_override="model.slices={self.slices}" '
            "(--mode=reslice for a run that exists)"
        )


def advice(task: Task.Params) -> Advice | None:
    """Return slices with which the heaviest device needs at least a tenth less.

    One and two slices for each replica are tried; the fewer are taken where nearly as good.

    Args:
        task: the task, with a named schedule.

    Returns:
        None where nothing is gained; without replicas; where the task states slices or cells; and
        where no layer that can be divided has a variable of more than its owner's share.
    """
    model = task.model
    if model.num_replicas == 1 or model.cells or model.slices:
        return None
    now = step_plan.make_for(task)
    uneven = dict.fromkeys(_uneven(now.analysis, model.num_replicas))
    if not uneven:
        return None
    needs = {need.name: need for need in slicing.needs(task) if need.name in uneven}
    groups = [group for group in slicing.divided_alike(task, needs) if not group.whole]
    found = []
    for per_replica in _PER_REPLICA:
        number = per_replica * model.num_replicas
        slices: dict[str, int | tuple[int, ...]] = {
            pattern: number for group in groups for pattern in group.patterns
        }
        try:
            plan = step_plan.make_for(slicing.with_slices(task, slices))
        except errors.UserError:  # more slices than rows, or no cut fits
            continue
        found.append((plan.heaviest_bytes, slices))
    if not found:
        return None
    least = min(heaviest for heaviest, _ in found)
    after, slices = next(one for one in found if one[0] <= (1 + _NEARLY_EQUAL_SHARE) * least)
    if after > (1 - _LEAST_GAIN) * now.heaviest_bytes:
        return None
    names = tuple(name for group in groups for name in group.names)
    return Advice(names, slices, now.heaviest_bytes, after)


def _uneven(analysis: network.Analysis, num_replicas: int) -> Iterator[str]:
    """Yield layers that can be divided, of which one variable is more than an owner's share."""
    cells = analysis.cells
    whole: dict[int, int] = {}
    for path, spec in analysis.variables.items():
        device = cells[analysis.owner_cell(path)].device_number
        whole[device] = whole.get(device, 0) + spec.size_bytes
    for path, spec in analysis.variables.items():
        device = cells[analysis.owner_cell(path)].device_number
        layer = analysis.layers[analysis.owner[path]]
        if spec.size_bytes * num_replicas > whole[device] and dividing.can_be_divided(layer.params):
            yield layer.name
