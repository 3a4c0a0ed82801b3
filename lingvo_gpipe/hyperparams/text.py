"""Writing a tree of Params as text, a `dotted.path: value` per line.

Params and containers that hold some have a line `path.class: name` before those of their fields or
elements; the first line is that of the tree itself, `class: name`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.literals import MAX_CHARS, format_value
from lingvo_gpipe.hyperparams.messages import shorten
from lingvo_gpipe.hyperparams.names import check_references
from lingvo_gpipe.hyperparams.paths import MAX_STEPS, parse_path
from lingvo_gpipe.hyperparams.tree import walk
from lingvo_gpipe.hyperparams.types import Node

MAX_BYTES = 4_000_000
"""Limit of a text, four times that of 1,663 layers; comparing two of these takes seconds."""


def values_by_path(tree: Node) -> Iterator[tuple[str, str]]:
    """Yield (path, text of the value) of every line."""
    yield "class", tree.class_name()
    for path, value, _ in walk(tree):
        if isinstance(value, Node):
            yield f"{path}.class", value.class_name()
        elif types.holds_params(value):
            yield f"{path}.class", types.container(value).__name__
        else:
            yield path, format_value(value)


def write(tree: Node) -> str:
    """Return the text of a tree, which `parsing.read` reads.

    Raises:
        ParamsError: a value has no text (a lambda, a class made inside a function), or its text is
            too long or too deep.
    """
    _check(tree)
    lines = [f"{path}: {value}\n" for path, value in values_by_path(tree)]
    longest = max(lines, key=len)
    if len(longest) > MAX_CHARS:
        raise ParamsError(
            f"{tree.class_name()}: '{shorten(longest)}' is too long for a text "
            f"(more than {MAX_CHARS} characters); keep it in a file"
        )
    text = "".join(lines)
    if len(text.encode()) > MAX_BYTES:
        raise ParamsError(
            f"{tree.class_name()} is too long for a text (more than {MAX_BYTES} bytes); make one "
            "layer of several, or keep large values in files"
        )
    return text


def _check(tree: Node) -> None:
    for path, value, _ in [("class", tree, None), *walk(tree)]:
        try:
            if path.count(".") + path.count("[") >= MAX_STEPS:
                parse_path(path)
            check_references(_named_class(value) if isinstance(value, Node) else value)
        except ParamsError as error:
            raise ParamsError(f"{tree.class_name()}: '{path}': {error}") from None


def _named_class(node: Node) -> type:
    """Return the class whose name stands for `node`."""
    return node.owner or type(node)
