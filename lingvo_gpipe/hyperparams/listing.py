"""The fields of a tree of Params as lines for a user: path, value, type and help."""

from __future__ import annotations

import fnmatch
import re
import textwrap

from lingvo_gpipe import errors
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.params import Params

_WIDTH = 100


def near(params: Params, pattern: str) -> str:
    """Return a glob that matches fields, and looks like one that matches none.

    Args:
        params: the tree.
        pattern: the glob that matches none.
    """
    part = pattern.strip("*.")
    paths = [path for path, _, _ in params.iter_paths()]
    if any(part in path for path in paths):
        return f"*{part}*"
    starts = {path[: match.start()] for path in paths for match in re.finditer(r"[.\[]", path)}
    found = errors.nearest(part, [*paths, *starts], 1)
    if not found:
        return "*batch_size"
    return found[0] if found[0] in paths else f"{found[0]}.*"


def lines(params: Params, pattern: str) -> list[str]:
    """Return lines for each field whose path matches: `path = value (type)`, and its help.

    Args:
        params: the tree.
        pattern: a glob, such as `train.optimizer.*`; brackets stand for themselves, as in
            `model.layers[*].units`.
    """
    found = []
    pattern = pattern.replace("[", "[[]")
    for path, value, field in params.iter_paths():
        if not fnmatch.fnmatchcase(path, pattern):
            continue
        shown = textwrap.shorten(repr(value), _WIDTH, placeholder=" …")
        found.append(f"{path} = {shown} ({types.describe(field.type)})")
        found += textwrap.wrap(field.help, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return found
