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
import functools
import importlib
import importlib.util
import keyword
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from lingvo_gpipe.errors import ParamsError

MAX_VALUE_CHARS = 200_000
MAX_TEXT_CHARS = 8_000_000
MAX_DEPTH = 50
_MAX_INT_BITS = 13_287  # of the largest integer of 4,000 digits
_SHOWN_CHARS = 80

_packages = {"lingvo_gpipe", "keras"}


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A dotted name found in a text, not looked up yet."""

    text: str


def register_package(name: str) -> None:
    """Let texts name the classes and functions of package (or module) `name`.

    >>> register_package("lingvo_gpipe")
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ParamsError(f"{shown(name)} is not the name of a package")
    _packages.add(name)


def shown(value: object) -> str:
    """Return a short text of any value, for messages."""
    if isinstance(value, Name):
        text = value.text
    else:
        try:
            text = repr(value)
        except ValueError:  # an integer beyond Python's limit of digits
            text = "an integer of very many digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


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
    {'a': (1, -2.5), 'b': [Name(text='tf.float32')]}

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


# --- Names ----------------------------------------------------------------------------------------


def qualified_name(referenced: Any) -> str:
    """Return the dotted name of a class or function, Keras' public one where there is one."""
    module, name = str(referenced.__module__), str(referenced.__qualname__)
    if module.startswith("keras.src."):
        public = f"keras.{module.split('.')[2]}"
        if public in sys.modules and vars(sys.modules[public]).get(name) is referenced:
            return f"{public}.{name}"
    return f"{module}.{name}"


def is_dtype(kind: object) -> bool:
    """Tell whether `kind` is TensorFlow's class DType, without importing TensorFlow."""
    return (
        isinstance(kind, type)
        and kind.__name__ == "DType"
        and kind.__module__.startswith("tensorflow.")
    )


@functools.cache
def _dtypes() -> dict[str, Any]:
    import tensorflow as tf  # Params without dtypes need no TensorFlow

    found = vars(tf.dtypes.experimental) | vars(tf.dtypes)
    return {value.name: value for value in found.values() if isinstance(value, tf.DType)}


def dtype_by_name(name: str) -> Any | None:
    """Return the dtype called `float32` or `tf.float32`, or None."""
    return _dtypes().get(name.removeprefix("tf."))


def resolve(name: str) -> Any:
    """Return the class, function, enum member or dtype of a dotted name.

    Imports nothing but modules of registered packages, and follows nothing but a module's classes
    and functions, a class's nested classes, and an enum's members.

    Raises:
        ParamsError: the package is not registered, or has no such class or function.
    """
    if name.startswith("tf.") and (dtype := dtype_by_name(name)) is not None:
        return dtype
    if not _registered(name):
        raise ParamsError(
            f"{shown(name)} is not in a registered package ({', '.join(sorted(_packages))}); "
            "register_package(name) adds one"
        )
    module, parts = _module_of(name)
    found: Any = module
    for position, part in enumerate(parts):
        if isinstance(found, enum.EnumMeta) and part in found.__members__:
            found = found.__members__[part]
            if position < len(parts) - 1:
                raise _not_found(name)
            return found
        found = vars(found).get(part)
        function_in_module = isinstance(found, types.FunctionType) and len(parts) == 1
        if not isinstance(found, type) and not function_in_module:
            raise _not_found(name)
        if not _registered(str(found.__module__)):
            raise _not_found(name)
    return found


def _registered(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in _packages)


def _not_found(name: str) -> ParamsError:
    return ParamsError(f"{shown(name)} is not a class or function of a registered package")


def _module_of(name: str) -> tuple[types.ModuleType, list[str]]:
    """Return the module of the longest prefix of `name` that is one, and the other parts."""
    parts = name.split(".")
    module: types.ModuleType | None = None
    rest = parts
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if not _registered(prefix):
            continue
        found = _import(prefix, name)
        if found is None:
            break
        module, rest = found, parts[count:]
    if module is None:
        raise _not_found(name)
    return module, rest


def _import(module: str, name: str) -> types.ModuleType | None:
    """Return a module of a registered package, or None where there is none of this name."""
    known = sys.modules.get(module)
    if known is not None or module.rsplit(".", 1)[-1].startswith("__"):
        return known
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise ParamsError(f"{shown(name)} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ParamsError(
            f"{shown(name)} cannot be imported: {type(error).__name__}: {error}"
        ) from error


# --- Writing --------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """Return the text of a value that holds no Params, as `parse_literal` reads it."""
    if isinstance(value, enum.Enum):
        return f"{qualified_name(type(value))}.{value.name}"
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {format_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, type | types.FunctionType):
        return qualified_name(value)
    return f"tf.{value.name}" if is_dtype(type(value)) else repr(value)


def check_references(value: Any) -> None:
    """Refuse a value with a class, function or dtype that its written name does not lead to.

    Raises:
        ParamsError: such as for a lambda or a class made inside a function.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_references(item)
    elif isinstance(value, dict):
        for item in value.values():
            check_references(item)
    elif isinstance(value, enum.Enum):
        check_references(type(value))
    elif isinstance(value, type | types.FunctionType):
        found: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
        if found is not value:
            raise ParamsError(
                f"{shown(value)} has no name that a text could hold; define it at the top of a "
                "module"
            )
    elif is_dtype(type(value)) and dtype_by_name(value.name) is not value:
        raise ParamsError(f"{shown(value)} has no name that a text could hold")
