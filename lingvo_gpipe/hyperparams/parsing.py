"""Reading the text of a tree of Params; `text` says how it is written.

A text from outside is data: no line evaluates anything. `literals` says which values are read, and
`names` how classes are looked up. Whatever a text holds, reading it ends in a tree or in a
`ParamsError` that names the line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.fields import REQUIRED, parse_value
from lingvo_gpipe.hyperparams.literals import Value
from lingvo_gpipe.hyperparams.messages import shorten, shown
from lingvo_gpipe.hyperparams.paths import MAX_STEPS, Step, join_path, parse_path
from lingvo_gpipe.hyperparams.references import names
from lingvo_gpipe.hyperparams.tree import UnknownFieldError, unknown_field
from lingvo_gpipe.hyperparams.types import Kind, Node

MAX_CHARS = 8_000_000

_LINE = re.compile(
    r"""(?P<path>[^\W\d]\w*(?:\.[^\W\d]\w*|\[[0-9]{1,9}\]
    |\[(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\])*):\s(?P<value>.*)""",
    re.VERBOSE,
)


@dataclasses.dataclass(slots=True)
class _Entry:
    """A line of a text, and the lines below it by their step."""

    path: str
    value: str
    is_class: bool
    number: int
    children: dict[Step, _Entry] = dataclasses.field(default_factory=dict)

    def paths(self) -> Iterator[str]:
        """Yield the paths of all lines below."""
        for child in self.children.values():
            yield child.path
            yield from child.paths()


def read(source: str) -> Node:
    """Return the tree of a text that `text.write` wrote.

    Empty lines and those that begin with `#` are skipped. A field without a line keeps its default,
    so that older texts can be read.

    Raises:
        ParamsError: the text is not of this form, or its values do not fit.
    """
    return _Reader(_parse_lines(source)).read()


def _parse_lines(source: str) -> _Entry:
    """Return a text's lines as a tree; its first line, `class: name`, is the root."""
    if len(source) > MAX_CHARS:
        raise ParamsError(f"the text has {len(source)} characters, more than {MAX_CHARS}")
    root: _Entry | None = None
    steps_of: dict[str, list[Step]] = {}
    for number, raw in enumerate(source.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            entry = _parse_line(line, number)
            steps = _steps(entry.path, steps_of)
            if root is None:
                if steps or not entry.is_class:
                    raise ParamsError(f"a text begins with 'class: name', not {shown(line)}")
                root = entry
            else:
                _attach(root, entry, steps)
        except ParamsError as error:
            raise ParamsError(f"line {number}: {error}") from None
    if root is None:
        raise ParamsError("the text is empty; it begins with 'class: name'")
    return root


def _parse_line(line: str, number: int) -> _Entry:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ParamsError(f"{shown(line)} is not of the form 'dotted.path: value'")
    path, value = match["path"], match["value"].strip()
    is_class = path == "class" or path.endswith(".class")
    path = path.removesuffix("class").removesuffix(".") if is_class else path
    return _Entry(path, value, is_class, number)


def _steps(path: str, steps_of: dict[str, list[Step]]) -> list[Step]:
    """Return the steps of a path; `steps_of` has those of earlier lines, and gets these."""
    parent, _, name = path.rpartition(".")
    above = steps_of.get(parent)
    if not path:
        steps = []
    elif above is not None and len(above) < MAX_STEPS and name.isidentifier():
        steps = [*above, name]
    else:
        steps = parse_path(path)
    steps_of[path] = steps
    return steps


def _attach(root: _Entry, entry: _Entry, steps: list[Step]) -> None:
    """Put an entry below its parent."""
    if not steps:
        raise ParamsError("a second 'class: name' of the root")
    parent = root
    for step in steps[:-1]:
        if step not in parent.children:
            raise ParamsError(f"'{entry.path}' comes before its parent's line '... .class: name'")
        parent = parent.children[step]
    if not parent.is_class:
        raise ParamsError(f"'{parent.path}' is a value and has no '{entry.path}'")
    if steps[-1] in parent.children:
        raise ParamsError(f"a second line of '{entry.path}'")
    parent.children[steps[-1]] = entry


class _Reader:
    """Makes a tree of a text's lines; knows at which line it is, for messages."""

    def __init__(self, top: _Entry) -> None:
        self._top = top
        self._line = top.number

    def read(self) -> Node:
        try:
            root = _new_node(self._top.value)
            self._fill(root, root, self._top)
        except UnknownFieldError as error:
            message = f"line {self._line}: {error}"
            raise UnknownFieldError(message, error.path, error.nearest) from None
        except ParamsError as error:
            raise ParamsError(f"line {self._line}: {error}") from None
        return root

    def _fill(self, root: Node, node: Node, entry: _Entry) -> None:
        for step, child in entry.children.items():
            self._line = child.number
            field = node._fields.get(step) if isinstance(step, str) else None
            if field is None:
                fields = [join_path(entry.path, name) for name in node._fields]
                others = [path for path in self._top.paths() if path != child.path]
                raise unknown_field(root, child.path, fields + others, ", ".join(node._fields))
            value = REQUIRED
            if field.default is not REQUIRED or child.value != "REQUIRED":
                value = self._value(root, child, field.type)
            self._line = child.number
            field.assign(node, value, root, child.path)

    def _value(self, root: Node, entry: _Entry, kind: Kind) -> Value:
        """Return what `entry` and the lines below it mean, where the type is `kind`."""
        self._line = entry.number
        if not entry.is_class:
            return parse_value(entry.value, kind, type(root), entry.path)
        if entry.value not in ("list", "tuple", "dict"):
            node = _new_node(entry.value)
            self._fill(root, node, entry)
            return node
        items = {
            step: self._value(root, child, types.element_type(kind, step))
            for step, child in entry.children.items()
        }
        self._line = entry.number
        if entry.value == "dict" and all(isinstance(step, str) for step in items):
            return items
        if entry.value != "dict" and list(items) == list(range(len(items))):
            return list(items.values()) if entry.value == "list" else tuple(items.values())
        raise ParamsError(
            f"the elements of '{shorten(entry.path)}' are not those of a {entry.value}"
        )


def _new_node(name: str) -> Node:
    """Return the fresh Params of a class by its name."""
    named = names.resolve(name)
    params = getattr(named, "Params", None)
    made = isinstance(params, type) and issubclass(params, Node) and params.owner is named
    params = params if made else named
    if isinstance(params, type) and issubclass(params, Node):
        return params()
    raise ParamsError(f"{shown(name)} is not a class with Params")
