"""Types of Params' fields: whether a value fits, and the copy of it that is kept.

A field's type is an annotation; `convert` returns the value to keep, or raises `Mismatch`. Values
are kept by value: Params are copied, lists and dicts become read-only copies, so that a tree
changes through `set` and attributes alone, where types are checked.
"""

from __future__ import annotations

import abc
import collections.abc
import enum
import types
import typing
from typing import Any, Literal, NoReturn, Union

from lingvo_gpipe import errors
from lingvo_gpipe.hyperparams import names, old_names, text
from lingvo_gpipe.hyperparams.messages import shown


class Node:
    """What `convert` knows of Params."""

    __slots__ = ()
    _values: dict[str, Any]

    @abc.abstractmethod
    def copy(self) -> Any:
        """Return a deep copy."""


class Mismatch(Exception):  # noqa: N818 (never leaves this package: set turns it into ParamsError)
    """A value does not fit a type; `path` leads to the part of it that does not."""

    def __init__(self, expected: str, value: Any, path: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.path = path


def _read_only(self: Any, *_: Any, **__: Any) -> NoReturn:
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


def type_name(value: Any) -> str:
    """Return the name of a value's type, as its user knows it."""
    kind = type(value)
    read_only = issubclass(kind, ReadOnlyList | ReadOnlyDict)
    return container(value).__name__ if read_only else kind.__name__


def holds_params(value: Any) -> bool:
    """Tell whether `value` is Params or a container that holds some."""
    if isinstance(value, list | tuple):
        return any(map(holds_params, value))
    if isinstance(value, dict):
        return any(map(holds_params, value.values()))
    return isinstance(value, Node)


def container(value: Any) -> type:
    """Return list, tuple or dict, whichever `value` is."""
    return next(kind for kind in (list, tuple, dict) if isinstance(value, kind))


def same(one: Any, other: Any) -> bool:
    """Compare by value and type; nan equals nan, and 0.0 is not -0.0, as in texts."""
    # A list or dict may be read-only on one side alone.
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


def copied(value: Any) -> Any:
    """Return a value of a tree by value."""
    return convert(value, Any) if isinstance(value, Node | list | tuple | dict) else value


def replace(container: Any, steps: list[text.Step], value: Any) -> Any:
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


def supported(kind: Any) -> bool:
    """Tell whether a field can have this type: its values have a text, and go by value."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
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


def takes_bare_text(kind: Any) -> bool:
    """Tell whether a text without quotes may be a string for this type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return any(map(takes_bare_text, args))
    return kind is str or (origin is Literal and any(isinstance(arg, str) for arg in args))


def takes_none(kind: Any) -> bool:
    """Tell whether a field of type `kind` may be None by its own words, such as `int | None`."""
    return types.NoneType in typing.get_args(kind)


def describe(kind: Any) -> str:
    """Return a type as messages write it: `int or None`, `'gpipe' or '1f1b'`, `list[int]`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
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


def element_type(kind: Any, step: text.Step) -> Any:
    """Return the type of the element at `step` in a container of type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        inner = tuple(element_type(arg, step) for arg in args if _holds(arg, step))
        return Union[inner] if inner else Any  # noqa: UP007 (made of a tuple)
    if origin is dict:
        return args[1]
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        index = typing.cast(int, step)
        return args[index] if index < len(args) else Any
    return args[0] if args and origin in (list, tuple) else Any


def _holds(kind: Any, step: text.Step) -> bool:
    containers = (dict,) if isinstance(step, str) else (list, tuple)
    origin = typing.get_origin(kind) or kind
    return kind is Any or origin in containers


def convert(value: Any, kind: Any, *, exact: bool = False, depth: int = 0) -> Any:
    """Return the value to keep for a field of type `kind`: by value, int as float, list as tuple.

    Args:
        value: what was assigned, or read from a text (a `Name` in it is looked up as `kind` asks).
        kind: the field's type.
        exact: do not turn int into float or lists into tuples.
        depth: how many containers `value` stands in.

    Raises:
        Mismatch: it does not fit.
        ParamsError: a name in it cannot be resolved.
    """
    if depth >= text.MAX_DEPTH and isinstance(value, list | tuple | dict):
        raise Mismatch(f"at most {text.MAX_DEPTH} containers deep", value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(value, kind, args, exact=exact, depth=depth)
    if origin is Literal:
        return _convert_literal(value, kind, args)
    if kind is Any or kind is object:
        return _convert_any(value, depth)
    if (origin or kind) in (list, tuple):
        return _convert_sequence(value, kind, exact=exact, depth=depth)
    if (origin or kind) is dict:
        return _convert_dict(value, kind, exact=exact, depth=depth)
    if (origin or kind) in (type, collections.abc.Callable):
        return _convert_reference(value, kind)
    return _convert_plain(value, types.NoneType if kind is None else kind, exact=exact)


def _convert_plain(value: Any, kind: type, *, exact: bool) -> Any:
    if isinstance(value, text.Name):
        found = _named(value, kind)
        if found is None:
            raise Mismatch(describe(kind), value)
    elif kind in (int, float, str):
        return _convert_scalar(value, kind, exact=exact)
    else:
        found = value
    if not isinstance(found, kind):
        raise Mismatch(describe(kind), value)
    return found.copy() if isinstance(found, Node) else found


def _convert_scalar(value: Any, kind: type, *, exact: bool) -> Any:
    if isinstance(value, kind) and not isinstance(value, bool | enum.Enum):
        return str.__str__(value) if kind is str else kind(value)
    if kind is float and type(value) is int and not exact:
        try:
            return float(value)
        except OverflowError:
            raise Mismatch("float", value) from None
    raise Mismatch(describe(kind), value)


def _named(name: text.Name, kind: type) -> Any:
    """Return what `name` means for a field of type `kind`; None where names mean nothing."""
    if isinstance(kind, enum.EnumMeta):
        of, dot, member = name.text.rpartition(".")
        named = not dot or old_names.current(of) == names.public_name(kind)
        return kind.__members__.get(member) if named else None
    return names.dtype_by_name(name.text) if names.is_dtype(kind) else None


def _convert_union(value: Any, kind: Any, args: tuple[Any, ...], *, exact: bool, depth: int) -> Any:
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


def _convert_literal(value: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    for arg in args:
        if type(arg) is type(value) and arg == value:
            return arg
        named = isinstance(value, text.Name) and isinstance(arg, enum.Enum)
        if named and _named(value, type(arg)) is arg:
            return arg
    raise Mismatch(describe(kind), value)


def _convert_sequence(value: Any, kind: Any, *, exact: bool, depth: int) -> Any:
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
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


def _convert_dict(value: Any, kind: Any, *, exact: bool, depth: int) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Mismatch(describe(kind), value)
    args = typing.get_args(kind) or (str, Any)
    return ReadOnlyDict(
        {
            str.__str__(key): _element(item, args[1], key, exact=exact, depth=depth)
            for key, item in value.items()
        }
    )


def _element(item: Any, kind: Any, step: text.Step, *, exact: bool, depth: int) -> Any:
    try:
        return convert(item, kind, exact=exact, depth=depth + 1)
    except Mismatch as mismatch:
        # A path's own first step carries no dot, since what it stands in is not known here.
        prefix = text.join_path("_", step).removeprefix("_")
        raise Mismatch(mismatch.expected, mismatch.value, prefix + mismatch.path) from None


def _convert_reference(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    found = names.resolve(value.text) if isinstance(value, text.Name) else value
    if origin is not type:
        if not isinstance(found, type | types.FunctionType):
            raise Mismatch(describe(kind), value)
        return found
    if not isinstance(found, type):
        raise Mismatch(describe(kind), value)
    if args and args[0] is not Any:
        members = typing.get_args(args[0]) or args
        if not issubclass(found, members):
            raise Mismatch(describe(kind), value)
    return found


def _convert_any(value: Any, depth: int) -> Any:
    if isinstance(value, text.Name):
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
