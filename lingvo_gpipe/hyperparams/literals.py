"""Values and paths in texts: Python literals, dotted names, and `model.layers[0].units`.

Text from outside is data. Python's own parser turns it into a syntax tree, of which only constants,
containers and names are read; nothing is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
from typing import Any, TypeAlias

from lingvo_gpipe.errors import ParamsError

Value: TypeAlias = Any
"""What a field may hold."""
Step: TypeAlias = str | int
"""One step of a path: a field's name, a dict's key, or an index of a list or tuple."""

_SHOWN_CHARS = 80
_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Name:
    """A dotted name in a text, not looked up yet."""

    text: str

    def __repr__(self) -> str:
        return self.text


def shown(value: object) -> str:
    """Return a short text of any value, for a message.

    >>> shown("a" * 100)[-6:]
    'aaa...'
    """
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def parse_literal(text: str) -> Value:
    """Return the value of a literal: None, a boolean, number or string, or a container of them.

    Containers are tuples, lists, and dicts whose keys are strings. Floats may also be `inf` and
    `nan`; another dotted name becomes a `Name`.

    >>> parse_literal("{'a': (1, -2.5), 'b': [layers.Dense]}")
    {'a': (1, -2.5), 'b': [layers.Dense]}

    Raises:
        ParamsError: the text is anything else.
    """
    try:
        return _value_of(_parsed(text))
    except (ValueError, RecursionError) as error:
        raise ParamsError(
            f"cannot read {shown(text)} as a literal, whose strings are in quotes: {error}"
        ) from None


def _parsed(text: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Raises:
        ValueError: it has none.
    """
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except MemoryError:
        raise ValueError("it is too complex") from None


def _value_of(node: ast.expr) -> Value:
    """Return the value of a parsed literal.

    Raises:
        ValueError: it is not a literal.
    """
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return _CONSTANTS.get(name, Name(name))
        case ast.Attribute():
            return Name(_dotted_name_of(node))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name() as operand):
            number = _value_of(operand)
            if type(number) in (int, float):
                return -number
        case ast.Tuple(elts=items):
            return tuple(map(_value_of, items))
        case ast.List(elts=items):
            return list(map(_value_of, items))
        case ast.Dict():
            return _dict_of(node)
    raise ValueError("it must be a constant, a container or a name, without operators or calls")


def _dotted_name_of(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted_name_of(inner)}.{name}"
    raise ValueError(f"{shown(ast.unparse(node))} is not a name")


def _dict_of(node: ast.Dict) -> dict[str, Value]:
    items: dict[str, Value] = {}
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        key = None if key_node is None else _value_of(key_node)
        if not isinstance(key, str):
            raise ValueError(f"the key {shown(key)} is not a string")
        if key in items:
            raise ValueError(f"the key {shown(key)} is repeated")
        items[key] = _value_of(value_node)
    return items


def parse_path(path: str) -> list[Step]:
    """Split a path into names, keys and indices.

    >>> parse_path("model.layers[-1].tie['a b']")
    ['model', 'layers', -1, 'tie', 'a b']

    Raises:
        ParamsError: it is not of this form.
    """
    names = path.split(".")
    if all(map(str.isidentifier, names)):
        return [*names]
    steps: list[Step] = []
    try:
        node = _parsed(path)
        while not isinstance(node, ast.Name):
            match node:
                case ast.Attribute(value=inner, attr=name):
                    steps.append(name)
                case ast.Subscript(value=inner, slice=index):
                    step = _value_of(index)
                    if type(step) not in (str, int):
                        raise ValueError(f"[{shown(step)}] is no step")
                    steps.append(step)
                case _:
                    raise ValueError("it must be names and brackets")
            node = inner
    except (ValueError, RecursionError):
        raise ParamsError(
            f"{shown(path)} is not a dotted path such as model.layers[0].units"
        ) from None
    return [node.id, *reversed(steps)]


def join_path(path: str, step: Step) -> str:
    """Return `path` with one more step.

    >>> join_path(join_path("layers", 0), "a b")
    "layers[0]['a b']"
    """
    if isinstance(step, int):
        return f"{path}[{step}]"
    # Python's parser normalises other letters.
    if step.isascii() and step.isidentifier() and not keyword.iskeyword(step):
        return f"{path}.{step}" if path else step
    return f"{path}[{step!r}]"
