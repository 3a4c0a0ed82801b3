"""Values in texts: Python literals of constants, numbers, strings, containers and dotted names.

Text from outside is data: nothing in it is evaluated. Before Python's own parser sees a value, its
length, the kinds of its tokens and the depth of its brackets are checked, so that no text makes the
parser recurse deeply or warn.

Limits: a value has at most 200,000 characters, its brackets are at most 50 deep, and an integer has
at most 4,000 digits.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import keyword
import re
import types
import unicodedata
from typing import Any, TypeAlias

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams.messages import shown
from lingvo_gpipe.hyperparams.references import names

Value: TypeAlias = Any
"""What a field may hold."""

MAX_CHARS = 200_000
MAX_DEPTH = 50
_MAX_DIGITS = 4_000
_MAX_INT_BITS = 13_287  # of the largest integer of that many digits
_TOO_LONG = f"an integer has more than {_MAX_DIGITS} digits"

_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}
_KEYWORDS = "|".join(word for word in keyword.kwlist if word not in ("None", "True", "False"))
_ESCAPE = (
    r"\\(?:[\\'\"nrtabfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|[0-3][0-7]{0,2}|[4-7][0-7]?(?![0-7]))"
)
# Possessive quantifiers (`*+`) do not backtrack, so that matching takes linear time.
_STRING = rf"""(?:'(?:[^'\\\n\r\0]|{_ESCAPE})*+'|"(?:[^"\\\n\r\0]|{_ESCAPE})*+")"""
_NUMBER = (
    r"(?:0[xX][0-9a-fA-F_]++|0[oO][0-7_]++|0[bB][01_]++"
    r"|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9][0-9_]*+)?)(?!\w)"
)
_NAME = (
    rf"(?!(?:{_KEYWORDS})\b)[^\W\d]\w*+(?:\.[^\W\d]\w*+){{0,{names.MAX_PARTS - 1}}}+(?![\w'\".])"
)
_CONSTANT = rf"(?:-\s*+(?:{_NUMBER}|(?:inf|nan)\b)|{_NUMBER}|{_STRING}|{_NAME})"
_END = r"(?=\s*+(?:[,:)\]}]|\Z))"  # after a value
_TOKENS = re.compile(rf"(?:{_CONSTANT}{_END}|[)\]}}]{_END}|[(\[{{,:]|\s++)*+")
_LONG_INTEGER = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")
_NEXT_CONSTANT = re.compile(_CONSTANT)
_NOT_A_MARK = re.compile(rf"{_STRING}|[^()\[\]{{}},:'\"]++")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Name:
    """A dotted name in a text, not looked up yet."""

    text: str

    def __repr__(self) -> str:
        return self.text


def parse_literal(text: str) -> Value:
    """Return the value of a Python literal of None, booleans, numbers, strings and containers.

    Containers are tuples, lists, and dicts whose keys are strings. Floats may also be `inf` and
    `nan`; another dotted name becomes a `Name`.

    >>> parse_literal("{'a': (1, -2.5), 'b': [tf.float32]}")
    {'a': (1, -2.5), 'b': [tf.float32]}

    Raises:
        ParamsError: the text is anything else.
    """
    if len(text) > MAX_CHARS:
        raise ParamsError(
            f"cannot read {shown(text)}: {len(text)} characters, more than {MAX_CHARS}"
        )
    source = text.strip()
    try:
        _check_tokens(source)
        return _value_of(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ParamsError(
            f"cannot read {shown(text)} as a literal: {reason} (literals and names only, no "
            "operators)"
        ) from None


def _check_tokens(source: str) -> None:
    """Refuse a text whose tokens alone show that it is not a literal.

    Raises:
        ValueError: a token is not allowed at its place, or brackets are too deep.
    """
    if not source:
        raise ValueError("it is empty")
    match = _TOKENS.match(source)
    end = match.end() if match else 0
    if end < len(source):
        constant = _NEXT_CONSTANT.match(source, end)
        # If a constant is there, what follows it is wrong.
        rest = shown(source[constant.end() if constant else end :].strip())
        if constant is None and source[end] in "'\"":
            raise ValueError(f"the string {rest} is not closed, or has an unknown escape")
        raise ValueError(f"unexpected {rest}")
    if len(source) > _MAX_DIGITS and _LONG_INTEGER.search(re.sub(_STRING, "", source)):
        raise ValueError(_TOO_LONG)
    if not source.isascii() and not unicodedata.is_normalized("NFKC", re.sub(_STRING, "", source)):
        raise ValueError("a name has characters that Python would replace")
    _check_brackets(source)


def _check_brackets(source: str) -> None:
    """Refuse deep brackets, and commas and colons outside them.

    Raises:
        ValueError: there are some.
    """
    depth = 0
    for mark in _NOT_A_MARK.sub("", source):
        if mark in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"brackets are more than {MAX_DEPTH} deep")
        elif mark in ")]}":
            depth -= 1
        elif depth <= 0:
            raise ValueError(f"unexpected {mark!r} outside brackets")


def _value_of(node: ast.expr) -> Value:
    """Return the value of a parsed literal.

    Raises:
        ValueError: it is not a literal.
    """
    match node:
        case ast.Constant(value=value):
            if type(value) is int and value.bit_length() > _MAX_INT_BITS:
                raise ValueError(_TOO_LONG)
            return value
        case ast.Name(id=name):
            return _CONSTANTS[name] if name in _CONSTANTS else Name(name)
        case ast.Attribute():
            return Name(_dotted_name_of(node))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.Tuple(elts=items):
            return tuple(map(_value_of, items))
        case ast.List(elts=items):
            return list(map(_value_of, items))
        case ast.Dict():
            return _dict_of(node)
    raise ValueError(f"{shown(ast.unparse(node))} is not a constant, container or name")


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


def format_value(value: Value) -> str:
    """Return the text of a value that holds no Params, as `parse_literal` reads it.

    >>> format_value({"a": (1,), "b": [-0.5, int]})
    "{'a': (1,), 'b': [-0.5, builtins.int]}"
    """
    if isinstance(value, enum.Enum):
        return f"{names.public_name(type(value))}.{value.name}"
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {format_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, type | types.FunctionType):
        return names.public_name(value)
    return f"tf.{value.name}" if names.is_dtype(type(value)) else repr(value)
