"""Which variables are slices of one, by the Params of a task; and what else differs between two.

The variable `rest` of a layer `X` is `X_n/rest` in slice n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lingvo_gpipe import errors, hyperparams, network, optim, task
from lingvo_gpipe.input import Input
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.sliced import dividing
from lingvo_gpipe.network import wired_layers
from lingvo_gpipe.task import Task

RESLICE = (
    "--mode=reslice with --checkpoint of that run and another --logdir joins and divides its "
    "slices, optimizer state included. "
)
"""Way out of a refusal because of slices, for messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The variables of a task's network.

    Attributes:
        specs: path → spec; a tied variable once.
        slices: path that a variable would have in whole layers → paths of its slices, in order.
        optimizer: the optimizer.
    """

    specs: Mapping[str, base.VariableSpec]
    slices: Mapping[str, tuple[str, ...]]
    optimizer: optim.Optimizer

    def shapes(self, whole: str) -> list[tuple[int, ...]]:
        """Return the shapes of a variable's slices."""
        return [self.specs[path].shape for path in self.slices[whole]]

    def slots(self, path: str) -> dict[str, optim.SlotSpec]:
        """Return the slots of a variable by name; none if it is not trained."""
        spec = self.specs[path]
        if not spec.is_trained:
            return {}
        return {s.slot: s for s in self.optimizer.rule.slots(path, spec.shape, spec.dtype)}

    def trained(self) -> set[str]:
        """Return the paths of variables that are trained."""
        return {path for path, spec in self.specs.items() if spec.is_trained}

    def lazy(self) -> frozenset[str]:
        """Return the paths of the tables of `train.optimizer.lazy`."""
        return self.optimizer.lazy_paths({path: self.specs[path] for path in self.trained()})

    def which(self, paths: Collection[str]) -> dict[str, str]:
        """Return whether all, some or none of each variable's slices are in `paths`."""
        found = {}
        for whole, slices in self.slices.items():
            inside = sum(path in paths for path in slices)
            found[whole] = "none" if not inside else "all" if inside == len(slices) else "some"
        return found


def of_task(params: Task.Params, source: Input) -> Layout:
    """Return the layout of a complete task.

    Args:
        params: params of the task.
        source: its input.

    Raises:
        UserError: the network is not consistent.
    """
    fields = source.element_spec(training=True)
    wired = wired_layers.wire(network.uncut(params.model), fields)
    origin = {}
    for layer, parts in network.divided(params.model):
        for part in parts:
            number = part.name.removeprefix(f"{layer.name}_")
            is_slice = part.name != layer.name and number.isdecimal()
            origin[part.name] = layer.name if is_slice else part.name
    slices: dict[str, list[str]] = {}
    for path in wired.variables:  # in the order of layers
        name, _, rest = path.partition("/")
        slices.setdefault(f"{origin[name]}/{rest}", []).append(path)
    return Layout(
        wired.variables,
        {whole: tuple(paths) for whole, paths in slices.items()},
        params.train.optimizer.instantiate(),
    )


def other_changes(old: Task.Params, new: Task.Params) -> task.Change:
    """Return how two tasks differ besides slices, and the patterns that name slices."""
    return task.change(_undivided(old).to_text(), _undivided(new).to_text())


def only_slices_differ(old_text: str, new: Task.Params) -> bool:
    """Return whether a run may go on with other params once its variables are divided otherwise.

    Args:
        old_text: params text of the run; unreadable ones count as different.
        new: the other params.
    """
    try:
        old = hyperparams.from_text(old_text)
        if not isinstance(old, Task.Params):
            return False
        change = other_changes(old, new)
        same = network.layer_params(old.model) == network.layer_params(new.model)
    except errors.UserError:
        return False
    return not (same or change.refused or change.models)


def _undivided(params: Task.Params) -> Task.Params:
    """Return a task whose text is the same for all slices of its layers."""
    copy = params.copy()
    copy.model.set(
        layers=[dividing.undivided(layer) for layer in copy.model.layers],
        cells=[[dividing.undivided(layer) for layer in cell] for cell in copy.model.cells],
        slices={},
        frozen=(),
    )
    copy.train.optimizer.lazy = ()
    return copy
