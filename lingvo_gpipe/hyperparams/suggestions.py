"""Which overrides a message may suggest: those that work, and that name no foreign code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams import fields, tree, types
from lingvo_gpipe.hyperparams.literals import Name, Value, parse_literal
from lingvo_gpipe.hyperparams.messages import shown
from lingvo_gpipe.hyperparams.paths import join_path
from lingvo_gpipe.hyperparams.references import names
from lingvo_gpipe.hyperparams.types import Node

_SHOWN = 4
_PACKAGES = ("callbacks", "optim")
"""Whose classes overrides name."""


class HoldsParamsError(ParamsError):
    """An override would replace Params; `instead` are their fields that seem to be meant."""

    def __init__(self, message: str, instead: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.instead = instead


def assignment(root: Node, path: str, source: str) -> str | None:
    """Return the override `path=source`; None where it fails or names a package not registered."""
    try:
        place = tree.place_of(root, path)
        fits = not types.holds_params(place.value()) and not _is_foreign(source)
        fields.parse_value(source, place.kind(), type(root), path)
    except ParamsError:
        return None
    return f"{path}={source}" if fits else None


def classes_like(source: str) -> list[str]:
    """Return the public classes that a wrong name in an override may mean, most alike first.

    Args:
        source: value of the override: a name, with its package or without, alone or in brackets.
    """
    name = source.strip("[]() ,'\"")
    if not re.fullmatch(r"[\w.]+", name):
        return []
    places = (name,) if "." in name else tuple(f"{package}.{name}" for package in _PACKAGES)
    return [each for place in places for each in names.nearest_public_names(place)]


def holds_params(root: Node, path: str, value: Value, source: str) -> HoldsParamsError:
    """Return the error of the override `path=source` where a tree has Params or a list of them.

    It names the fields of these Params, of the kind of the value, whose names look like the last
    part of `path`; where there are none, all of this kind with their present values. A value of a
    field that is a dict counts as a field.
    """
    named = isinstance(value, Node)
    what = f"Params ({value.class_name()})" if named else "Params"
    leaves = dict(_leaves(value, path)) if named else {}
    fitting = {
        each: leaf
        for each, leaf in leaves.items()
        if _alike(leaf[1], source) and assignment(root, each, source)
    }
    near = errors.nearest(path.rpartition(".")[2], [name for name, _ in fitting.values()])
    instead = sorted(
        (each for each, (name, _) in fitting.items() if name in near),
        key=lambda each: near.index(fitting[each][0]),
    )
    way_out = "override its fields"
    if instead:
        way_out = f"set {instead[0]!r}"
    elif fitting:
        present = [f"{each!r} (now {shown(leaf[1])})" for each, leaf in fitting.items()]
        way_out = f"set one of its fields: {', '.join(present[:_SHOWN])}"
    return HoldsParamsError(
        f"{root.class_name()}: '{path}' holds {what}, which no plain value replaces; {way_out}",
        tuple(instead),
    )


def _leaves(node: Node, path: str) -> Iterator[tuple[str, tuple[str, Value]]]:
    """Yield (path, (name, value)) of the fields of `node` that hold no Params."""
    for name, value in node._values.items():
        place = join_path(path, name)
        if isinstance(value, dict) and not types.holds_params(value):
            yield from ((join_path(place, key), (key, item)) for key, item in value.items())
        elif not types.holds_params(value):
            yield place, (name, value)


def _alike(value: Value, source: str) -> bool:
    """Return whether a text means a value of the kind of `value`, or a number as it is one."""
    try:
        new = parse_literal(source)
    except ParamsError:
        return isinstance(value, str)
    if isinstance(new, Name):
        return isinstance(value, str)
    numbers = (int, float)
    same = new is not None and type(new) is type(value)
    return same or (type(new) in numbers and type(value) in numbers)


def _is_foreign(source: str) -> bool:
    """Return whether a text has a dotted name that leads to nothing in a registered package."""
    try:
        value = parse_literal(source)
    except ParamsError:
        return False  # a string, if it is a value at all
    return any(map(_leads_nowhere, _names(value)))


def _names(value: Value) -> Iterator[str]:
    if isinstance(value, Name):
        yield value.text
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names(item)


def _leads_nowhere(name: str) -> bool:
    if "." not in name:
        return False
    try:
        names.resolve(name)
    except ParamsError:
        return True
    return False
