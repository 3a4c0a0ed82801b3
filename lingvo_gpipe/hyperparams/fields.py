"""Fields of Params: how they are declared, and what is refused when a Params class is made."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.literals import Name, Value
from lingvo_gpipe.hyperparams.messages import shorten, shown
from lingvo_gpipe.hyperparams.paths import Step
from lingvo_gpipe.hyperparams.types import Kind, Mismatch, Node

_T = TypeVar("_T")


class _Required:
    """The value of a required field that is not set."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"  # pickled by its name; a copy is the same object


REQUIRED: Any = _Required()
"""The default of a field that must be set."""


class Field:
    """A declared field: a descriptor on its Params class, listed by `Params.fields()`.

    Attributes:
        name: its name.
        default: the declared default, or REQUIRED.
        help: one line about it.
        declared_in: the Params class whose annotation is its type.
    """

    declared_in: type[Node]

    def __init__(self, default: Value, help_text: str) -> None:
        self.default = default
        self.help = help_text
        self.name = ""

    @functools.cached_property
    def type(self) -> Kind:
        """The declared type, resolved when first needed: it may name classes defined later."""
        try:
            kind = typing.get_type_hints(self.declared_in)[self.name]
        except (NameError, AttributeError, TypeError) as error:
            raise ParamsError(
                f"{self.declared_in.class_name()}: the types of its fields cannot be resolved "
                f"({error}); name only what the module itself defines or imports"
            ) from error
        if not types.supported(kind):
            raise ParamsError(
                f"{self.declared_in.class_name()}: the type {types.describe(kind)} of "
                f"'{self.name}' is not supported"
            )
        return kind

    @functools.cached_property
    def checked_default(self) -> Value:
        """The default as `Params` hold it; to be copied for each tree."""
        if self.default is REQUIRED:
            return REQUIRED
        try:
            return types.convert(self.default, self.type)
        except Mismatch as mismatch:
            where = f"the default of '{self.name}{mismatch.path}'"
            raise wrong_type(self.declared_in, where, mismatch) from None

    def fresh_default(self) -> Value:
        """Return a copy of the default."""
        return types.copied(self.checked_default)

    def describe_type(self) -> str:
        """Return the type as messages write it."""
        return types.describe(self.type)

    def assign(
        self, node: Node, value: Value, root: Node, path: str, steps: Sequence[Step] = ()
    ) -> None:
        """Set this field of `node`, or an element of its value.

        Args:
            node: Params that have this field.
            value: what to set; it is checked and copied.
            root: the tree, for messages.
            path: from `root` to what is set, for messages.
            steps: from the field's value to the element that is set; none: the value itself.

        Raises:
            ParamsError: the tree is frozen, or the value does not fit its type.
        """
        if node._frozen:
            raise ParamsError(
                f"{root.class_name()} is frozen: '{shorten(path)}' cannot be set; change a copy()"
            )
        if value is REQUIRED and self.default is REQUIRED and not steps:
            node._values[self.name] = REQUIRED
            return
        kind = self.type
        for step in steps:
            kind = types.element_type(kind, step)
        try:
            new = types.convert(value, kind, depth=len(steps))
        except Mismatch as mismatch:
            where = f"'{shorten(path)}{mismatch.path}'"
            raise wrong_type(type(root), where, mismatch) from None
        if steps:
            new = types.replace(node._values[self.name], list(steps), new)
        node._values[self.name] = new

    def __get__(self, node: Any, owner: object = None) -> Any:
        if node is None:
            return self
        value = node._values[self.name]
        if value is REQUIRED:
            raise ParamsError(not_set(type(node), self, self.name, type(node)))
        return value

    def __set__(self, node: Node, value: Value) -> None:
        self.assign(node, value, node, self.name)


def field(default: _T, help: str = "") -> _T:
    """Declare a field of a Params class with its default and a line of help."""
    return typing.cast(_T, Field(default, help))


def required(help: str = "") -> Any:
    """Declare a field without a default: it must be set before `instantiate`."""
    return Field(REQUIRED, help)


class Body(dict[str, Any]):
    """The namespace of a Params class while its body runs: refuses a second field of one name."""

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(self.get(name), Field):
            raise ParamsError(f"{self['__qualname__']}: '{name}' is declared twice")
        super().__setitem__(name, value)


def declare(cls: type[Node]) -> dict[str, Field]:
    """Check the body of a Params class; return all its fields, those of base classes first."""
    inherited = _inherited(cls)
    annotations = inspect.get_annotations(cls)
    declared: dict[str, Field] = {}
    for name in dict.fromkeys([*annotations, *cls.__dict__]):
        value = cls.__dict__.get(name)
        if name.startswith("__") or (
            name not in inherited
            and name not in annotations
            and not isinstance(value, Field)
            and (callable(value) or isinstance(value, property | classmethod | staticmethod))
        ):
            continue
        if name in inherited:
            declared[name] = _redeclared(cls, inherited[name], value, name in annotations)
        else:
            declared[name] = _declared(cls, name, value, name in annotations)
    for name, each in declared.items():
        setattr(cls, name, each)
    return inherited | declared


def _inherited(cls: type[Node]) -> dict[str, Field]:
    inherited: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields: Mapping[str, Field] = base.__dict__.get("_fields", {})
        for name, field in fields.items():
            known = inherited.get(name)
            if known is not None and known.declared_in is not field.declared_in:
                raise ParamsError(
                    f"{cls.__qualname__}: '{name}' is declared by both "
                    f"{field.declared_in.class_name()} and {known.declared_in.class_name()}"
                )
            if known is None or name in base.__dict__:
                inherited[name] = field
    return inherited


def _redeclared(cls: type[Node], inherited: Field, value: Value, annotated: bool) -> Field:
    """Return an inherited field with another default, and another help where it has one."""
    if annotated or isinstance(value, property):
        raise ParamsError(
            f"{cls.__qualname__}: '{inherited.name}' is declared already in "
            f"{inherited.declared_in.class_name()}; for another default write {inherited.name} = "
            "value, without annotation, or field(value, help) for another help"
        )
    field = value if isinstance(value, Field) else Field(value, inherited.help)
    _check_help(cls, inherited.name, field)
    field.declared_in = inherited.declared_in
    field.name = inherited.name
    return field


def _declared(cls: type[Node], name: str, value: object, annotated: bool) -> Field:
    where = f"{cls.__qualname__}: '{name}'"
    if not isinstance(value, Field) or not annotated:
        raise ParamsError(f"{where} is not a field; write {name}: type = field(default, help)")
    _check_help(cls, name, value)
    if name.startswith("_") or any(hasattr(base, name) for base in cls.__mro__[1:]):
        raise ParamsError(f"{where} cannot be a field's name: Params use it themselves")
    value.name = name
    value.declared_in = cls
    return value


def _check_help(cls: type[Node], name: str, field: Field) -> None:
    if not isinstance(field.help, str) or not field.help.strip():
        raise ParamsError(f"{cls.__qualname__}: '{name}' has no help; write a line about it")


def parse_value(source: str, kind: Kind, root: type[Node], path: str) -> Value:
    """Return the value of type `kind` that a text means at `path` of a tree.

    Raises:
        ParamsError: the text is not a value of this type; names the path.
    """
    try:
        return types.parse(source, kind)
    except Mismatch as mismatch:
        raise wrong_type(root, f"'{shorten(path)}{mismatch.path}'", mismatch) from None
    except ParamsError as error:
        raise ParamsError(f"{root.class_name()}: '{shorten(path)}': {error}") from None


def not_set(root: type[Node], field: Field, path: str, holder: type[Node]) -> str:
    """Return what to say of a required field of `holder`, in a tree of class `root`."""
    of_class = "" if holder is root else f" of {holder.class_name()}"
    return (
        f"{root.class_name()}: required field '{path}'{of_class} is not set "
        f"({field.describe_type()}: {field.help})"
    )


def wrong_type(root: type[Node], where: str, mismatch: Mismatch) -> ParamsError:
    """Return the error of a value that does not fit its type."""
    got = shown(mismatch.value)
    if not isinstance(mismatch.value, Name):
        got = f"{got} ({types.type_name(mismatch.value)})"
    return ParamsError(f"{root.class_name()}: {where} must be {mismatch.expected}, got {got}")
