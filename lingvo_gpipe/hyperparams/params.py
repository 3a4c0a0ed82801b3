"""Params: trees of declared, typed fields, from which everything configurable is made.

A class that is made from Params declares its fields in a nested class:

    class Dense(Configurable):
        class Params(Configurable.Params):
            units: int = required("Output features.")
            activation: str = field("linear", "Name of a Keras activation.")

    params = Dense.Params(units=10)
    dense = params.instantiate()

A tree is held by value (what is assigned is copied), checks every value against its field's type,
and goes to text and back. `types` says what fits a type, `text` and `parsing` how trees are written
and read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, dataclass_transform

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import fields, parsing, suggestions, text, tree
from lingvo_gpipe.hyperparams import types as kinds
from lingvo_gpipe.hyperparams.fields import REQUIRED, Field
from lingvo_gpipe.hyperparams.literals import Value
from lingvo_gpipe.hyperparams.messages import shown
from lingvo_gpipe.hyperparams.paths import join_path
from lingvo_gpipe.hyperparams.references import names


class _ParamsMeta(type):
    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **kwargs: object) -> fields.Body:
        return fields.Body()


@dataclass_transform(kw_only_default=True)
class Params(kinds.Node, metaclass=_ParamsMeta):
    """Base of all trees of declared, typed fields.

    The constructor takes fields by keyword; a required one may be set later. A field's new default
    in a subclass is a plain assignment (`units = 100`), without annotation; `units = field(100,
    help)` replaces its help, too.

    Attributes:
        owner: the class that `instantiate` makes; None for a section of a tree.

    Raises:
        ParamsError: a name is not known, or a value does not fit its field's type.
    """

    __slots__ = ()

    _fields = types.MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = types.MappingProxyType(fields.declare(cls))
        cls.owner = None

    def __init__(self, /, **fields: Any) -> None:
        object.__setattr__(self, "_frozen", False)
        values = {name: each.fresh_default() for name, each in self._fields.items()}
        object.__setattr__(self, "_values", values)
        self.set(**fields)

    @classmethod
    def fields(cls) -> dict[str, Field]:
        """Return the declared fields by name, those of base classes first."""
        return dict(cls._fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the name in texts and messages: that of `owner`, or of a section itself."""
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
        for path, value, _ in tree.walk(self):
            if isinstance(value, Params):
                yield path, value

    def iter_paths(self) -> Iterator[tuple[str, Value, Field]]:
        """Yield (dotted path, value, field) of all leaves: values that hold no Params.

        The value of a required field that is not set is REQUIRED. An element of a container that
        holds Params has the container's field.
        """
        for path, value, field in tree.walk(self):
            if not kinds.holds_params(value):
                yield path, value, field

    def get(self, path: str) -> Value:
        """Return the value at a dotted path such as `model.layers[2].name`."""
        return tree.value_at(self, path)

    def set(self, paths: Mapping[str, Value] | None = None, /, **fields: Any) -> Self:
        """Set fields by name, and by dotted path: `p.set({"layers[0].units": 3}, name="net")`."""
        for path, value in {**(paths or {}), **fields}.items():
            self.set_path(path, value)
        return self

    def set_path(self, path: str, value: Value) -> Self:
        """Set the field, element or dict value at a dotted path; return this tree."""
        place = tree.place_of(self, path)
        place.field.assign(place.node, value, self, path, place.steps)
        return self

    def suggestion(self, path: str, source: str) -> str | None:
        """Return the override `path=source` as a message suggests it.

        None where it would be refused, or names code of a package that is not registered.
        """
        return suggestions.assignment(self, path, source)

    def override(self, assignment: str) -> Self:
        """Set one field by a text `path=value`, as on a command line.

        The value is a Python literal, or a name where the field's type has names (an enum's
        member, a dtype, a registered class or function). A string may come without quotes if it
        is made of letters, digits and `_./:-` alone. The name of a class means its Params with
        their defaults. Params are replaced by `None` or by others alone.
        """
        path, sign, value = (part.strip() for part in assignment.partition("="))
        if not sign:
            raise ParamsError(f"{shown(assignment)} is not an override; write path=value")
        place = tree.place_of(self, path)
        old = place.value()
        removed = value == "None" and kinds.takes_none(place.kind())
        try:
            parsed = fields.parse_value(value, place.kind(), type(self), path)
        except ParamsError:
            if kinds.holds_params(old) and not names.looks_public(value.strip("[()] ")):
                raise suggestions.holds_params(self, path, old, value) from None
            raise
        if kinds.holds_params(old) and not (removed or kinds.holds_params(parsed)):
            raise suggestions.holds_params(self, path, old, value)
        place.field.assign(place.node, parsed, self, path, place.steps)
        return self

    if not TYPE_CHECKING:  # a type checker that saw these would accept any name

        def __setattr__(self, name: str, value: Value) -> None:
            if name not in self._fields:
                raise tree.no_value_at(self, name, self)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Value:
            if name.startswith("_"):
                raise AttributeError(name)
            raise tree.no_value_at(self, name, self)

    def copy(self) -> Self:
        """Return a deep copy, which is not frozen."""
        new = type(self).__new__(type(self))
        new.__setstate__(self._values)
        return new

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Value]:
        return self._values

    def __setstate__(self, values: dict[str, Value]) -> None:
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
        old, new = dict(text.values_by_path(self)), dict(text.values_by_path(other))
        return "\n".join(text.changed_lines(old, new).values())

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Return `owner(copy of this tree, *args, **kwargs)`.

        Raises:
            ParamsError: a required field of the tree is not set, or the class cannot be made.
        """
        if self.owner is None:
            raise ParamsError(
                f"{self.class_name()} is a section of a tree, of which nothing is instantiated; "
                "instantiate one of its fields"
            )
        if methods := undefined_methods(self.owner):
            raise ParamsError(
                f"{self.owner.__qualname__} leaves {methods} to its subclasses. Define it there, "
                "or instantiate one of them"
            )
        missing = [
            fields.not_set(type(self), field, join_path(path, field.name), type(node))
            for path, node in self.iter_nodes()
            for field in node._fields.values()
            if node._values[field.name] is REQUIRED
        ]
        if missing:
            raise ParamsError("\n    ".join(missing))
        return self.owner(self.copy(), *args, **kwargs)

    def to_text(self) -> str:
        """Return the tree as text, a `dotted.path: value` per line; `from_text` reads it.

        Raises:
            ParamsError: a value has no text (a lambda, a class made inside a function).
        """
        return text.write(self)

    @classmethod
    def from_text(cls, source: str) -> Self:
        """Return the tree of a text that `to_text` wrote; it must be of this class.

        A field without a line keeps its default. No line evaluates anything.

        Raises:
            ParamsError: the text is not of this form, or its values do not fit.
        """
        node = parsing.read(source)
        if not isinstance(node, cls):
            raise ParamsError(f"the text is of {node.class_name()}, not {cls.class_name()}")
        return node


def from_text(source: str) -> Params:
    """Return the tree of a text that `Params.to_text` wrote, of whichever class it is.

    Raises:
        ParamsError: the text is not of this form, or its values do not fit.
    """
    return Params.from_text(source)


@functools.cache
def undefined_methods(owner: type) -> str:
    """Name the abstract methods that a class, or its `Params`, does not define; may be empty.

    `abc.ABC` is of no use here, since `tf.Module` has a metaclass of its own.
    """
    return ", ".join(
        prefix + name
        for each, prefix in ((owner, ""), (getattr(owner, "Params", None), "Params."))
        for name in sorted(dir(each))
        if getattr(getattr(each, name, None), "__isabstractmethod__", False)
    )
