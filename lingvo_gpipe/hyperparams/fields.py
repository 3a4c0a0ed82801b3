"""Fields of Params: how they are declared, and what is refused when a Params class is made.

`hyperparams` re-exports what users need.
"""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any, TypeVar

from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import text, types
from lingvo_gpipe.hyperparams.messages import shown

_T = TypeVar("_T")


class _Required:
    """The value of a required field that is not set."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REQUIRED"

    def __copy__(self) -> _Required:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Required:
        return self

    def __reduce__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


class Field:
    """A declared field: a descriptor on its Params class, listed by `Params.fields()`.

    Attributes:
        name: its name.
        default: the declared default, or REQUIRED.
        help: one line about it.
        declared_in: the Params class whose annotation gives its type.
    """

    __slots__ = ("__dict__", "declared_in", "default", "help", "name")

    def __init__(self, default: Any, help_text: str) -> None:
        self.default = default
        self.help = help_text
        self.name = ""
        self.declared_in: Any = None

    @functools.cached_property
    def type(self) -> Any:
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
    def checked_default(self) -> Any:
        """The default as `Params` keep it; to be copied for each tree."""
        if self.default is REQUIRED:
            return REQUIRED
        try:
            return types.convert(self.default, self.type)
        except types.Mismatch as mismatch:
            where = f"the default of '{self.name}{mismatch.path}'"
            raise wrong_type(self.declared_in, where, mismatch) from None

    def fresh_default(self) -> Any:
        """Return the default by value."""
        return types.copied(self.checked_default)

    def describe_type(self) -> str:
        """Return the type as messages write it."""
        return types.describe(self.type)

    def __get__(self, node: Any, owner: Any = None) -> Any:
        if node is None:
            return self
        value = node._values[self.name]
        if value is REQUIRED:
            raise ParamsError(not_set(type(node), self, self.name, type(node)))
        return value

    def __set__(self, node: Any, value: Any) -> None:
        node._assign(self, value, node, self.name)

    def __repr__(self) -> str:
        return f"Field({self.name}: {self.describe_type()})"


def field(default: _T, help: str = "") -> _T:
    """Declare a field of a Params class with its default and a line of help."""
    return typing.cast(_T, Field(default, help))


def required(help: str = "") -> Any:
    """Declare a field that has no neutral default: it must be set before `instantiate`."""
    return Field(REQUIRED, help)


class Body(dict[str, Any]):
    """The body of a Params class while it is read: refuses a second field of one name."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self.get(name), Field):
            raise ParamsError(f"{self['__qualname__']}: '{name}' is declared twice")
        super().__setitem__(name, value)


def declare(cls: Any) -> dict[str, Field]:
    """Check the body of a Params class; return all its fields, those of base classes first."""
    inherited: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        for name, declared in base.__dict__.get("_fields", {}).items():
            known = inherited.get(name)
            if known is not None and known.declared_in is not declared.declared_in:
                raise ParamsError(
                    f"{cls.__qualname__}: '{name}' is declared by both "
                    f"{declared.declared_in.class_name()} and {known.declared_in.class_name()}"
                )
            if known is None or name in base.__dict__:
                inherited[name] = declared
    annotations = inspect.get_annotations(cls)
    own: dict[str, Field] = {}
    for name in dict.fromkeys([*annotations, *cls.__dict__]):
        value = cls.__dict__.get(name)
        if name.startswith("__") or (
            name not in inherited
            and name not in annotations
            and not isinstance(value, Field)
            and (callable(value) or isinstance(value, property | classmethod | staticmethod))
        ):
            continue
        own[name] = _declare_one(cls, name, value, name in annotations, inherited.get(name))
    for name, declared in own.items():
        setattr(cls, name, declared)
    return inherited | own


def _declare_one(
    cls: Any, name: str, value: Any, annotated: bool, inherited: Field | None
) -> Field:
    where = f"{cls.__qualname__}: '{name}'"
    if inherited is not None:
        if annotated or isinstance(value, Field | property):
            raise ParamsError(
                f"{where} is declared already in {inherited.declared_in.class_name()}; for another "
                f"default write {name} = value, without annotation"
            )
        declared = Field(value, inherited.help)
        declared.declared_in = inherited.declared_in
        declared.name = name
        return declared
    if not isinstance(value, Field) or not annotated:
        raise ParamsError(f"{where} is no field; write {name}: type = field(default, help)")
    if not isinstance(value.help, str) or not value.help.strip():
        raise ParamsError(f"{where} has no help; write a line about it")
    if name.startswith("_") or any(hasattr(base, name) for base in cls.__mro__[1:]):
        raise ParamsError(f"{where} cannot be a field's name: Params use it themselves")
    value.name = name
    value.declared_in = cls
    return value


# --- Messages -------------------------------------------------------------------------------------


def not_set(root: Any, declared: Field, path: str, node: Any) -> str:
    """Return what to say of a required field of `node`, in a tree from `root`, that is not set."""
    of = "" if node is root else f" of {node.class_name()}"
    return (
        f"{root.class_name()}: required field '{path}'{of} is not set "
        f"({declared.describe_type()}: {declared.help})"
    )


def wrong_type(root: Any, where: str, mismatch: types.Mismatch) -> ParamsError:
    """Return the error of a value that does not fit its type."""
    came = shown(mismatch.value)
    if not isinstance(mismatch.value, text.Name):
        came = f"{came} ({types.type_name(mismatch.value)})"
    return ParamsError(f"{root.class_name()}: {where} must be {mismatch.expected}, got {came}")


@functools.cache
def left_open(owner: type) -> str:
    """Name the abstract methods that a class and its Params do not define; "" if there are none.

    The bases are no `abc.ABC`: `tf.Module` has a metaclass of its own.
    """
    names = {
        name
        for kind in (owner, getattr(owner, "Params", owner))
        for name in dir(kind)
        if getattr(getattr(kind, name, None), "__isabstractmethod__", False)
    }
    return ", ".join(sorted(names))
