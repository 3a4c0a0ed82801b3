"""Params: trees of declared, typed fields, from which everything configurable is made.

A class that is made from Params declares its fields in a nested class:

    class Dense(Configurable):
        class Params(Configurable.Params):
            units: int = required("Output features.")
            activation: str = field("linear", "Name of a Keras activation.")

    params = Dense.Params(units=10)
    dense = params.instantiate()

A tree is held by value (what is assigned is copied), checks every value against its field's type,
and goes to text and back. `types` says what fits a type, `text` how trees are written and read.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, dataclass_transform

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import references, text
from lingvo_gpipe.hyperparams import types as kinds
from lingvo_gpipe.hyperparams.literals import Name, Step, Value, join_path, parse_path, shown
from lingvo_gpipe.hyperparams.types import Kind, Mismatch, Node

_T = TypeVar("_T")
_ParamsClass: TypeAlias = "type[Params]"


class UnknownFieldError(ParamsError, AttributeError):
    """A tree has no field of this name or path."""


class _Required:
    """The value of a required field that is not set."""

    def __repr__(self) -> str:
        return "REQUIRED"


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

    name: str
    declared_in: _ParamsClass

    def __init__(self, default: Value, help_text: str) -> None:
        self.default = default
        self.help = help_text

    @functools.cached_property
    def type(self) -> Kind:
        """The declared type, resolved when first needed: it may name classes defined later."""
        try:
            return typing.get_type_hints(self.declared_in)[self.name]
        except (NameError, AttributeError, TypeError) as error:
            raise ParamsError(
                f"{self.declared_in.class_name()}: the types of its fields cannot be resolved "
                f"({error}); name only what the module itself defines or imports"
            ) from error

    @functools.cached_property
    def checked_default(self) -> Value:
        """The default as `Params` hold it; to be copied for each tree."""
        if self.default is REQUIRED:
            return REQUIRED
        where, kind = f"{self.declared_in.class_name()}: the default of '{self.name}", self.type
        return _checked(lambda: kinds.convert(self.default, kind), where)

    def assign(
        self, node: Params, value: Value, root: Params, path: str, steps: Sequence[Step] = ()
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
                f"{root.class_name()} is frozen: '{path}' cannot be set; change a copy()"
            )
        is_required = value is REQUIRED or value == Name("REQUIRED")
        if is_required and self.default is REQUIRED and not steps:
            node._values[self.name] = REQUIRED
            return
        kind = functools.reduce(kinds.element_type, steps, self.type)
        new = _checked(lambda: kinds.convert(value, kind), f"{root.class_name()}: '{path}")
        if steps:
            new = kinds.replace(node._values[self.name], list(steps), new)
        node._values[self.name] = new

    def not_set(self, root: _ParamsClass, path: str) -> str:
        """Return the message for this required field, at `path` of a tree of class `root`."""
        what = f"{kinds.describe(self.type)}: {self.help}"
        return f"{root.class_name()}: required field '{path}' is not set ({what})"

    def __get__(self, node: Any, owner: object = None) -> Any:
        if node is None:
            return self
        value = node._values[self.name]
        if value is REQUIRED:
            raise ParamsError(self.not_set(type(node), self.name))
        return value

    def __set__(self, node: Params, value: Value) -> None:
        self.assign(node, value, node, self.name)


def _checked(convert: typing.Callable[[], Value], where: str) -> Value:
    """Return what `convert` returns; errors begin with `where`, a path in an open quote."""
    try:
        return convert()
    except Mismatch as mismatch:
        message = f"{where}{mismatch.path}' must be {mismatch.expected}, got {mismatch.got()}"
    except ParamsError as error:
        message = f"{where}': {error}"
    except RecursionError:
        message = f"{where}' holds itself, or is nested too deep"
    raise ParamsError(message)


def field(default: _T, help: str) -> _T:
    """Declare a field of a Params class with its default and a line of help."""
    return typing.cast(_T, Field(default, help))


def required(help: str) -> Any:
    """Declare a field without a default: it must be set before `instantiate`."""
    return Field(REQUIRED, help)


@dataclass_transform(kw_only_default=True)
class Params(Node):
    """Base of all trees of declared, typed fields.

    The constructor takes fields by keyword; a required one may be set later. A field's new default
    in a subclass is a plain assignment (`units = 100`), without annotation; `units = field(100,
    help)` replaces its help, too.

    Attributes:
        owner: the class that `instantiate` makes; None for a section of a tree.

    Raises:
        ParamsError: a name is not known, or a value does not fit its field's type.
    """

    _fields = types.MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        inherited: dict[str, Field] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= {n: each for n, each in vars(base).items() if isinstance(each, Field)}
        annotations = vars(cls).get("__annotations__", {})
        for name in dict.fromkeys([*annotations, *vars(cls)]):
            value = vars(cls).get(name)
            if name in inherited and name not in annotations:
                known = inherited[name]
                each = value if isinstance(value, Field) else Field(value, known.help)
                each.name, each.declared_in = name, known.declared_in
                setattr(cls, name, each)
            elif isinstance(value, Field) and name in annotations:
                if hasattr(Params, name):
                    raise ParamsError(
                        f"{cls.__qualname__}: '{name}' cannot be a field's name: Params use it "
                        "themselves"
                    )
                value.name, value.declared_in = name, cls
            elif name in annotations or not (
                name.startswith("__")
                or callable(value)
                or isinstance(value, property | classmethod | staticmethod)
            ):
                raise ParamsError(
                    f"{cls.__qualname__}: '{name}' is not a field; write {name}: type = "
                    "field(default, help)"
                )
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        cls._fields = types.MappingProxyType(inherited | own)
        cls.owner = None

    def __init__(self, /, **fields: Any) -> None:
        values = {name: kinds.copied(each.checked_default) for name, each in self._fields.items()}
        vars(self).update(_values=values, _frozen=False)
        self.set(**fields)

    @classmethod
    def fields(cls) -> dict[str, Field]:
        """Return the declared fields by name, those of base classes first."""
        return dict(cls._fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the name in texts and messages: that of `owner`, or of a section itself."""
        return references.public_name(cls.owner or cls)

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

    def walk(self) -> Iterator[tuple[str, Value, Field]]:
        """Yield (path, value, field) of all that the tree holds, Params and containers too.

        An element of a container has the container's field.
        """
        return itertools.chain.from_iterable(
            _walk(name, value, self._fields[name]) for name, value in self._values.items()
        )

    def iter_paths(self) -> Iterator[tuple[str, Value, Field]]:
        """Yield (dotted path, value, field) of all leaves: values that hold no Params.

        The value of a required field that is not set is REQUIRED.
        """
        return (each for each in self.walk() if not kinds.holds_params(each[1]))

    def get(self, path: str) -> Value:
        """Return the value at a dotted path such as `model.layers[2].name`."""
        value: Value = self
        for step in parse_path(path):
            value = self._step(value, step, path)
        return value

    def set(self, paths: Mapping[str, Value] | None = None, /, **fields: Any) -> Self:
        """Set fields by name, and by dotted path: `p.set({"layers[0].units": 3}, name="net")`."""
        for path, value in {**(paths or {}), **fields}.items():
            self.set_path(path, value)
        return self

    def set_path(self, path: str, value: Value) -> Self:
        """Set the field, element or dict value at a dotted path; return this tree."""
        node, field, steps = self._place(path)
        field.assign(node, value, self, path, steps)
        return self

    def override(self, assignment: str) -> Self:
        """Set one field by a text `path=value`, as on a command line.

        The value is a Python literal, or a name where the field's type has names (of
        registered classes and functions). A string may come without quotes if it
        is made of letters, digits and `_./:,-` alone. The name of a class means its Params with
        their defaults.
        """
        path, sign, source = (part.strip() for part in assignment.partition("="))
        if not sign:
            raise ParamsError(f"{shown(assignment)} is not an override; write path=value")
        node, field, steps = self._place(path)
        kind = functools.reduce(kinds.element_type, steps, field.type)
        where = f"{self.class_name()}: '{path}"
        field.assign(node, _checked(lambda: kinds.parse(source, kind), where), self, path, steps)
        return self

    def _place(self, path: str) -> tuple[Params, Field, list[Step]]:
        """Find where a dotted path leads; the last field or key need not be set yet.

        Returns:
            The innermost Params on the path, their field on it, and the steps from the field's
            value to the end of the path.

        Raises:
            ParamsError: there is no such place.
        """
        steps = parse_path(path)
        holder: Value = self
        node, inner = self, steps
        for count, step in enumerate(steps[:-1], 1):
            holder = self._step(holder, step, path)
            if isinstance(holder, Params):
                node, inner = holder, steps[count:]
        is_new_key = isinstance(holder, dict) and isinstance(steps[-1], str)
        if not is_new_key and not isinstance(holder, Params):
            self._step(holder, steps[-1], path)
        if inner[0] not in node._fields:
            raise _unknown_field(self, path, node)
        return node, node._fields[typing.cast(str, inner[0])], inner[1:]

    def _step(self, holder: Value, step: Step, path: str) -> Value:
        """Return what `holder`, a part of this tree, has at a step of a path."""
        if isinstance(holder, Params) and step in holder._fields:
            return getattr(holder, typing.cast(str, step))
        if isinstance(holder, list | tuple) and isinstance(step, int):
            if -len(holder) <= step < len(holder):
                return holder[step]
            raise ParamsError(
                f"{self.class_name()} has no '{path}': [{step}] of {len(holder)} elements"
            )
        if isinstance(holder, dict) and step in holder:
            return holder[step]
        raise _unknown_field(self, path, holder)

    if not TYPE_CHECKING:  # a type checker that saw these would accept any name

        def __setattr__(self, name: str, value: Value) -> None:
            if name not in self._fields:
                raise _unknown_field(self, name, self)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Value:
            if name.startswith("_"):
                raise AttributeError(name)
            raise _unknown_field(self, name, self)

    def copy(self) -> Self:
        """Return a deep copy, which is not frozen."""
        new = type(self).__new__(type(self))
        values = {name: kinds.copied(value) for name, value in self._values.items()}
        vars(new).update(_values=values, _frozen=False)
        return new

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def freeze(self) -> Self:
        """Refuse every later change in the whole tree; return it."""
        for value in [self, *(value for _, value, _ in self.walk())]:
            if isinstance(value, Params):
                vars(value)["_frozen"] = True
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
            field.not_set(type(self), path)
            for path, value, field in self.walk()
            if value is REQUIRED
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
        node = text.read(source)
        if not isinstance(node, cls):
            raise ParamsError(f"the text is of {node.class_name()}, not {cls.class_name()}")
        return node


def from_text(source: str) -> Params:
    """Return the tree of a text that `Params.to_text` wrote, of whichever class it is.

    Raises:
        ParamsError: the text is not of this form, or its values do not fit.
    """
    return Params.from_text(source)


class Configurable:
    """Base of everything that is made from Params.

    A subclass declares its fields in a nested class `Params(Base.Params)`; for one that declares
    none, a `Params` with its base's fields is made. The constructor takes a copy of the params
    first, from `params.instantiate()`.
    """

    class Params(Params):
        """Params of Configurable: no fields."""

    params: Any  # a subclass declares it as its own Params, for editors and type checkers

    def __init__(self, params: Configurable.Params) -> None:
        self.params = params

    def __init_subclass__(cls, **kwargs: object) -> None:
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
                    f"{references.public_name(cls)}.Params must inherit "
                    f"{references.public_name(base)}"
                )
        if cls.Params.owner is not None:
            raise ParamsError(
                f"{references.public_name(cls)}.Params belongs to {cls.Params.class_name()} "
                "already; declare a nested class that inherits it"
            )
        cls.Params.owner = cls


Configurable.Params.owner = Configurable


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


def _walk(path: str, value: Value, field: Field) -> Iterator[tuple[str, Value, Field]]:
    yield path, value, field
    if isinstance(value, Params):
        for name, item in value._values.items():
            yield from _walk(join_path(path, name), item, value._fields[name])
    elif kinds.holds_params(value):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(join_path(path, step), item, field)


def _unknown_field(root: Params, path: str, holder: Value) -> UnknownFieldError:
    """Return the error of a path of which `holder` is the last part that exists."""
    parent, _, name = path.rpartition(".")
    fields = list(holder._fields) if isinstance(holder, Params) else []
    siblings = (join_path(parent, field) for field in fields)
    candidates: dict[str, str] = {}  # of the elements of a list, one stands for all
    for candidate in itertools.chain(siblings, (path for path, _, _ in root.walk())):
        candidates.setdefault(re.sub(r"\[\d+\]", "[]", candidate), candidate)
    near = errors.nearest(name, candidates.values())
    if near:
        hint = f"nearest {', '.join(map(repr, near))}"
    else:
        hint = f"there is {', '.join(fields) or shown(holder)}"
    return UnknownFieldError(f"{root.class_name()} has no field '{path}'; {hint}")
