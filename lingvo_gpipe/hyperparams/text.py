"""Text of Params: literals, dotted paths, and names of classes, functions and dtypes.

Text from outside is data. Values are read by the small parser below, which knows constants,
numbers, strings, brackets and dotted names, and no operator but a minus sign; names are looked up
in registered packages alone, by walking from a module to a class or a function that was defined
there. Whatever a text holds, reading it ends in a value or in a `ParamsError`.

Limits: a value's text has at most 200,000 characters, a whole text 8,000,000; brackets and paths
are at most 50 deep; an integer has at most 4,000 digits.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import names
from lingvo_gpipe.hyperparams.messages import shown

MAX_VALUE_CHARS = 200_000
MAX_TEXT_CHARS = 8_000_000
MAX_DEPTH = 50
_MAX_INT_BITS = 13_287  # of the largest integer of 4,000 digits


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Name:
    """A dotted name found in a text, not looked up yet."""

    text: str

    def __repr__(self) -> str:
        return self.text


# --- Literals -------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+
        |(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9][0-9_]*)?)(?!\w))
    | (?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    | (?P<string>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")(?!['"])
    | (?P<mark>[-()\[\]{},:])
    )""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[\\'\"nrtabfv]|(?s:.))"
)
_ESCAPED = dict(zip("\\'\"nrtabfv", "\\'\"\n\r\t\a\b\f\v", strict=True))
_CONSTANTS = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_literal(text: str) -> Any:
    """Read a Python literal of None, booleans, numbers, strings, tuples, lists and dicts.

    Floats may also be `inf`, `nan`; a dotted name becomes a `Name`.

    >>> parse_literal("{'a': (1, -2.5), 'b': [tf.float32]}")
    {'a': (1, -2.5), 'b': [tf.float32]}

    Raises:
        ParamsError: the text is anything else.
    """
    if len(text) > MAX_VALUE_CHARS:
        raise ParamsError(
            f"cannot read {shown(text)}: {len(text)} characters, more than {MAX_VALUE_CHARS}"
        )
    return _LiteralParser(text).parse()


class _LiteralParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._kind: str | None = None
        self._token = ""

    def parse(self) -> Any:
        self._advance()
        value = self._value(0)
        if self._kind is not None:
            raise self._error(f"{shown(self._token)} is too much")
        return value

    def _error(self, reason: str) -> ParamsError:
        return ParamsError(
            f"cannot read {shown(self._text)} as a literal: {reason} (literals and names only, "
            "no operators)"
        )

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            rest = self._text[self._position :].strip()
            if rest:
                raise self._error(f"it stops making sense at {shown(rest)}")
            self._kind, self._token = None, ""
            return
        self._position = match.end()
        self._kind = match.lastgroup
        self._token = match.group(self._kind or 0)

    def _take(self, mark: str) -> bool:
        if self._kind == "mark" and self._token == mark:
            self._advance()
            return True
        return False

    def _value(self, depth: int) -> Any:
        kind, token = self._kind, self._token
        if kind is None:
            raise self._error("it ends too early")
        if kind == "mark":
            return self._bracket_or_minus(token, depth)
        self._advance()
        if kind == "number":
            return self._number(token)
        if kind == "string":
            return _ESCAPE.sub(self._unescape, token[1:-1])
        return _CONSTANTS[token] if token in _CONSTANTS else Name(token)

    def _bracket_or_minus(self, token: str, depth: int) -> Any:
        if token == "-":
            self._advance()
            if self._kind != "number" and self._token not in ("inf", "nan"):
                raise self._error("a minus stands before a number alone")
            return -self._value(depth)
        if token not in _CLOSING:
            raise self._error(f"{shown(token)} is out of place")
        if depth >= MAX_DEPTH:
            raise self._error(f"brackets are more than {MAX_DEPTH} deep")
        self._advance()
        return self._dict(depth) if token == "{" else self._sequence(token, depth)

    def _sequence(self, opening: str, depth: int) -> Any:
        closing = _CLOSING[opening]
        items: list[Any] = []
        comma = False
        while not self._take(closing):
            items.append(self._value(depth + 1))
            comma = self._take(",")
            if not comma and not (self._kind == "mark" and self._token == closing):
                raise self._error(f"',' or '{closing}' is missing")
        if opening == "[":
            return items
        return items[0] if len(items) == 1 and not comma else tuple(items)

    def _dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self._take("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise self._error(f"the key {shown(key)} is not a string")
            if key in items:
                raise self._error(f"the key {shown(key)} stands twice")
            if not self._take(":"):
                raise self._error("':' is missing")
            items[key] = self._value(depth + 1)
            if not self._take(",") and not (self._kind == "mark" and self._token == "}"):
                raise self._error("',' or '}' is missing")
        return items

    def _number(self, token: str) -> int | float:
        try:
            if token[:2].lower() in ("0x", "0o", "0b") or token.replace("_", "").isdecimal():
                number: int | float = int(token, 0)
            else:
                number = float(token)
        except ValueError:
            raise self._error(f"{shown(token)} is no number, or too long a one") from None
        if isinstance(number, int) and number.bit_length() > _MAX_INT_BITS:
            raise self._error("an integer has more than 4000 digits")
        return number

    def _unescape(self, match: re.Match[str]) -> str:
        code = match.group(1)
        if code in _ESCAPED:
            return _ESCAPED[code]
        if code[0] in "xuU" and len(code) > 1:
            point = int(code[1:], 16)
        elif code.isdecimal() and code.isascii():
            point = int(code, 8)
        else:
            raise self._error(f"the escape {shown(match.group())} is not known")
        if point > (0o377 if code.isdecimal() else sys.maxunicode):
            raise self._error(f"{shown(match.group())} is no character")
        return chr(point)


# --- Paths ----------------------------------------------------------------------------------------

Step = str | int
_PLAIN_KEY = re.compile(r"[^\W\d]\w*")
_STEP = re.compile(
    r"""(?P<name>[^\W\d]\w*)|\[(?P<index>-?[0-9]{1,9})\]
    |\[(?P<key>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\]""",
    re.VERBOSE,
)


def parse_path(path: str) -> list[Step]:
    """Split `model.layers[0].tie['a b'].units` into names, keys and indices.

    >>> parse_path("model.layers[0].tie['a b']")
    ['model', 'layers', 0, 'tie', 'a b']
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
        if match is None or len(steps) >= MAX_DEPTH:
            raise _path_error(path)
        position = match.end()
        if match.lastgroup == "index":
            steps.append(int(match.group("index")))
        elif match.lastgroup == "key":
            steps.append(parse_literal(match.group("key")))
        else:
            steps.append(match.group("name"))
    return steps


def _path_error(path: str) -> ParamsError:
    return ParamsError(
        f"{shown(path)} is not a dotted path (at most {MAX_DEPTH} deep) such as "
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


# --- Lines ----------------------------------------------------------------------------------------

_LINE = re.compile(
    r"""(?P<path>[^\W\d]\w*(?:\.[^\W\d]\w*|\[[0-9]{1,9}\]
    |\[(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\])*):\s(?P<value>.*)""",
    re.VERBOSE,
)


@dataclasses.dataclass(slots=True)
class Entry:
    """A line of a text, and the lines below it by their step."""

    path: str
    value: str
    is_class: bool
    number: int
    children: dict[Step, Entry] = dataclasses.field(default_factory=dict)

    def paths(self) -> Iterator[str]:
        """Yield the paths of all lines below."""
        for child in self.children.values():
            yield child.path
            yield from child.paths()


def parse_lines(source: str) -> Entry:
    """Return a text's lines as a tree; its first line, `class: name`, is the root.

    Empty lines and those that begin with `#` are skipped.
    """
    if len(source) > MAX_TEXT_CHARS:
        raise ParamsError(f"the text has {len(source)} characters, more than {MAX_TEXT_CHARS}")
    root: Entry | None = None
    for number, raw in enumerate(source.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            entry, steps = _parse_line(line, number)
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


def _parse_line(line: str, number: int) -> tuple[Entry, list[Step]]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ParamsError(f"{shown(line)} is not of the form 'dotted.path: value'")
    path, value = match.group("path"), match.group("value").strip()
    is_class = path == "class" or path.endswith(".class")
    path = path.removesuffix("class").removesuffix(".") if is_class else path
    return Entry(path, value, is_class, number), parse_path(path) if path else []


def _attach(root: Entry, entry: Entry, steps: list[Step]) -> None:
    if not steps:
        raise ParamsError("a second 'class: name' of the root")
    parent = root
    for step in steps[:-1]:
        if step not in parent.children:
            raise ParamsError(f"'{entry.path}' stands before its parent's line '... .class: name'")
        parent = parent.children[step]
    if not parent.is_class:
        raise ParamsError(f"'{parent.path}' is a value and has no '{entry.path}'")
    if steps[-1] in parent.children:
        raise ParamsError(f"a second line of '{entry.path}'")
    parent.children[steps[-1]] = entry


# --- Writing --------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """Return the text of a value that holds no Params, as `parse_literal` reads it."""
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
