"""The values of a checkpoint for other slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gpipe import errors, optim
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.reslicing.layout import Layout

Array = np.ndarray[Any, Any]


def divisions(old: Layout, new: Layout) -> dict[str, optim.Division]:
    """Return the division of each variable that has other slices, by its whole path.

    Raises:
        CheckpointError: the variables of one layout do not follow from those of the other.
    """
    only_old = [whole for whole in old.slices if whole not in new.slices]
    only_new = [whole for whole in new.slices if whole not in old.slices]
    if only_old or only_new:
        raise errors.CheckpointError(
            f"the variables differ: {', '.join((only_old or only_new)[:3])} is only in the "
            f"{'checkpoint' if only_old else 'model'}. Set only slices in another way"
        )
    found = {}
    for whole in new.slices:
        before, after = old.shapes(whole), new.shapes(whole)
        division = optim.Division.of(before, after)
        if division is None and before != after:
            raise errors.CheckpointError(
                f"{whole} is {_shown(before)} in the checkpoint, but {_shown(after)} in the model: "
                "neither is a division of the other. Set only slices in another way"
            )
        if division is not None and (before, old.slices[whole]) != (after, new.slices[whole]):
            found[whole] = division
    return found


def resliced(prefix: str, old: Layout, new: Layout) -> dict[str, Array]:
    """Return the values of a checkpoint for other slices, by key.

    Args:
        prefix: prefix of its files.
        old: layout of the network that wrote it.
        new: layout of the network that is to restore it.

    Raises:
        CheckpointError: it is torn, or not of the old network.
        ParamsError: a slot can neither be joined nor divided.
    """
    source = _Source(prefix)
    found = {
        key: value
        for whole, division in _all_divisions(old, new).items()
        for key, value in _of_variable(source, old, new, whole, division)
    }
    rest = source.unread()
    unknown = [key for key in rest if key.startswith(keys.OF_VARIABLES)]
    if unknown:
        raise errors.CheckpointError(
            f"{prefix} holds {', '.join(sorted(unknown)[:3])}, which its own params do not "
            "declare. Give a checkpoint with the params of its run"
        )
    return found | {key: source.read(key) for key in rest}


class _Source:
    """A checkpoint, of which each value is read once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._read: set[str] = set()
        with self._explained():
            self._saved = checkpoints.SavedValues(prefix)
            self._saved.check_whole()

    def has(self, key: str) -> bool:
        """Return whether there is a value of this key."""
        return key in self._saved.shapes

    def unread(self) -> list[str]:
        """Return the keys whose values were not read."""
        return [key for key in self._saved.shapes if key not in self._read]

    def read(self, key: str) -> Array:
        """Return a value."""
        if not self.has(key):
            raise errors.CheckpointError(
                f"{self._prefix} has no {key}, which its own params declare. Give a checkpoint "
                "with the params of its run"
            )
        self._read.add(key)
        with self._explained():
            return self._saved.read(key)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except checkpoints.UNREADABLE as error:
            checkpoints.check_damaged(self._prefix, error)
            raise errors.CheckpointError(
                f"{self._prefix} is torn and cannot be read: {checkpoints.reason(error)}. Give "
                "another one"
            ) from error


def _all_divisions(old: Layout, new: Layout) -> dict[str, optim.Division | None]:
    """Return the division of each variable; None where slices are the same."""
    changed = divisions(old, new)
    return {whole: changed.get(whole) for whole in new.slices}


def _of_variable(
    source: _Source, old: Layout, new: Layout, whole: str, division: optim.Division | None
) -> Iterator[tuple[str, Array]]:
    """Yield key and value of a variable's new slices, their averages and slots."""
    before, after = old.slices[whole], new.slices[whole]

    def parts(values: Sequence[Array]) -> list[Array]:
        return list(values) if division is None else division.divided(division.joined(values))

    yield from _keyed(keys.variable, after, parts([source.read(keys.variable(p)) for p in before]))
    if source.has(keys.average(before[0])):
        values = [source.read(keys.average(path)) for path in before]
        yield from _keyed(keys.average, after, parts(values))
    slots = [{s: source.read(keys.slot(path, s)) for s in old.slots(path)} for path in before]
    if not any(slots):  # frozen, or an optimizer without slots
        return
    if division is not None:
        slots = _slots(new, whole, slots, division)
    for path, of_path in zip(after, slots, strict=True):
        for name, value in of_path.items():
            yield keys.slot(path, name), value


def _slots(
    new: Layout, whole: str, slots: Sequence[Mapping[str, Array]], division: optim.Division
) -> list[dict[str, Array]]:
    try:
        return new.optimizer.rule.redivided(slots, division)
    except errors.ParamsError as error:
        raise errors.ParamsError(f"{whole}: {error}") from error


def _keyed(
    key: Callable[[str], str], paths: Sequence[str], values: Sequence[Array]
) -> Iterator[tuple[str, Array]]:
    for path, value in zip(paths, values, strict=True):
        yield key(path), value


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    text = ", ".join(str(list(shape)) for shape in shapes[:3])
    return f"{text}, …" if len(shapes) > 3 else text
