"""Params: trees of declared, typed fields, from which everything configurable is made.

A class that is made from Params declares its fields in a nested class:

    class Dense(Configurable):
        class Params(Configurable.Params):
            units: int = required("Output features.")
            activation: str = field("linear", "Name of a Keras activation.")

    params = Dense.Params(units=10)
    dense = params.instantiate()

A tree is held by value (what is assigned is copied), checks every value against its field's type,
and goes to text and back. `types` says what fits a type, `text` how values
are read and written.
"""

from __future__ import annotations

import itertools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import comparison, fields, names, text
from lingvo_gpipe.hyperparams import types as kinds
from lingvo_gpipe.hyperparams.fields import REQUIRED, Field, field, required
from lingvo_gpipe.hyperparams.messages import shorten, shown
from lingvo_gpipe.hyperparams.names import register_package

__all__ = [
    "REQUIRED",
    "Configurable",
    "Field",
    "Params",
    "UnknownFieldError",
    "field",
    "from_text",
    "register_package",
    "required",
]

_CANDIDATES = 1_000
_CANDIDATE_CHARS = 100
_BARE_TEXT = re.compile(r"[\w./:-]+")


class UnknownFieldError(ParamsError, AttributeError):
    """A tree has no field of this path; `nearest` are the paths that look most like it."""

    def __init__(self, message: str, path: str, nearest: tuple[str, ...]) -> None:
        super().__init__(message)
        self.path = path
        self.nearest = nearest


class _ParamsMeta(type):
    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **kwargs: Any) -> fields.Body:
        return fields.Body()


@dataclass_transform(kw_only_default=True)
class Params(kinds.Node, metaclass=_ParamsMeta):
    """Base of all trees of declared, typed fields.

    The constructor takes fields by keyword; a required one may be set later. A field's new default
    in a subclass is a plain assignment (`units = 100`), without annotation.

    Raises:
        ParamsError: a name is not known, or a value does not fit its field's type.
    """

    __slots__ = ("_frozen", "_values")

    owner: ClassVar[type[Any] | None] = None
    """The class that `instantiate` makes; None for a mere section of a tree."""

    _fields: ClassVar[Mapping[str, Field]] = types.MappingProxyType({})
    _frozen: bool
    _values: dict[str, Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = types.MappingProxyType(fields.declare(cls))
        cls.owner = None

    def __init__(self, /, **fields: Any) -> None:
        object.__setattr__(self, "_frozen", False)
        values = {name: each.fresh_default() for name, each in self._fields.items()}
        object.__setattr__(self, "_values", values)
        self.set(**fields)

    # --- What it is ---

    @classmethod
    def fields(cls) -> dict[str, Field]:
        """Return the declared fields by name, those of base classes first."""
        return dict(cls._fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the qualified name in texts and messages: the owner's, else its own."""
        return names.public_name(cls.owner or cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and kinds.same(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{name}={shown(value)}"
            for name, value in self._values.items()
            if not kinds.same(value, self._fields[name].checked_default)
        )
        return f"{(self.owner or type(self)).__qualname__}({changed})"

    def iter_nodes(self) -> Iterator[tuple[str, Params]]:
        """Yield (dotted path, Params) of every Params of the tree, this one first as ''."""
        yield "", self
        for path, value, _ in _walk(self, ""):
            if isinstance(value, Params):
                yield path, value

    def iter_paths(self) -> Iterator[tuple[str, Any, Field]]:
        """Yield (dotted path, value, field) of all leaves: values that hold no Params.

        The value of a required field that is not set is REQUIRED. An element of a container that
        holds Params has the container's field.
        """
        for path, value, declared in _walk(self, ""):
            if not kinds.holds_params(value):
                yield path, value, declared

    # --- Reading and setting ---

    def get(self, path: str) -> Any:
        """Return the value at a dotted path such as `model.layers[2].name`."""
        value: Any = self
        done = ""
        for step in text.parse_path(path):
            value, done = self._step(value, step, done, path)
        return value

    def set(self, paths: Mapping[str, Any] | None = None, /, **fields: Any) -> Self:
        """Set fields by name, and by dotted path: `p.set({"layers[0].units": 3}, name="net")`."""
        for path, value in {**(paths or {}), **fields}.items():
            self.set_path(path, value)
        return self

    def set_path(self, path: str, value: Any) -> Self:
        """Set the field, element or dict value at a dotted path; return this tree."""
        place = self._place(path)
        place.node._assign(place.field, value, self, path, place.inside)
        return self

    def override(self, assignment: str) -> Self:
        """Set one field by a text `path=value`, as a command line gives it.

        The value is a Python literal, or a name where the field's type knows one (an enum's
        member, a dtype, a registered class or function). A string may come without quotes if it
        is made of letters, digits and `_./:-` alone. Params give way to `None` alone.
        """
        path, sign, value = (part.strip() for part in assignment.partition("="))
        if not sign:
            raise ParamsError(f"{shown(assignment)} is not an override; write path=value")
        place = self._place(path)
        old = place.old_value()
        removed = value == "None" and kinds.takes_none(place.kind())
        if kinds.holds_params(old) and not removed:
            what = f"Params ({old.class_name()})" if isinstance(old, Params) else "Params"
            raise ParamsError(
                f"{self.class_name()}: '{path}' holds {what}, which no text replaces; override its "
                "fields"
            )
        parsed = _parse_value(value, place.kind(), type(self), path)
        place.node._assign(place.field, parsed, self, path, place.inside)
        return self

    def _place(self, path: str) -> _Place:
        """Find where `path` leads: the innermost Params on it, its field, the steps inside it."""
        steps = text.parse_path(path)
        place = _Place(self, self._field_of(self, steps[0], "", path))
        value: Any = self
        done = ""
        for position, step in enumerate(steps):
            holder = value
            if isinstance(holder, Params):
                place = _Place(holder, self._field_of(holder, step, done, path))
            else:
                place.inside.append(step)
            last = position == len(steps) - 1
            if last and isinstance(holder, Params | dict) and isinstance(step, str):
                break  # what stands there need not be set yet
            value, done = self._step(holder, step, done, path)
        return place

    def _field_of(self, node: Params, step: text.Step, done: str, path: str) -> Field:
        found = node._fields.get(step) if isinstance(step, str) else None
        if found is None:
            raise self._unknown(path, done, node)
        return found

    def _step(self, value: Any, step: text.Step, done: str, path: str) -> tuple[Any, str]:
        """Return what stands at `step` of `value`, and the path that leads there."""
        if isinstance(value, Params):
            found = self._field_of(value, step, done, path)
            done = text.join_path(done, found.name)
            if value._values[found.name] is REQUIRED:
                raise ParamsError(fields.not_set(type(self), found, done, type(value)))
            return value._values[found.name], done
        if isinstance(value, list | tuple) and isinstance(step, int):
            if not -len(value) <= step < len(value):
                raise ParamsError(
                    f"{self.class_name()} has no '{text.join_path(done, step)}'; "
                    f"'{done}' has {len(value)} elements"
                )
            return value[step], text.join_path(done, step % len(value))
        if isinstance(value, dict) and isinstance(step, str) and step in value:
            return value[step], text.join_path(done, step)
        raise self._unknown(path, done, value)

    def _unknown(self, path: str, done: str, value: Any) -> UnknownFieldError:
        """Return the error for a path that ends at `done`, with the nearest of the whole tree."""
        paths = (candidate for candidate, _, _ in _walk(self, ""))
        own = [text.join_path(done, each) for each in getattr(value, "_fields", ())]
        has = ", ".join(value._fields) if isinstance(value, Params) else shown(value)
        return _unknown_field(self, path, itertools.chain(own, paths), has)

    def _assign(
        self,
        declared: Field,
        value: Any,
        root: Params,
        path: str,
        inside: typing.Sequence[text.Step] = (),
    ) -> None:
        if self._frozen:
            where = shorten(path)
            raise ParamsError(
                f"{root.class_name()} is frozen: '{where}' cannot be set; change a copy()"
            )
        if value is REQUIRED and declared.default is REQUIRED and not inside:
            self._values[declared.name] = REQUIRED
            return
        kind = declared.type
        for step in inside:
            kind = kinds.element_type(kind, step)
        try:
            new = kinds.convert(value, kind, depth=len(inside))
        except kinds.Mismatch as mismatch:
            raise fields.wrong_type(
                type(root), f"'{shorten(path)}{mismatch.path}'", mismatch
            ) from None
        if inside:
            new = kinds.replace(self._values[declared.name], list(inside), new)
        self._values[declared.name] = new

    if not TYPE_CHECKING:  # a type checker that saw these would accept any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._fields:
                raise self._unknown(name, "", self)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise self._unknown(name, "", self)

    # --- Whole trees ---

    def copy(self) -> Self:
        """Return a deep copy, which is not frozen."""
        new = type(self).__new__(type(self))
        new.__setstate__(self._values)
        return new

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return self._values

    def __setstate__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_frozen", False)
        copied = {name: kinds.copied(value) for name, value in values.items()}
        object.__setattr__(self, "_values", copied)

    def freeze(self) -> Self:
        """Refuse every later change in the whole tree; return it."""
        for _, node in self.iter_nodes():
            object.__setattr__(node, "_frozen", True)
        return self

    def diff(self, other: Params) -> str:
        """Return what leads from this tree to `other`, a line each.

        `path: old -> new` for a changed value, `- path: old` and `+ path: new` for one that only
        this tree or only the other has.
        """
        changes = comparison.changed_lines(dict(_lines(self)), dict(_lines(other)))
        return "\n".join(changes.values())

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Return `owner(copy of this tree, *args, **kwargs)`.

        Raises:
            ParamsError: a required field of the tree is not set, no class is to be made, or the
                class leaves an abstract method open.
        """
        owner: Any = self.owner
        if owner is None:
            raise ParamsError(
                f"{self.class_name()} is a section of a tree, of which nothing is instantiated; "
                "instantiate one of its fields"
            )
        if opened := fields.left_open(owner):
            raise ParamsError(
                f"{owner.__qualname__} leaves {opened} to its subclasses. Define it there, or "
                "instantiate one of them"
            )
        missing = [
            fields.not_set(type(self), declared, text.join_path(path, declared.name), type(node))
            for path, node in self.iter_nodes()
            for declared in node._fields.values()
            if node._values[declared.name] is REQUIRED
        ]
        if missing:
            raise ParamsError("\n    ".join(missing))
        return owner(self.copy(), *args, **kwargs)

    # --- Text ---

    def to_text(self) -> str:
        """Return the tree as text, a `dotted.path: value` per line; `from_text` reads it.

        Raises:
            ParamsError: a value has no text (a lambda, a class made inside a function).
        """
        for path, value, _ in [("", self, None), *_walk(self, "")]:
            try:
                text.parse_path(path or "class")
                names.check_references(_class_of(value) if isinstance(value, Params) else value)
            except ParamsError as error:
                raise ParamsError(f"{self.class_name()}: '{path or 'class'}': {error}") from None
        lines = [f"{path}: {value}\n" for path, value in _lines(self)]
        longest = max(lines, key=len)
        if len(longest) > text.MAX_VALUE_CHARS:
            raise ParamsError(
                f"{self.class_name()}: '{shorten(longest)}' is too long for a text "
                f"(more than {text.MAX_VALUE_CHARS} characters); keep it in a file"
            )
        return "".join(lines)

    @classmethod
    def from_text(cls, source: str) -> Self:
        """Return the tree of a text that `to_text` wrote; it must be of this class."""
        tree = from_text(source)
        if not isinstance(tree, cls):
            raise ParamsError(f"the text is of {tree.class_name()}, not {cls.class_name()}")
        return tree


class _Place:
    """Where a path leads: a field of `node`, and steps inside the containers that it holds."""

    def __init__(self, node: Params, declared: Field) -> None:
        self.node = node
        self.field = declared
        self.inside: list[text.Step] = []

    def old_value(self) -> Any:
        value = self.node._values[self.field.name]
        for step in self.inside:
            value = value.get(step) if isinstance(value, dict) else value[step]
        return value

    def kind(self) -> Any:
        kind = self.field.type
        for step in self.inside:
            kind = kinds.element_type(kind, step)
        return kind


_ParamsBase = Params  # inside Configurable, Params is the nested class


class Configurable:
    """Base of everything that is made from Params.

    A subclass declares its fields in a nested class `Params(Base.Params)`; one that declares none
    gets a `Params` of its own with its base's fields. The constructor takes a copy of the params
    first, from `params.instantiate()`.
    """

    class Params(_ParamsBase):
        """Params of Configurable: no fields."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = list(dict.fromkeys(b.Params for b in cls.__bases__ if issubclass(b, Configurable)))
        if "Params" not in cls.__dict__:
            body = {
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Params",
                "__doc__": f"Params of {cls.__qualname__}.",
            }
            derived = types.new_class("Params", tuple(bases), {}, lambda to: to.update(body))
            cls.Params = derived  # type: ignore[misc, assignment]
        for base in bases:
            if not issubclass(cls.Params, base):
                raise ParamsError(
                    f"{names.public_name(cls)}.Params must inherit {names.public_name(base)}"
                )
        if cls.Params.owner is not None:
            raise ParamsError(
                f"{names.public_name(cls)}.Params belongs to {cls.Params.class_name()} already; "
                "declare a nested class that inherits it"
            )
        cls.Params.owner = cls


Configurable.Params.owner = Configurable


# --- Walking --------------------------------------------------------------------------------------


def _walk(node: Params, prefix: str) -> Iterator[tuple[str, Any, Field]]:
    """Yield (path, value, field) of all fields and elements, Params and their containers too."""
    for name, value in node._values.items():
        yield from _walk_value(text.join_path(prefix, name), value, node._fields[name])


def _walk_value(path: str, value: Any, declared: Field) -> Iterator[tuple[str, Any, Field]]:
    yield path, value, declared
    if isinstance(value, Params):
        yield from _walk(value, path)
    elif kinds.holds_params(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for step, item in items:
            yield from _walk_value(text.join_path(path, step), item, declared)


def _lines(tree: Params) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every line: `class` of Params and containers, values of leaves."""
    yield "class", tree.class_name()
    for path, value, _ in _walk(tree, ""):
        if isinstance(value, Params):
            yield f"{path}.class", value.class_name()
        elif kinds.holds_params(value):
            yield f"{path}.class", kinds.container(value).__name__
        else:
            yield path, text.format_value(value)


def _class_of(node: Params) -> type:
    return node.owner or type(node)


def _unknown_field(
    root: Params, path: str, candidates: Iterable[str], has: str
) -> UnknownFieldError:
    """Return the error of a path that leads nowhere.

    Of equal layers the first among `candidates` stands for all; work is bounded, since texts from
    outside come here.
    """
    distinct: dict[str, str] = {}
    for candidate in candidates:
        distinct.setdefault(re.sub(r"\[\d+\]", "[]", candidate), candidate)
        if len(distinct) == _CANDIDATES:
            break
    near = tuple(errors.nearest(path.rsplit(".", 1)[-1][:_CANDIDATE_CHARS], distinct.values()))
    hint = f"nearest {', '.join(map(repr, near))}" if near else f"there is {has or 'no field'}"
    return UnknownFieldError(
        f"{root.class_name()} has no field '{shorten(path)}'; {hint}", path, near
    )


# --- Reading texts --------------------------------------------------------------------------------


def _parse_value(source: str, kind: Any, root: type[Params], path: str) -> Any:
    """Return the value that `source` means for type `kind`, converted and with names looked up."""
    try:
        try:
            return kinds.convert(text.parse_literal(source), kind)
        except (ParamsError, kinds.Mismatch):
            if not (_BARE_TEXT.fullmatch(source) and kinds.takes_bare_text(kind)):
                raise
            try:
                return kinds.convert(source, kind)
            except kinds.Mismatch:
                pass
            raise
    except kinds.Mismatch as mismatch:
        raise fields.wrong_type(root, f"'{shorten(path)}{mismatch.path}'", mismatch) from None
    except ParamsError as error:
        raise ParamsError(f"{root.class_name()}: '{shorten(path)}': {error}") from None


def from_text(source: str) -> Params:
    """Return the tree of a text that `Params.to_text` wrote.

    A field without a line keeps its default, so that older texts can be read. No line evaluates
    anything; see `text` for what is read and how names are looked up.

    Raises:
        ParamsError: the text is not of this form, or its values do not fit.
    """
    return _Reader(source).read()


class _Reader:
    """Builds a tree from a text's lines; knows at which line it is, for messages."""

    def __init__(self, source: str) -> None:
        self._top = text.parse_lines(source)
        self._line = self._top.number
        self._root: Params | None = None

    def read(self) -> Params:
        try:
            root = self._root = _new_node(self._top.value)
            self._fill(root, root, self._top)
        except UnknownFieldError as error:
            message = f"line {self._line}: {error}"
            raise UnknownFieldError(message, error.path, error.nearest) from None
        except ParamsError as error:
            raise ParamsError(f"line {self._line}: {error}") from None
        return root

    def _fill(self, root: Params, node: Params, entry: text.Entry) -> None:
        for step, child in entry.children.items():
            self._line = child.number
            declared = node._fields.get(step) if isinstance(step, str) else None
            if declared is None:
                own = [text.join_path(entry.path, name) for name in node._fields]
                others = [path for path in self._top.paths() if path != child.path]
                raise _unknown_field(root, child.path, own + others, ", ".join(node._fields))
            value = REQUIRED
            if declared.default is not REQUIRED or child.value != "REQUIRED":
                value = self._value(root, child, declared.type)
            self._line = child.number
            node._assign(declared, value, root, child.path)

    def _value(self, root: Params, entry: text.Entry, kind: Any) -> Any:
        """Return what `entry` and the lines below it stand for, in a place of type `kind`."""
        self._line = entry.number
        if not entry.is_class:
            return _parse_value(entry.value, kind, type(root), entry.path)
        if entry.value not in ("list", "tuple", "dict"):
            node = _new_node(entry.value)
            self._fill(root, node, entry)
            return node
        items = {
            step: self._value(root, child, kinds.element_type(kind, step))
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


def _new_node(name: str) -> Params:
    """Return the fresh Params of a class by its name."""
    found = names.resolve(name)
    if isinstance(found, type) and issubclass(found, Configurable):
        return found.Params()
    if isinstance(found, type) and issubclass(found, Params):
        return found()
    raise ParamsError(f"{shown(name)} is not a class with Params")
