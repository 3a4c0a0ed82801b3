"""Types of Params' fields: whether a value fits, and the copy of it that is kept.

A field's type is an annotation; `convert` returns the value to keep, or raises `Mismatch`. Values
are kept by value: Params are copied, lists and dicts become read-only copies, so that a tree
changes through `set` and attributes alone, where types are checked.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import re
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeAlias, Union

import numpy as np

from lingvo_gpipe import errors
from lingvo_gpipe.hyperparams import references
from lingvo_gpipe.hyperparams.literals import Name, Step, Value, join_path, parse_literal, shown

if TYPE_CHECKING:
    from lingvo_gpipe.hyperparams.params import Field

Kind: TypeAlias = Any
"""A field's type as its annotation says it: `int`, `str | None`, `list[Layer.Params]`."""

_BARE_TEXT = re.compile(r"[\w./:,-]+")
_CONTAINERS = (list, tuple, dict)
# Values of these types themselves, which most are, are kept as they are.
_PLAIN = frozenset({bool, int, float, str, types.NoneType})


class Node:
    """Base of Params: what the functions below know of them."""

    owner: ClassVar[type | None] = None
    if TYPE_CHECKING:  # types of subclasses' fields are resolved together with these
        _fields: ClassVar[Mapping[str, Field]]
        _frozen: bool
        _values: dict[str, Value]

    @classmethod
    @abc.abstractmethod
    def class_name(cls) -> str:
        """Return the name of the class in texts and messages."""

    @abc.abstractmethod
    def copy(self) -> Self:
        """Return a deep copy."""


class Opaque:
    """An object of this process that Params hold as it is; a text has its plain value instead."""

    def plain(self) -> Value:
        """Return the value that a text has in its place.

        Raises:
            UserError: there is none.
        """
        raise errors.ParamsError(f"{self!r} belongs to this process, and no text can hold it")


class Mismatch(Exception):  # noqa: N818 (never leaves this package: it becomes a ParamsError)
    """A value does not fit a type; `path` leads to the part of it that does not."""

    def __init__(self, expected: str, value: Value, path: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.path = path

    def got(self) -> str:
        """Return the value and its type, for a message."""
        if isinstance(self.value, Name):
            return shown(self.value)
        kind = container(self.value) if isinstance(self.value, _CONTAINERS) else type(self.value)
        return f"{shown(self.value)} ({kind.__name__})"


def _read_only(self: object, *_: object, **__: object) -> NoReturn:
    raise errors.ParamsError(
        f"a {container(self).__name__} in Params is read-only; assign a new one, or set an "
        "element by its path: p.set_path('field[0]', value)"
    )


class ReadOnlyList(list[Any]):
    """A list as Params keep it."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _read_only
    append = extend = insert = pop = remove = clear = sort = reverse = _read_only


class ReadOnlyDict(dict[str, Any]):
    """A dict as Params keep it."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _read_only
    clear = pop = popitem = setdefault = update = _read_only


def container(value: Value) -> type:
    """Return list, tuple or dict, whichever `value` is."""
    return next(kind for kind in _CONTAINERS if isinstance(value, kind))


def holds_params(value: Value) -> bool:
    """Return whether `value` is Params or a container that holds some."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(map(holds_params, value))
    if isinstance(value, dict):
        return any(map(holds_params, value.values()))
    return isinstance(value, Node)


def same(one: Value, other: Value) -> bool:
    """Compare by value and type; nan equals nan, and 0.0 is not -0.0, as in texts."""
    if isinstance(one, Opaque) != isinstance(other, Opaque):  # one of them was read from a text
        one, other = (each.plain() if isinstance(each, Opaque) else each for each in (one, other))
    # One of two equal lists or dicts may be read-only and the other not.
    contained = isinstance(one, list | dict) and isinstance(other, container(one))
    if not contained and type(one) is not type(other):
        return False
    if isinstance(one, Node):
        return same(one._values, other._values)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)


def copied(value: Value) -> Value:
    """Return a value of a tree by value; what it holds was checked when it was set."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Node):
        return value.copy()
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if isinstance(value, list):
        return ReadOnlyList(map(copied, value))
    if isinstance(value, dict):
        return ReadOnlyDict({key: copied(item) for key, item in value.items()})
    return value


def replace(container: Value, steps: list[Step], value: Value) -> Value:
    """Return a copy of `container` with another element at `steps`; its others are the same."""
    step, rest = steps[0], steps[1:]
    new = replace(container[step], rest, value) if rest else value
    if isinstance(container, dict):
        return ReadOnlyDict(container | {typing.cast(str, step): new})
    items = list(container)
    items[typing.cast(int, step)] = new
    return tuple(items) if isinstance(container, tuple) else ReadOnlyList(items)


def _split(kind: Kind) -> tuple[Any, tuple[Any, ...]]:
    """Return the class of a type without its arguments, and these: `list[int]` is list, (int,)."""
    if type(kind) is type:  # most are; `typing` takes long to find this out
        return kind, ()
    origin: Any = typing.get_origin(kind) or kind
    return Union if origin is types.UnionType else origin, typing.get_args(kind)


def describe(kind: Kind) -> str:
    """Return a type as messages write it: `int or None`, `'gpipe' or '1f1b'`, `list[int]`."""
    origin, args = _split(kind)
    if kind in (None, types.NoneType, Ellipsis):
        return "..." if kind is Ellipsis else "None"
    if origin is Union:
        return " or ".join(map(describe, args))
    if origin is Literal:
        return " or ".join(map(shown, args))
    if origin is collections.abc.Callable:
        return "a function or class"
    if args:
        return f"{origin.__name__}[{', '.join(map(describe, args))}]"
    return str(getattr(kind, "__qualname__", kind))


def parse(source: str, kind: Kind) -> Value:
    """Return the value of type `kind` that a text means.

    A text of letters, digits and `_./:,-` alone may be a string without quotes.

    Raises:
        Mismatch: the value does not fit.
        ParamsError: the text is not a literal, or a name in it cannot be resolved.
    """
    try:
        return convert(parse_literal(source), kind)
    except (errors.ParamsError, Mismatch):
        if _BARE_TEXT.fullmatch(source) and kind not in (Any, object):
            with contextlib.suppress(Mismatch):
                return convert(source, kind)
        raise


def element_type(kind: Kind, step: Step) -> Kind:
    """Return the type of the element at `step` in a container of type `kind`."""
    origin, args = _split(kind)
    if origin is Union:
        held = (dict,) if isinstance(step, str) else (list, tuple)
        inner = tuple(
            element_type(arg, step) for arg in args if arg is Any or _split(arg)[0] in held
        )
        return Union[inner] if inner else Any  # noqa: UP007 (made of a tuple)
    if not args:
        return Any
    if origin is dict:
        return args[1]
    if origin is tuple and args[-1] is not Ellipsis:
        index = typing.cast(int, step)
        return args[index] if index < len(args) else Any
    return args[0]


def convert(value: Value, kind: Kind, *, exact: bool = False) -> Value:
    """Return the value to keep for a field of type `kind`: by value, int as float, list as tuple.

    A number of NumPy is one of Python.

    Args:
        value: what was assigned, or read from a text (a `Name` in it is looked up as `kind` asks).
        kind: the field's type.
        exact: do not turn int into float or lists into tuples.

    Raises:
        Mismatch: it does not fit.
        ParamsError: a name in it cannot be resolved, or a field cannot have this type.
    """
    origin, args = _split(kind)
    if isinstance(value, np.generic):
        value = value.item()
    if origin is Union:
        return _convert_union(value, kind, args, exact=exact)
    found = _looked_up(value, origin) if isinstance(value, Name) else value
    if origin is Literal:
        for arg in args:
            if type(arg) is type(value) and arg == value:
                return arg
        raise Mismatch(describe(kind), value)
    if origin in (Any, object):
        return _convert_any(found)
    if origin in _CONTAINERS:
        return _convert_container(found, kind, exact=exact)
    if origin in (int, float, str):
        return _convert_scalar(found, origin, exact=exact)
    if not _fits(found, origin, args):
        raise Mismatch(describe(kind), value)
    return found.copy() if isinstance(found, Node) else found


def _looked_up(name: Name, kind: Kind) -> Value:
    """Return what a name means for a type, or the name itself where it means nothing."""
    if isinstance(kind, type) and issubclass(kind, Node) and "." in name.text:
        params = getattr(references.resolve(name.text), "Params", None)
        return params() if isinstance(params, type) and issubclass(params, kind) else name
    if kind in (Any, object, type, collections.abc.Callable):
        return references.resolve(name.text)
    return name


def _fits(value: Value, origin: Kind, args: tuple[Any, ...]) -> bool:
    """Return whether a value is of a type other than a container or a number or string."""
    if origin is collections.abc.Callable:
        return isinstance(value, type | types.FunctionType)
    if origin is type:
        bases = () if not args or args[0] is Any else typing.get_args(args[0]) or args
        return isinstance(value, type) and (not bases or issubclass(value, bases))
    if origin in (None, types.NoneType, bool):
        return isinstance(value, origin or types.NoneType)
    if not (isinstance(origin, type) and issubclass(origin, Node | Opaque)):
        raise errors.ParamsError(f"the type {describe(origin)} of a field is not supported")
    return isinstance(value, origin)


def _convert_scalar(value: Value, kind: type, *, exact: bool) -> Value:
    if isinstance(value, kind) and not isinstance(value, bool):
        return str.__str__(value) if kind is str else kind(value)
    if kind is float and type(value) is int and not exact:
        with contextlib.suppress(OverflowError):
            return float(value)
    raise Mismatch(describe(kind), value)


def _convert_union(value: Value, kind: Kind, args: tuple[Any, ...], *, exact: bool) -> Value:
    """Return the value of the first type that it fits exactly, or else fits."""
    deepest = Mismatch(describe(kind), value)
    unresolved: errors.ParamsError | None = None
    for exactly in (True,) if exact else (True, False):
        for arg in args:
            try:
                return convert(value, arg, exact=exactly)
            except Mismatch as mismatch:
                if len(mismatch.path) > len(deepest.path):
                    deepest = mismatch
            except errors.ParamsError as error:
                unresolved = error
    raise deepest if unresolved is None or deepest.path else unresolved


def _convert_container(value: Value, kind: Kind, *, exact: bool) -> Value:
    origin, args = _split(kind)
    accepted = origin if exact or origin is dict else (list, tuple)
    if not isinstance(value, accepted):
        raise Mismatch(describe(kind), value)
    is_dict = origin is dict
    items: dict[Any, Value] = dict(value if is_dict else enumerate(value))
    fixed = origin is tuple and args and args[-1] is not Ellipsis
    if (is_dict and not all(isinstance(key, str) for key in items)) or (
        fixed and len(items) != len(args)
    ):
        raise Mismatch(describe(kind), value)
    for step, item in items.items():
        try:
            items[step] = convert(item, element_type(kind, step), exact=exact)
        except Mismatch as mismatch:
            # Without the dot of a field: what comes before this step is not known here.
            prefix = join_path("_", step).removeprefix("_")
            raise Mismatch(mismatch.expected, mismatch.value, prefix + mismatch.path) from None
    if is_dict:
        return ReadOnlyDict({str.__str__(key): item for key, item in items.items()})
    return tuple(items.values()) if origin is tuple else ReadOnlyList(items.values())


def _convert_any(value: Value) -> Value:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Node):
        return value.copy()
    if isinstance(value, _CONTAINERS):
        return _convert_container(value, container(value), exact=True)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return _convert_scalar(value, kind, exact=True)
    if not isinstance(value, type | types.FunctionType):
        raise Mismatch("a value that a text can hold", value)
    return value
