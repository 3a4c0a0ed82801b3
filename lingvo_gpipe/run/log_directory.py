"""The folder of a run: its lock, params, assets and result."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging

from lingvo_gpipe import errors, hyperparams, task
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.input import Input
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.task import Task

CHECKPOINTS = "checkpoints"
BEST = "best"
LOCK = "run.lock"
_RESULT = "result.json"
_DATA = "data.json"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a log directory for this process; the lock ends with the process.

    Raises:
        TrainingError: it cannot be written, or another process trains in it.
        CheckpointError: checkpoints cannot have such a path.
    """
    checkpoints.refuse_patterns(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115 (held for the block)
    except OSError as error:
        raise errors.TrainingError(
            f"--logdir={folder} cannot be written: {error.strerror}. Name a folder of your own"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.TrainingError(
                f"another process trains in {folder}. Wait for its end, or give another --logdir; "
                "--mode=eval evaluates beside it"
            ) from error
        except OSError as error:
            logging.warning("%s is not locked: its file system reports %s", folder, error.strerror)
        yield


def check_params(
    folder: Path, params: Task.Params, report: Callable[[str], None] | None
) -> task.Change | None:
    """Compare params with those of the run that began in `folder`.

    Args:
        folder: folder of the run.
        params: params of the task.
        report: receives the lines that differ and may differ; None: they are not reported.

    Returns:
        How they differ; None if no run began there.

    Raises:
        TrainingError: they make it another run, or no checkpoint has a whole text.
        CheckpointError: the text of a checkpoint cannot be read now.
    """
    directory = str(folder / CHECKPOINTS)
    begun = checkpoints.newest(directory)
    if begun is None:
        return None
    way_out = f"Give another --logdir; there, --checkpoint={begun} starts from these weights"
    try:
        newest = checkpoints.newest_text(directory)
    except checkpoints.DamagedError as error:
        raise errors.TrainingError(
            f"{error.reason}, and no older checkpoint is whole: the run cannot go on. {way_out}"
        ) from error
    if newest is None:
        return None
    begun_with = newest[1]
    with contextlib.suppress(errors.UserError):  # a class or field of it may not be here any more
        begun_with = hyperparams.from_text(begun_with).to_text()  # with fields that came later
    change = task.change(begun_with, params.to_text())
    if change.models is not None:
        there, here = change.models
        raise errors.TrainingError(f"{folder} holds a run of {there}, not of {here}. {way_out}")
    if change.refused:
        more = len(change.refused) - 1
        first = f"{change.refused[0]} and {more} more" if more else change.refused[0]
        detail = "".join(f"\n    {line}" for line in change.refused)
        raise errors.TrainingError(
            f"{folder} holds a run with other params ({first}). {way_out}{detail}"
        )
    if change.lines and report is not None:
        report("params changed since the last checkpoint:")
        for line in change.lines:
            report(f"    {line}")
    return change


def kept_values(folder: Path) -> dict[str, str] | None:
    """Return path → value as text of the params of the run in `folder`; None: there is no run.

    `check_params` says why they cannot be read, if so.
    """
    try:
        newest = checkpoints.newest_text(str(folder / CHECKPOINTS))
    except errors.CheckpointError:
        return None
    return None if newest is None else text.written_values(newest[1])


def check_assets(folder: Path, assets: Mapping[str, bytes]) -> None:
    """Refuse data whose assets differ from those that the run began with.

    Raises:
        TrainingError: one differs, or cannot be read.
    """
    for name, content in assets.items():
        if _read(folder / name) not in (None, content):
            raise errors.TrainingError(
                f"{folder / name} is not that of the data: the run began with other data. "
                "Use that data, or another --logdir"
            )


def kept_assets(folder: Path, names: Iterable[str]) -> dict[str, bytes] | None:
    """Return the content of a run's files of these names; None if one is missing.

    Raises:
        TrainingError: one cannot be read.
    """
    contents = {}
    for name in names:
        content = _read(folder / name)
        if content is None:
            return None
        contents[name] = content
    return contents


def folders(logdir: Path | None, which: str | None) -> list[Path]:
    """Return the folders to search for a run's files: the run of a checkpoint, then `logdir`.

    Args:
        logdir: log directory of the run.
        which: path of a checkpoint in a folder of the run, or of that folder.
    """
    places = [] if logdir is None else [logdir]
    if which is None:
        return places
    path = Path(os.path.abspath(which))
    return [path.parent, *places] if path.is_dir() else [*path.parents[:2], *places]


def source(params: Task.Params, *, logdir: Path | None, which: str | None) -> Input:
    """Return a task's input on the files that the run stores, or on the data if it stores none.

    Args:
        params: params of the task.
        logdir: log directory of the run.
        which: path of a checkpoint, or of a directory of them: its run's folder comes first.

    Raises:
        UserError: a stored file cannot be read or used.
    """
    source: Input = params.input.instantiate()
    for folder in folders(logdir, which):
        assets = kept_assets(folder, source.asset_names)
        if assets:
            source.recall(assets)
            break
    return source


def keep_assets(folder: Path, assets: Mapping[str, bytes]) -> None:
    """Store the files that define the run's ids in its folder; each file whole or not at all.

    A run without a checkpoint has learned nothing, so files that are already there are replaced.

    Raises:
        TrainingError: the run has other files of these names, or they cannot be written.
    """
    if checkpoints.newest(str(folder / CHECKPOINTS)) is not None:
        check_assets(folder, assets)
    for name, content in assets.items():
        _replace(folder / name, content, "Free disk space, or give another --logdir")


def keep_fingerprint(
    folder: Path, fingerprint: Mapping[str, str], report: Callable[[str], None]
) -> None:
    """Store what describes the training data; report what differs from when the run began.

    Args:
        folder: folder of the run.
        fingerprint: as `Input.fingerprint` returns it.
        report: receives a line for each difference.

    Raises:
        TrainingError: it cannot be read or written.
    """
    stored = _read(folder / _DATA)
    if stored is not None and checkpoints.newest(str(folder / CHECKPOINTS)) is not None:
        before = json.loads(stored)
        for name, value in fingerprint.items():
            if before.get(name, value) != value:
                report(
                    f"the data changed: {name} was {before[name]}, is {value}; some examples of "
                    "this epoch may come twice or not at all"
                )
    content = f"{json.dumps(dict(fingerprint), indent=1)}\n".encode()
    _replace(folder / _DATA, content, "Free disk space, or give another --logdir")


def write_result(folder: Path, values: Mapping[str, object]) -> None:
    """Record that the run is done, and its result; whole or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    content = f"{json.dumps(_of_json(values), indent=1)}\n".encode()
    way_out = "The run is done; the same command writes it once there is space"
    _replace(folder / _RESULT, content, way_out)


def _of_json(value: object) -> object:
    """Return values with None for numbers that are not finite, which JSON has not."""
    if isinstance(value, Mapping):
        return {key: _of_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remove_result(folder: Path) -> None:
    """Remove the record that the run is done."""
    (folder / _RESULT).unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise errors.TrainingError(
            f"{path} cannot be read: {error.strerror}. Make it readable"
        ) from error


def _replace(path: Path, content: bytes, way_out: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise errors.TrainingError(
            f"{path} cannot be written: {error.strerror}. {way_out}"
        ) from error
