"""Exceptions that users meet, and the search for the nearest right name.

Every one is a `UserError` and the fitting builtin, so that callers can catch either. Their first
line is complete alone: what, where, the nearest right thing, the way out. The trainer prints a
`UserError` without a traceback; anything else is a bug and keeps its own.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator

# What TensorFlow adds to its messages for its developers: names of functions, nodes, operations.
_TRACEBACK = re.compile(r"^Graph execution error:.*\n\n", re.DOTALL)
_GRAPH_NAMES = re.compile(r"\{\{[a-z_]*node [^}]*\}\}\s*|\s*\[Op:\w*\](?: name: ?[\w/]*)?")


def without_graph_names(message: str) -> str:
    """Return a message of TensorFlow without a traceback, names of functions, nodes, operations.

    >>> without_graph_names("{{function_node __wrapped__X}} Input is empty. [Op:DecodeImage]")
    'Input is empty.'
    """
    return _GRAPH_NAMES.sub("", _TRACEBACK.sub("", message))


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Add to exceptions of the `with` block where they came from; a `UserError` states it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note(where)
        raise


class UserError(Exception):
    """A mistake that the user can correct; its text says how.

    Where the text quotes a message of TensorFlow, it has no names of its graphs.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(without_graph_names(text))


class ParamsError(UserError, ValueError):
    """A Params tree, an override or a text is wrong, or names no model, mode or class."""


class LayerError(UserError, ValueError):
    """A layer was declared or called wrongly, or reads a name that no layer before it writes."""


class PartitionError(UserError, ValueError):
    """A sequence of layers cannot be cut as asked."""


class ScheduleError(UserError, ValueError):
    """A schedule table is illegal."""


class DeviceError(UserError, RuntimeError):
    """Devices, or the processes that serve them, are missing, unreachable or too few."""


class InputError(UserError, ValueError):
    """Data cannot be read, or does not fit the model."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is torn, foreign, or cannot be written."""


class TrainingError(UserError, RuntimeError):
    """A run cannot continue (a loss that is not finite, a log directory that cannot be written)."""


class StepError(UserError, RuntimeError):
    """A step failed while it ran.

    Attributes:
        layer: name of the layer that failed; empty where it is not known.
        micro_batch: number of the micro-batch; None where it is not known.
    """

    def __init__(self, text: str, *, layer: str = "", micro_batch: int | None = None) -> None:
        super().__init__(text)
        self.layer = layer
        self.micro_batch = micro_batch


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of `names` that look most like `name`, best first.

    Compares case-insensitively and, for dotted names, by the last part as well, so that
    `num_microbatches` finds `model.num_micro_batches`.

    >>> nearest("num_microbatches", ["model.num_micro_batches", "input.batch_size"])
    ['model.num_micro_batches']
    """
    wanted = name.lower()[:100]  # what is longer comes from hostile texts
    tail = wanted.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        lower = candidate.lower()
        whole = difflib.SequenceMatcher(None, wanted, lower).ratio()
        last = difflib.SequenceMatcher(None, tail, lower.rsplit(".", 1)[-1]).ratio()
        return max(whole, last - 0.01)

    scored = sorted(((likeness(n), n) for n in set(names)), key=lambda pair: (-pair[0], pair[1]))
    return [candidate for score, candidate in scored[:3] if score >= 0.6]


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return what a message says of a wrong name: the nearest right ones, or what there are.

    >>> suggestion("nevr", ["never", "full"])
    "nearest 'never'"
    >>> suggestion("x", ["never", "full"])
    "there are 'full', 'never'"
    """
    known = sorted(set(names))
    near = nearest(name, known)
    if near:
        return f"nearest {', '.join(map(repr, near))}"
    count = len(known) if len(known) <= 10 else 3
    shown = ", ".join(map(repr, known[:count])) or "none"
    return f"there are {shown}" + (f" and {len(known) - count} more" if known[count:] else "")


def cause(error: Exception, caller: str) -> str:
    """Return an error of another's code and its place, on one line.

    Args:
        error: what it raised.
        caller: the file that called it, which is not named as the place.
    """
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    outside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != caller and not frame.filename.startswith(("<", sys.base_prefix))
    ]
    return f"{text} ({outside[-1].filename}, line {outside[-1].lineno})" if outside else text
