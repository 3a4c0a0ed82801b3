"""The fields of a tree of Params as lines for a user: path, value, type and help."""

from __future__ import annotations

import fnmatch
import textwrap

from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.params import Params

_WIDTH = 100


def lines(params: Params, pattern: str) -> list[str]:
    """Return lines for each field whose path matches: `path = value (type)`, and its help.

    Args:
        params: the tree.
        pattern: a glob, such as `train.optimizer.*`.
    """
    found = []
    for path, value, field in params.iter_paths():
        if not fnmatch.fnmatchcase(path, pattern):
            continue
        shown = textwrap.shorten(repr(value), _WIDTH, placeholder=" …")
        found.append(f"{path} = {shown} ({types.describe(field.type)})")
        found += textwrap.wrap(field.help, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return found
