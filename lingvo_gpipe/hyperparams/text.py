"""Params as text, a `dotted.path: value` per line: written, read, compared and listed.

Params and containers that hold some have a line `path.class: name` before those of their fields or
elements; the first line is that of the tree itself, `class: name`. A text from outside is data:
whatever it holds, reading it ends in a tree or in a `ParamsError` that names the line.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import references
from lingvo_gpipe.hyperparams import types as kinds
from lingvo_gpipe.hyperparams.literals import Step, Value, parse_literal, parse_path, shown
from lingvo_gpipe.hyperparams.types import Node

if TYPE_CHECKING:
    from lingvo_gpipe.hyperparams.params import Params

_WIDTH = 100
_LINE = re.compile(
    r"""((?:[^'":]|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")++): (.*)"""  # keys are in quotes
)
_T = TypeVar("_T")


def values_by_path(tree: Params) -> Iterator[tuple[str, str]]:
    """Yield (path, text of the value) of every line.

    Raises:
        ParamsError: a value has no text (a lambda, a class made inside a function).
    """
    for path, value, _ in [("", tree, None), *tree.walk()]:
        place = f"{path}.class" if path else "class"
        try:
            if isinstance(value, Node):
                yield place, references.text_name(value.owner or type(value))
            elif kinds.holds_params(value):
                yield place, kinds.container(value).__name__
            else:
                yield path, format_value(value)
        except ParamsError as error:
            raise ParamsError(f"{tree.class_name()}: '{path}': {error}") from None


def format_value(value: Value) -> str:
    """Return the text of a value that holds no Params, as `parse_literal` reads it.

    Raises:
        ParamsError: the value has no text.

    >>> format_value({"a": (1,), "b": [-0.5, kinds.Node]})
    "{'a': (1,), 'b': [-0.5, lingvo_gpipe.hyperparams.types.Node]}"
    """
    if isinstance(value, kinds.Opaque):
        return format_value(value.plain())
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {format_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, type | types.FunctionType):
        return references.text_name(value)
    return repr(value)


def write(tree: Params) -> str:
    """Return the text of a tree, which `read` reads.

    Raises:
        ParamsError: a value has no text.
    """
    return "".join(f"{path}: {value}\n" for path, value in values_by_path(tree))


@dataclasses.dataclass(slots=True)
class _Line:
    """A line of a text, and the lines below it by their step."""

    number: int
    value: str
    is_class: bool
    children: dict[Step, _Line] = dataclasses.field(default_factory=dict)

    def do(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function; its error names this line."""
        try:
            return function(*args)
        except ParamsError as error:
            raise type(error)(f"line {self.number}: {error}") from None


def read(source: str) -> Node:
    """Return the tree of a text that `write` wrote.

    Empty lines and those that begin with `#` are skipped. A field without a line keeps its default,
    so that older texts can be read.

    Raises:
        ParamsError: the text is not of this form, or its values do not fit.
    """
    lines: dict[tuple[Step, ...], _Line] = {}
    for number, raw in enumerate(source.split("\n"), 1):
        stripped = raw.strip()
        if stripped and not stripped.startswith("#"):
            line = _Line(number, "", False)
            line.do(_add_line, lines, line, stripped)
    if not lines:
        raise ParamsError("the text is empty; it begins with 'class: name'")
    try:
        root: Node = _value_of(lines[()])
    except RecursionError:
        raise ParamsError("the text is nested too deep") from None
    return root


def _add_line(lines: dict[tuple[Step, ...], _Line], line: _Line, text: str) -> None:
    """Parse a line, and put it below its parent."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ParamsError(f"{shown(text)} is not of the form 'dotted.path: value'")
    path, line.value = match.groups()
    line.is_class = path == "class" or path.endswith(".class")
    if line.is_class:
        path = path.removesuffix("class").removesuffix(".")
    steps = tuple(parse_path(path)) if path else ()
    if not lines and (steps or not line.is_class):
        raise ParamsError(f"a text begins with 'class: name', not {shown(text)}")
    if steps in lines:
        raise ParamsError(f"a second line of '{path}'")
    if steps:
        parent = lines.get(steps[:-1])
        if parent is None or not parent.is_class:
            raise ParamsError(f"'{path}' comes before a line '... .class: name' of what holds it")
        parent.children[steps[-1]] = line
    lines[steps] = line


def _value_of(line: _Line) -> Value:
    """Return what a line and the lines below it mean; names in it are looked up when it is set."""
    if not line.is_class:
        return line.do(parse_literal, line.value)
    if line.value in ("list", "tuple", "dict"):
        items = {step: _value_of(child) for step, child in line.children.items()}
        if line.value == "dict" and all(isinstance(step, str) for step in items):
            return items
        if line.value != "dict" and list(items) == list(range(len(items))):
            return list(items.values()) if line.value == "list" else tuple(items.values())
        raise ParamsError(f"line {line.number}: the elements below are not those of a {line.value}")
    node = line.do(_new_node, line.value)
    for step, child in line.children.items():
        child.do(setattr, node, str(step), _value_of(child))
    return node


def _new_node(name: str) -> Node:
    """Return the fresh Params of a class by its name."""
    named = references.resolve(name)
    params = getattr(named, "Params", None)
    is_owner = isinstance(params, type) and issubclass(params, Node) and params.owner is named
    params = params if is_owner else named
    if isinstance(params, type) and issubclass(params, Node):
        return params()
    raise ParamsError(f"{shown(name)} is not a class with Params")


def written_values(text: str) -> dict[str, str]:
    r"""Return the values of a text's lines as they are written.

    >>> written_values("class: layers.Dense\nunits: 3\n")
    {'class': 'layers.Dense', 'units': '3'}
    """
    lines = (line.partition(": ") for line in text.splitlines())
    return {path: value for path, _, value in lines}


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


def listed(params: Params, pattern: str) -> list[str]:
    """Return lines for each field whose path matches: `path = value (type)`, and its help.

    Args:
        params: the tree.
        pattern: a glob, such as `train.optimizer.*`; brackets stand for themselves, as in
            `model.layers[*].units`.
    """
    lines = []
    pattern = pattern.replace("[", "[[]")
    for path, value, field in params.iter_paths():
        if fnmatch.fnmatchcase(path, pattern):
            short = shown(value)
            lines.append(f"{path} = {short} ({kinds.describe(field.type)})")
            lines += textwrap.wrap(
                field.help, _WIDTH, initial_indent="    ", subsequent_indent="    "
            )
    return lines
