"""Dotted paths into a tree of Params: `model.layers[0].tie['a b'].units`."""

from __future__ import annotations

import keyword
import re

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams.literals import parse_literal
from lingvo_gpipe.hyperparams.messages import shown

Step = str | int
"""A field's name or a dict's key; an index of a list or tuple."""

MAX_STEPS = 50

_PLAIN_KEY = re.compile(r"[^\W\d]\w*")
_STEP = re.compile(
    r"""(?P<name>[^\W\d]\w*)|\[(?P<index>-?[0-9]{1,9})\]
    |\[(?P<key>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\]""",
    re.VERBOSE,
)


def parse_path(path: str) -> list[Step]:
    """Split a path into names, keys and indices.

    >>> parse_path("model.layers[0].tie['a b']")
    ['model', 'layers', 0, 'tie', 'a b']

    Raises:
        ParamsError: it is not of this form.
    """
    steps: list[Step] = []
    position = 0
    while position < len(path) or not steps:
        if steps and path[position] == ".":
            position += 1
            if path[position : position + 1] == "[":
                raise _path_error(path)
        elif steps and path[position] != "[":
            raise _path_error(path)
        match = _STEP.match(path, position)
        if match is None or len(steps) >= MAX_STEPS:
            raise _path_error(path)
        position = match.end()
        if match.lastgroup == "index":
            steps.append(int(match["index"]))
        elif match.lastgroup == "key":
            steps.append(parse_literal(match["key"]))
        else:
            steps.append(match["name"])
    return steps


def _path_error(path: str) -> ParamsError:
    return ParamsError(
        f"{shown(path)} is not a dotted path (at most {MAX_STEPS} deep) such as "
        "model.layers[0].units"
    )


def join_path(path: str, step: Step) -> str:
    """Return `path` with one more step.

    >>> join_path(join_path("layers", 0), "a b")
    "layers[0]['a b']"
    """
    if isinstance(step, int):
        return f"{path}[{step}]"
    if _PLAIN_KEY.fullmatch(step) and not keyword.iskeyword(step):
        return f"{path}.{step}" if path else step
    return f"{path}[{step!r}]"
