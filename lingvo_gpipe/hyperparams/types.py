"""Types of Params' fields: whether a value fits, and the copy of it that is kept.

A field's type is an annotation; `convert` returns the value to keep, or raises `Mismatch`. Values
are kept by value: Params are copied, lists and dicts become read-only copies, so that a tree
changes through `set` and attributes alone, where types are checked.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import enum
import re
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeAlias, Union

from lingvo_gpipe import errors
from lingvo_gpipe.hyperparams.literals import MAX_DEPTH, Name, Value, parse_literal
from lingvo_gpipe.hyperparams.messages import shown
from lingvo_gpipe.hyperparams.paths import Step, join_path
from lingvo_gpipe.hyperparams.references import names, old_names

if TYPE_CHECKING:
    from lingvo_gpipe.hyperparams.fields import Field

Kind: TypeAlias = Any
"""A field's type as its annotation says it: `int`, `str | None`, `list[Layer.Params]`."""

_BARE_TEXT = re.compile(r"[\w./:-]+")
# Values of these types themselves, which most are, are kept as they are.
_PLAIN = frozenset({bool, int, float, str, types.NoneType})


class Node:
    """Base of Params: what the other modules of this package know of them."""

    __slots__ = ("_frozen", "_values")

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


class Mismatch(Exception):  # noqa: N818 (never leaves this package: set turns it into ParamsError)
    """A value does not fit a type; `path` leads to the part of it that does not."""

    def __init__(self, expected: str, value: Value, path: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.path = path


def _read_only(self: object, *_: object, **__: object) -> NoReturn:
    raise errors.ParamsError(
        f"a {type_name(self)} in Params is read-only; assign a new one, or set an "
        "element by its path: p.set_path('field[0]', value)"
    )


class ReadOnlyList(list[Any]):
    """A list as Params keep it."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _read_only
    append = extend = insert = pop = remove = clear = sort = reverse = _read_only

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain list."""
        return list, (list(self),)


class ReadOnlyDict(dict[str, Any]):
    """A dict as Params keep it."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _read_only
    clear = pop = popitem = setdefault = update = _read_only

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain dict."""
        return dict, (dict(self),)


def type_name(value: Value) -> str:
    """Return the name of a value's type, as its user knows it."""
    kind = type(value)
    read_only = issubclass(kind, ReadOnlyList | ReadOnlyDict)
    return container(value).__name__ if read_only else kind.__name__


def holds_params(value: Value) -> bool:
    """Return whether `value` is Params or a container that holds some."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(map(holds_params, value))
    if isinstance(value, dict):
        return any(map(holds_params, value.values()))
    return isinstance(value, Node)


def container(value: Value) -> type:
    """Return list, tuple or dict, whichever `value` is."""
    return next(kind for kind in (list, tuple, dict) if isinstance(value, kind))


def same(one: Value, other: Value) -> bool:
    """Compare by value and type; nan equals nan, and 0.0 is not -0.0, as in texts."""
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
    """Return `container` with the element at `steps` replaced; its other elements stay the same."""
    step, rest = steps[0], steps[1:]
    new = replace(container[step], rest, value) if rest else value
    if isinstance(container, tuple):
        items = list(container)
        items[typing.cast(int, step)] = new
        return tuple(items)
    plain: Any = dict if isinstance(container, dict) else list
    plain.__setitem__(container, step, new)
    return container


def _split(kind: Kind) -> tuple[Any, tuple[Any, ...]]:
    """Return the class that a generic type is of (None: the type is not generic), its arguments."""
    if type(kind) is type:  # most are; `typing` takes long to find this out
        return None, ()
    origin: Any = typing.get_origin(kind)
    return origin, typing.get_args(kind)


def supported(kind: Kind) -> bool:
    """Return whether a field can have this type: its values have a text and can be copied."""
    origin, args = _split(kind)
    if origin in (Union, types.UnionType):
        return all(map(supported, args))
    if origin is Literal:
        return all(isinstance(arg, bool | int | str | enum.Enum | None) for arg in args)
    if (origin or kind) in (list, tuple):
        return all(supported(arg) for arg in args if arg is not Ellipsis)
    if (origin or kind) is dict:
        return not args or (args[0] is str and supported(args[1]))
    if kind in (Any, object, None) or (origin or kind) in (type, collections.abc.Callable):
        return True
    if not isinstance(kind, type) or origin is not None:
        return False
    plain = (int, float, bool, str, types.NoneType)
    return kind in plain or issubclass(kind, enum.Enum | Node) or names.is_dtype(kind)


def parse(source: str, kind: Kind) -> Value:
    """Return the value of type `kind` that a text means.

    A text of letters, digits and `_./:-` alone is a string without quotes where `kind` takes
    strings and the text is no other value of it.

    Raises:
        Mismatch: the value does not fit.
        ParamsError: the text is not a literal, or a name in it cannot be resolved.
    """
    try:
        return convert(parse_literal(source), kind)
    except (errors.ParamsError, Mismatch):
        if _BARE_TEXT.fullmatch(source) and takes_bare_text(kind):
            with contextlib.suppress(Mismatch):
                return convert(source, kind)
        raise


def takes_bare_text(kind: Kind) -> bool:
    """Return whether a string of this type may be written without quotes."""
    origin, args = _split(kind)
    if origin in (Union, types.UnionType):
        return any(map(takes_bare_text, args))
    return kind is str or (origin is Literal and any(isinstance(arg, str) for arg in args))


def takes_none(kind: Kind) -> bool:
    """Return whether a type such as `int | None` names None itself."""
    return types.NoneType in typing.get_args(kind)


def describe(kind: Kind) -> str:
    """Return a type as messages write it: `int or None`, `'gpipe' or '1f1b'`, `list[int]`."""
    origin, args = _split(kind)
    if kind is None or kind is types.NoneType:
        return "None"
    if kind is Ellipsis:
        return "..."
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, args))
    if origin is Literal:
        return " or ".join(map(shown, args))
    if origin is collections.abc.Callable or kind is collections.abc.Callable:
        return "a function or class"
    if names.is_dtype(kind):
        return "tf.DType"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(describe, args))}]"
    if isinstance(kind, enum.EnumMeta):
        return f"{kind.__qualname__} ({', '.join(kind.__members__)})"
    return str(getattr(kind, "__qualname__", kind))


def element_type(kind: Kind, step: Step) -> Kind:
    """Return the type of the element at `step` in a container of type `kind`."""
    origin, args = _split(kind)
    if origin in (Union, types.UnionType):
        inner = tuple(element_type(arg, step) for arg in args if _holds(arg, step))
        return Union[inner] if inner else Any  # noqa: UP007 (made of a tuple)
    if origin is dict:
        return args[1]
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        index = typing.cast(int, step)
        return args[index] if index < len(args) else Any
    return args[0] if args and origin in (list, tuple) else Any


def _holds(kind: Kind, step: Step) -> bool:
    containers = (dict,) if isinstance(step, str) else (list, tuple)
    origin = _split(kind)[0] or kind
    return kind is Any or origin in containers


def convert(value: Value, kind: Kind, *, exact: bool = False, depth: int = 0) -> Value:
    """Return the value to keep for a field of type `kind`: by value, int as float, list as tuple.

    Args:
        value: what was assigned, or read from a text (a `Name` in it is looked up as `kind` asks).
        kind: the field's type.
        exact: do not turn int into float or lists into tuples.
        depth: how many containers `value` is in.

    Raises:
        Mismatch: it does not fit.
        ParamsError: a name in it cannot be resolved.
    """
    if depth >= MAX_DEPTH and isinstance(value, list | tuple | dict):
        raise Mismatch(f"at most {MAX_DEPTH} containers deep", value)
    if kind is Any or kind is object:
        return _convert_any(value, depth)
    origin, args = _split(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(value, kind, args, exact=exact, depth=depth)
    if origin is Literal:
        return _convert_literal(value, kind, args)
    if (origin or kind) in (list, tuple):
        return _convert_sequence(value, kind, exact=exact, depth=depth)
    if (origin or kind) is dict:
        return _convert_dict(value, kind, exact=exact, depth=depth)
    if (origin or kind) in (type, collections.abc.Callable):
        return _convert_reference(value, kind)
    return _convert_plain(value, types.NoneType if kind is None else kind, exact=exact)


def _convert_plain(value: Value, kind: type, *, exact: bool) -> Value:
    if isinstance(value, Name):
        named = _named(value, kind)
        if named is None:
            raise Mismatch(describe(kind), value)
        return named
    if kind in (int, float, str):
        return _convert_scalar(value, kind, exact=exact)
    if not isinstance(value, kind):
        raise Mismatch(describe(kind), value)
    return value.copy() if isinstance(value, Node) else value


def _convert_scalar(value: Value, kind: type, *, exact: bool) -> Value:
    if isinstance(value, kind) and not isinstance(value, bool | enum.Enum):
        return str.__str__(value) if kind is str else kind(value)
    if kind is float and type(value) is int and not exact:
        try:
            return float(value)
        except OverflowError:
            raise Mismatch("float", value) from None
    raise Mismatch(describe(kind), value)


def _named(name: Name, kind: type) -> Value:
    """Return what `name` means for a type: a member, a dtype or the Params of a class; or None."""
    if isinstance(kind, enum.EnumMeta):
        class_name, _, member = name.text.rpartition(".")
        if class_name and old_names.current(class_name) != names.public_name(kind):
            return None
        return kind.__members__.get(member)
    if issubclass(kind, Node) and "." in name.text:
        made = getattr(names.resolve(name.text), "Params", None)
        return made() if isinstance(made, type) and issubclass(made, kind) else None
    return names.dtype_by_name(name.text) if names.is_dtype(kind) else None


def _convert_union(
    value: Value, kind: Kind, args: tuple[Any, ...], *, exact: bool, depth: int
) -> Value:
    deepest = Mismatch(describe(kind), value)
    unresolved: errors.ParamsError | None = None
    for exactly in (True,) if exact else (True, False):
        for arg in args:
            try:
                return convert(value, arg, exact=exactly, depth=depth)
            except Mismatch as mismatch:
                if len(mismatch.path) > len(deepest.path):
                    deepest = mismatch
            except errors.ParamsError as error:
                unresolved = error
    raise deepest if unresolved is None or deepest.path else unresolved


def _convert_literal(value: Value, kind: Kind, args: tuple[Any, ...]) -> Value:
    for arg in args:
        if type(arg) is type(value) and arg == value:
            return arg
        named = isinstance(value, Name) and isinstance(arg, enum.Enum)
        if named and _named(value, type(arg)) is arg:
            return arg
    raise Mismatch(describe(kind), value)


def _convert_sequence(value: Value, kind: Kind, *, exact: bool, depth: int) -> Value:
    origin, args = _split(kind)
    origin = origin or kind
    accepted = origin if exact else list | tuple
    if not isinstance(value, accepted):
        raise Mismatch(describe(kind), value)
    if origin is list or not args or args[-1] is Ellipsis:
        kinds = [args[0] if args else Any] * len(value)
    else:
        kinds = list(args)
    if len(kinds) != len(value):
        raise Mismatch(describe(kind), value)
    items = []
    for index, (item, item_kind) in enumerate(zip(value, kinds, strict=True)):
        items.append(_element(item, item_kind, index, exact=exact, depth=depth))
    return tuple(items) if origin is tuple else ReadOnlyList(items)


def _convert_dict(value: Value, kind: Kind, *, exact: bool, depth: int) -> Value:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Mismatch(describe(kind), value)
    args = typing.get_args(kind) or (str, Any)
    return ReadOnlyDict(
        {
            str.__str__(key): _element(item, args[1], key, exact=exact, depth=depth)
            for key, item in value.items()
        }
    )


def _element(item: Value, kind: Kind, step: Step, *, exact: bool, depth: int) -> Value:
    try:
        return convert(item, kind, exact=exact, depth=depth + 1)
    except Mismatch as mismatch:
        # Without the dot of a field: what comes before this step is not known here.
        prefix = join_path("_", step).removeprefix("_")
        raise Mismatch(mismatch.expected, mismatch.value, prefix + mismatch.path) from None


def _convert_reference(value: Value, kind: Kind) -> Value:
    origin, args = _split(kind)
    origin = origin or kind
    referenced = names.resolve(value.text) if isinstance(value, Name) else value
    if origin is not type:
        if not isinstance(referenced, type | types.FunctionType):
            raise Mismatch(describe(kind), value)
        return referenced
    if not isinstance(referenced, type):
        raise Mismatch(describe(kind), value)
    if args and args[0] is not Any:
        bases = typing.get_args(args[0]) or args
        if not issubclass(referenced, bases):
            raise Mismatch(describe(kind), value)
    return referenced


def _convert_any(value: Value, depth: int) -> Value:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Name):
        return names.resolve(value.text)
    if isinstance(value, list):
        return _convert_sequence(value, list, exact=True, depth=depth)
    if isinstance(value, tuple):
        return _convert_sequence(value, tuple, exact=True, depth=depth)
    if isinstance(value, dict):
        return _convert_dict(value, dict, exact=True, depth=depth)
    if isinstance(value, Node):
        return value.copy()
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, bool | enum.Enum):
            return _convert_scalar(value, kind, exact=True)
    plain = (bool, types.NoneType, enum.Enum, type, types.FunctionType)
    if isinstance(value, plain) or names.is_dtype(type(value)):
        return value
    raise Mismatch("a value that a text can hold", value)
