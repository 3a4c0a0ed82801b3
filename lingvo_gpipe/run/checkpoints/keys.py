"""The keys of a checkpoint: paths of variables, slots, and a few scalars.

No cell, device or schedule is part of a key, so a checkpoint can be restored with any partition. A
key never changes once it was written, because later versions must restore old checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gpipe import optim, packing

STEP = "step"
"""Number of updates."""
POSITION = "input/position"
"""Number of mini-batches read."""
THREADS = "threads"
"""Thread counts between and inside operations."""
EVALUATED = "eval/step"
"""The last step that was evaluated; -1: the run does not evaluate."""
BEST_VALUE = "best/value"
"""The best value of `eval.best` so far."""
BEST_MISSES = "best/misses"
"""Evaluations since the best one."""

COUNTER = "save_counter"
"""TensorFlow's number of checkpoints; not a value of the run."""
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Name in the files of TensorFlow's graph of objects; not used, but part of a whole checkpoint."""
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"

OF_VARIABLES = ("variables/", "average/", "slots/")
"""How the keys of weights and statistics, of their averages and of slots begin."""


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


def in_file(key: str) -> str:
    """Return the name that the value of a key has in a checkpoint's files, which is TensorFlow's.

    >>> in_file("variables/norm.1/mean")
    'variables.Snorm..1.Smean/.ATTRIBUTES/VARIABLE_VALUE'
    """
    return key.replace(".", "..").replace("/", ".S") + _SUFFIX


def of_file(name: str) -> str | None:
    """Return the key of a value in a checkpoint's files; None: it is not that of a key."""
    if not name.endswith(_SUFFIX):
        return None
    return ".".join(part.replace(".S", "/") for part in name.removesuffix(_SUFFIX).split(".."))
