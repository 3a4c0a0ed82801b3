"""Optimizer state that was saved in other slices, where it is not of its weight's shape.

Such a slot has a key for each slice, `slots/PATH/NAME/SPEC`; `SPEC` is TensorFlow's
`shape_and_slice` of the weight. The optimizer's rule computes the slots of other slices from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lingvo_gpipe import errors, optim, packing
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.checkpoints.keys import Part
from lingvo_gpipe.run.checkpoints.saved import Array, SavedValues

_SPEC = re.compile(r"(?P<shape>\d+(?: \d+)*) (?P<before>(?:-:)*)(?P<first>\d+),(?P<size>\d+)[-:]*")


def redivided(
    saved: SavedValues,
    variables: Mapping[str, packing.Variable],
    parts: Mapping[str, Part],
    rule: optim.Rule,
) -> tuple[dict[str, Array], set[str]]:
    """Compute the slots that a checkpoint has in other slices alone.

    Args:
        saved: its values.
        variables: key → variable.
        parts: see `keys.parts`.
        rule: update rule of the optimizer.

    Returns:
        Key → value of these slots, and the keys in the checkpoint that they come from.

    Raises:
        CheckpointError: a value cannot be read.
        ParamsError: the rule cannot compute them.
    """
    slices: dict[str, dict[str, str]] = {}  # path of a whole weight → path of its slice → spec
    start = keys.variable("")
    for path in (key.removeprefix(start) for key in variables if key.startswith(start)):
        part = parts.get(keys.variable(path), Part(keys.variable(path), ()))
        slices.setdefault(part.key.removeprefix(start), {})[path] = part.spec
    missing = {
        key.removeprefix("slots/").rpartition("/")[0]
        for key in variables
        if key.startswith("slots/") and parts.get(key, Part(key, ())).key not in saved.shapes
    }
    values: dict[str, Array] = {}
    sources: set[str] = set()
    for whole, of_whole in slices.items():
        if missing.isdisjoint(of_whole):
            continue
        saved_slots = _saved_slots(saved, whole)
        division = _division(list(saved_slots), list(of_whole.values()))
        if division is None:
            continue
        before = [
            {n: saved.read(key) for n, key in names.items()} for names in saved_slots.values()
        ]
        try:
            after = rule.redivided(before, division)
        except errors.ParamsError as error:
            raise errors.ParamsError(f"{whole}: {error}") from error
        for path, slots in zip(of_whole, after, strict=True):
            values |= {keys.slot(path, name): value for name, value in slots.items()}
        sources.update(key for names in saved_slots.values() for key in names.values())
    return values, sources


def _saved_slots(saved: SavedValues, whole: str) -> dict[str, dict[str, str]]:
    """Return spec of each slice of a weight, in order → name of a slot → its key."""
    slots: dict[str, dict[str, str]] = {}
    start = f"slots/{whole}/"
    for key in saved.shapes:
        name, _, spec = key.removeprefix(start).partition("/")
        if key.startswith(start) and (not spec or _SPEC.fullmatch(spec)):
            slots.setdefault(spec, {})[name] = key

    def first(spec: str) -> int:
        match = _SPEC.fullmatch(spec)
        return int(match["first"]) if match else 0

    return {spec: slots[spec] for spec in sorted(slots, key=first)}


def _division(before: Sequence[str], after: Sequence[str]) -> optim.Division | None:
    """Return the division between slices with these specs; None: none of them is a slice.

    >>> _division([""], ["10 4 0,6:-", "10 4 6,4:-"])
    Division(shape=(10, 4), axis=0, before=(10,), after=(6, 4))
    """
    matches = {spec: _SPEC.fullmatch(spec) for spec in (*before, *after)}
    any_match = next(filter(None, matches.values()), None)
    if any_match is None or not before:
        return None
    shape, axis = tuple(map(int, any_match["shape"].split())), any_match["before"].count(":")

    def sizes(specs: Sequence[str]) -> tuple[int, ...]:
        return tuple(int(m["size"]) if (m := matches[spec]) else shape[axis] for spec in specs)

    return optim.Division(shape, axis, sizes(before), sizes(after))
