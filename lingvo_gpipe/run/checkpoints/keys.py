"""The keys of a checkpoint: paths of variables, slots, and a few scalars.

No cell, device, schedule or number of slices is part of a key, so a checkpoint is restored with any
of them: slices are saved and read as parts of the whole variable. A key never changes once it was
written, because later versions must restore old checkpoints.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from lingvo_gpipe import network, optim, packing
from lingvo_gpipe.layers import base, slices
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import PipelineParams, wired_layers

STEP = "step"
"""Number of updates."""
POSITION = "input/position"
"""Number of mini-batches read."""
EVALUATED = "eval/step"
"""The last step that was evaluated; -1: the run does not evaluate."""
BEST_VALUE = "best/value"
"""The best value of `eval.best` so far."""
BEST_MISSES = "best/misses"
"""Evaluations since the best one."""


def variable(path: str) -> str:
    """Return the key of a weight or statistic.

    >>> variable("dense/kernel"), average("dense/kernel"), slot("dense/kernel", "velocity")
    ('variables/dense/kernel', 'average/dense/kernel', 'slots/dense/kernel/velocity')
    """
    return f"variables/{path}"


def average(path: str) -> str:
    """Return the key of the average of a weight or statistic."""
    return f"average/{path}"


def slot(path: str, name: str) -> str:
    """Return the key of an optimizer's slot of a weight."""
    return f"slots/{path}/{name}"


def is_of_a_slice(key: str) -> bool:
    """Return whether a key is that of a slot which fits one slice alone; see `parts`.

    >>> is_of_a_slice("slots/softmax/kernel/row/10 4 0,6:-")
    True
    """
    return " " in key


def loss_scale(name: str) -> str:
    """Return the key of a variable of the loss scale."""
    return f"loss_scale/{name}"


def of_training(
    variables: Mapping[str, packing.Variable], updater: optim.Updater
) -> dict[str, packing.Variable]:
    """Return the variables of a network in training by key, without its step.

    Args:
        variables: path → variable of the whole network.
        updater: updater of the network.
    """
    scale = {} if updater.scale is None else updater.scale.variables
    return {
        **{variable(path): v for path, v in variables.items()},
        **{slot(path, name): v for (path, name), v in updater.slots.items()},
        **{average(path): v for path, v in updater.averages.items()},
        **{loss_scale(name): v for name, v in scale.items()},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Where the value of a variable lies in a checkpoint.

    Attributes:
        key: key of the whole value.
        shape: shape of the whole value.
        spec: TensorFlow's `shape_and_slice`: the shape, then first and number of each axis.

    >>> Part.along("variables/softmax/kernel", (10, 4), 0, 6, 3).spec
    '10 4 6,3:-'
    """

    key: str
    shape: tuple[int, ...]
    spec: str = ""

    @classmethod
    def along(cls, key: str, shape: tuple[int, ...], axis: int, first: int, size: int) -> Part:
        """Return the part of `size` rows from `first` on along an axis."""
        ranges = [f"{first},{size}" if a == axis else "-" for a in range(len(shape))]
        return cls(key, shape, f"{' '.join(map(str, shape))} {':'.join(ranges)}")


def parts(
    params: PipelineParams,
    fields: Mapping[str, SpecNest],
    specs: Mapping[str, base.VariableSpec],
    updater: optim.Updater | None = None,
) -> dict[str, Part]:
    """Return key → part of the whole variable, for the variables of layers in slices.

    The variable `rest` of a layer `X` is `X_n/rest` in slice n. A slot that is not of its weight's
    shape in every slice (row and column of Adafactor) has a key of its own for each slice, which
    ends in TensorFlow's `shape_and_slice`: it fits no other slices, unless it is a scalar.

    Args:
        params: params of the network.
        fields: the mini-batch's fields.
        specs: path → spec of its variables.
        updater: updater of the network; None: it is not trained.
    """
    layer_of = _layers_of_slices(params)
    if not layer_of:
        return {}
    whole_params = network.uncut(params)
    whole_params.set(
        layers=[slices.whole(layer) for layer in whole_params.layers], slices={}, frozen=()
    )
    layer_of_whole = _layers_of_slices(whole_params)
    shapes = {
        _renamed(path, layer_of_whole): spec.shape
        for path, spec in wired_layers.wire(whole_params, fields).variables.items()
    }
    part_of: dict[str, Part] = {}  # by path; its key is the whole variable's path
    firsts: dict[str, int] = {}
    for path, spec in specs.items():
        if path.partition("/")[0] in layer_of:
            whole = _renamed(path, layer_of)
            shape, first = shapes[whole], firsts.get(whole, 0)
            axis = next((a for a, size in enumerate(shape) if spec.shape[a] != size), 0)
            part_of[path] = Part.along(whole, shape, axis, first, spec.shape[axis])
            firsts[whole] = first + spec.shape[axis]
    slots = {} if updater is None else updater.slots
    num_slices = collections.Counter(part.key for part in part_of.values())
    num_divided = collections.Counter(
        (part_of[path].key, name)
        for (path, name), value in slots.items()
        if path in part_of and tuple(value.shape) == specs[path].shape
    )
    part_of_key = {
        key(path): dataclasses.replace(part, key=key(part.key))
        for path, part in part_of.items()
        for key in (variable, average)
    }
    for (path, name), value in slots.items():
        if (part := part_of.get(path)) is None:
            continue
        whole_key = slot(part.key, name)
        if num_divided[part.key, name] == num_slices[part.key]:
            part_of_key[slot(path, name)] = dataclasses.replace(part, key=whole_key)
        elif specs[path].shape == part.shape:
            part_of_key[slot(path, name)] = Part(whole_key, tuple(value.shape))
        else:
            part_of_key[slot(path, name)] = Part(f"{whole_key}/{part.spec}", tuple(value.shape))
    return part_of_key


def _layers_of_slices(params: PipelineParams) -> dict[str, str]:
    """Return name of a slice → name of the layer that it is a slice of."""
    return {
        part.name: layer.name
        for layer, several in network.divided(params)
        for part in several
        if part.name.removeprefix(f"{layer.name}_").isdecimal() and part.name != layer.name
    }


def _renamed(path: str, layer_of: Mapping[str, str]) -> str:
    name, slash, rest = path.partition("/")
    return f"{layer_of.get(name, name)}{slash}{rest}"
