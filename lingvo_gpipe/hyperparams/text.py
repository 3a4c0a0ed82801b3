"""Params as text, a `dotted.path: value` per line: writing it, and comparing two of them.

Params and containers that hold some have a line `path.class: name` before those of their fields or
elements; the first line is that of the tree itself, `class: name`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.literals import MAX_CHARS, format_value
from lingvo_gpipe.hyperparams.messages import shorten
from lingvo_gpipe.hyperparams.paths import MAX_STEPS, parse_path
from lingvo_gpipe.hyperparams.references import old_names
from lingvo_gpipe.hyperparams.references.names import check_references
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


def written_values(text: str) -> dict[str, str]:
    r"""Return the values of a text's lines as they are written, with today's names of classes.

    >>> written_values("class: lingvo_gpipe.layers.dense.Dense\nunits: 3\n")
    {'class': 'layers.Dense', 'units': '3'}
    """
    lines = (line.partition(": ") for line in text.splitlines())
    return {path: old_names.current_value(value) for path, _, value in lines}


def changed_lines(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return a line for each path whose value differs.

    It is `path: old -> new` for a changed value, `- path: old` and `+ path: new` for one that only
    `old` or only `new` has.

    >>> list(changed_lines({"a": "1", "b": "2"}, {"a": "3", "c": "4"}).values())
    ['a: 1 -> 3', '- b: 2', '+ c: 4']
    """
    lines = {}
    for path in dict.fromkeys([*old, *new]):
        if path not in new:
            lines[path] = f"- {path}: {old[path]}"
        elif path not in old:
            lines[path] = f"+ {path}: {new[path]}"
        elif old[path] != new[path]:
            lines[path] = f"{path}: {old[path]} -> {new[path]}"
    return lines
