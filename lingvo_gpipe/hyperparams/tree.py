"""Finding what a tree of Params holds: all of it, or what is at a dotted path."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import types
from lingvo_gpipe.hyperparams.fields import REQUIRED, Field, not_set
from lingvo_gpipe.hyperparams.literals import Value
from lingvo_gpipe.hyperparams.messages import shorten, shown
from lingvo_gpipe.hyperparams.paths import Step, join_path, parse_path
from lingvo_gpipe.hyperparams.types import Kind, Node

_CANDIDATES = 1_000
_COMPARED_CHARS = 100


class UnknownFieldError(ParamsError, AttributeError):
    """A tree has no field of this path; `nearest` are the paths that look most like it."""

    def __init__(self, message: str, path: str, nearest: tuple[str, ...]) -> None:
        super().__init__(message)
        self.path = path
        self.nearest = nearest


def walk(node: Node, prefix: str = "") -> Iterator[tuple[str, Value, Field]]:
    """Yield (path, value, field) of all that `node` holds, Params and their containers too.

    An element of a container has the container's field.
    """
    for name, value in node._values.items():
        yield from _walk_value(join_path(prefix, name), value, node._fields[name])


def _walk_value(path: str, value: Value, field: Field) -> Iterator[tuple[str, Value, Field]]:
    yield path, value, field
    if isinstance(value, Node):
        yield from walk(value, path)
    elif types.holds_params(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for step, item in items:
            yield from _walk_value(join_path(path, step), item, field)


def value_at(root: Node, path: str) -> Value:
    """Return the value at a dotted path.

    Raises:
        ParamsError: there is none, or a required field on the path is not set.
    """
    value: Value = root
    reached = ""
    for step in parse_path(path):
        value, reached = _next(root, value, step, reached, path)
    return value


@dataclasses.dataclass(slots=True)
class Place:
    """Where a path leads.

    Attributes:
        node: the innermost Params on the path.
        field: the field of `node` on the path.
        steps: the rest of the path, inside the containers that the field holds.
    """

    node: Node
    field: Field
    steps: list[Step] = dataclasses.field(default_factory=list)

    def value(self) -> Value:
        """Return what is there; None where a dict has no such key."""
        value = self.node._values[self.field.name]
        for step in self.steps:
            value = value.get(step) if isinstance(value, dict) else value[step]
        return value

    def kind(self) -> Kind:
        """Return the declared type of the value at this place."""
        kind = self.field.type
        for step in self.steps:
            kind = types.element_type(kind, step)
        return kind


def place_of(root: Node, path: str) -> Place:
    """Find where a dotted path leads; the last field or key need not be set yet.

    Raises:
        ParamsError: there is no such place.
    """
    steps = parse_path(path)
    place = Place(root, _field_of(root, root, steps[0], "", path))
    value: Value = root
    reached = ""
    for position, step in enumerate(steps):
        holder = value
        if isinstance(holder, Node):
            place = Place(holder, _field_of(root, holder, step, reached, path))
        else:
            place.steps.append(step)
        last = position == len(steps) - 1
        if last and isinstance(holder, Node | dict) and isinstance(step, str):
            break
        value, reached = _next(root, holder, step, reached, path)
    return place


def _field_of(root: Node, node: Node, step: Step, reached: str, path: str) -> Field:
    field = node._fields.get(step) if isinstance(step, str) else None
    if field is None:
        raise no_value_at(root, path, node, reached)
    return field


def _next(root: Node, value: Value, step: Step, reached: str, path: str) -> tuple[Value, str]:
    """Return what is at `step` of `value`, and the path that leads there."""
    if isinstance(value, Node):
        field = _field_of(root, value, step, reached, path)
        reached = join_path(reached, field.name)
        if value._values[field.name] is REQUIRED:
            raise ParamsError(not_set(type(root), field, reached, type(value)))
        return value._values[field.name], reached
    if isinstance(value, list | tuple) and isinstance(step, int):
        if not -len(value) <= step < len(value):
            raise ParamsError(
                f"{root.class_name()} has no '{join_path(reached, step)}'; "
                f"'{reached}' has {len(value)} elements"
            )
        return value[step], join_path(reached, step % len(value))
    if isinstance(value, dict) and isinstance(step, str) and step in value:
        return value[step], join_path(reached, step)
    raise no_value_at(root, path, value, reached)


def no_value_at(root: Node, path: str, value: Value, reached: str = "") -> UnknownFieldError:
    """Return the error of a path that exists only as far as `reached`, which leads to `value`."""
    fields = value._fields if isinstance(value, Node) else {}
    near = [join_path(reached, name) for name in fields]
    candidates = itertools.chain(near, (candidate for candidate, _, _ in walk(root)))
    has = ", ".join(fields) if isinstance(value, Node) else shown(value)
    return unknown_field(root, path, candidates, has)


def unknown_field(root: Node, path: str, candidates: Iterable[str], has: str) -> UnknownFieldError:
    """Return the error of a path that leads nowhere.

    Args:
        root: the tree.
        path: the path.
        candidates: paths among which the nearest is searched. Of equal layers the first stands for
            all; at most 1,000 are compared, since texts from outside come here.
        has: what there is where the path ends, named where no candidate is near.
    """
    distinct: dict[str, str] = {}
    for candidate in candidates:
        distinct.setdefault(re.sub(r"\[\d+\]", "[]", candidate), candidate)
        if len(distinct) == _CANDIDATES:
            break
    near = tuple(errors.nearest(path.rsplit(".", 1)[-1][:_COMPARED_CHARS], distinct.values()))
    hint = f"nearest {', '.join(map(repr, near))}" if near else f"there is {has or 'no field'}"
    return UnknownFieldError(
        f"{root.class_name()} has no field '{shorten(path)}'; {hint}", path, near
    )
