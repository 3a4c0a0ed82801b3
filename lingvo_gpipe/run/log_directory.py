"""The folder of a run: its lock, params, assets and result."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging

from lingvo_gpipe import errors, regular_files, task
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.reslicing import layout
from lingvo_gpipe.task import Task

CHECKPOINTS = "checkpoints"
BEST = "best"
LOCK = "run.lock"
_RESULT = "result.json"
_SHOWN_CHANGES = 20
_SHOWN_CHARS = 200
_MAX_ASSET_BYTES = 2**26


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
                "--mode=eval --follow evaluates beside it"
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
    try:
        kept = checkpoints.newest_text(str(folder / CHECKPOINTS))
    except checkpoints.UnreadableNowError:
        raise
    except errors.CheckpointError as error:
        newest = checkpoints.newest(str(folder / CHECKPOINTS))
        raise errors.TrainingError(
            f"{error}, and no older checkpoint is whole: the run cannot go on. Give another "
            f"--logdir; there, --checkpoint={newest} starts from these weights"
        ) from error
    if kept is None:
        return None
    newest, old = kept
    change = task.change(old, params.to_text())
    if change.refused or change.models is not None:
        way = layout.RESLICE if layout.only_slices_differ(old, params) else ""
        raise errors.TrainingError(_refusal(change, newest, folder, way))
    if change.lines and report is not None:
        report("params changed since the last checkpoint:")
        for line in change.lines:
            report(f"    {line}")
    return change


def check_made(folder: Path, *, is_made: bool) -> None:
    """Refuse made-up examples for a run on data, and data for a run on made-up examples.

    Args:
        folder: folder of the run.
        is_made: whether examples are made up now.

    Raises:
        TrainingError: they were not when the run began, or the other way round.
    """
    was_made = (folder / synthetic.FILE).exists()
    if was_made == is_made or checkpoints.newest(str(folder / CHECKPOINTS)) is None:
        return
    there, here = ("made-up examples", "data") if was_made else ("data", "made-up examples")
    raise errors.TrainingError(
        f"{folder} holds a run on {there} and is not continued on {here}. Give another --logdir, "
        f"or {'keep' if was_made else 'leave out'} --data=made"
    )


def kept_values(folder: Path) -> dict[str, str] | None:
    """Return path → value as text of the params of the run in `folder`; None: there is no run.

    `check_params` says why they cannot be read, if so.
    """
    try:
        kept = checkpoints.newest_text(str(folder / CHECKPOINTS))
    except errors.CheckpointError:
        return None
    return None if kept is None else text.written_values(kept[1])


def _refusal(change: task.Change, newest: str, folder: Path, way: str) -> str:
    """Return why these params belong to another run than that in `folder`, and the ways out.

    Args:
        change: how they differ.
        newest: prefix of the run's newest checkpoint.
        folder: folder of the run.
        way: a better way out than to start from the weights, or empty.
    """
    ways = f"{way}Give another --logdir; there, --checkpoint={newest} starts from these weights"
    if change.models is not None:
        there, here = (name[:_SHOWN_CHARS] for name in change.models)
        return f"{folder} holds a run of {there}, not of {here}. {ways}"
    lines = [line[:_SHOWN_CHARS] for line in change.refused[: _SHOWN_CHANGES + 1]]
    first = lines[0] if len(lines) == 1 else f"{lines[0]} and {len(change.refused) - 1} more"
    shown = [*lines[:_SHOWN_CHANGES], *(["…"] if len(lines) > _SHOWN_CHANGES else [])]
    detail = "".join(f"\n    {line}" for line in shown)
    what = "slices" if way else "params"
    return f"{folder} holds a run with other {what} ({first}). {ways}{detail}"


def try_out(folder: Path, params: Task.Params, assets: Mapping[str, bytes]) -> None:
    """Check that a run could begin or continue in `folder`; leave nothing there.

    Args:
        folder: folder of the run.
        params: params of the task.
        assets: assets of its input, name → content.

    Raises:
        TrainingError: it could not.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock_is_new = not (folder / LOCK).exists()
    _check_sizes(folder, assets)
    with locked(folder):
        if check_params(folder, params, report=None) is not None:
            check_assets(folder, assets)
    if lock_is_new:
        (folder / LOCK).unlink()
    for path in made:
        path.rmdir()


def check_assets(folder: Path, assets: Mapping[str, bytes]) -> tuple[str, ...]:
    """Refuse data whose assets differ from those that the run began with.

    Args:
        folder: folder of the run.
        assets: name → content, of the current data.

    Returns:
        Names of the assets that the run does not have yet.

    Raises:
        TrainingError: one differs, or cannot be read; or only one of both is made up.
    """
    check_made(folder, is_made=synthetic.FILE in assets)
    missing = []
    for name, content in assets.items():
        try:
            same = regular_files.read(folder / name, _MAX_ASSET_BYTES) == content
        except FileNotFoundError:
            missing.append(name)
            continue
        except OSError as error:
            raise errors.TrainingError(
                f"{folder / name} cannot be read: {error.strerror}. Make it readable"
            ) from error
        if not same:
            raise errors.TrainingError(
                f"{folder / name} is not that of the data: the run began with other data. "
                "Use that data, or another --logdir"
            )
    return tuple(missing)


def kept_assets(folder: Path, names: Iterable[str]) -> dict[str, bytes] | None:
    """Return the content of a run's files of these names; None if one is missing.

    Raises:
        TrainingError: one cannot be read.
    """
    contents = {}
    for name in names:
        try:
            contents[name] = regular_files.read(folder / name, _MAX_ASSET_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise errors.TrainingError(
                f"{folder / name} cannot be read: {error.strerror}. Make it readable"
            ) from error
    return contents


def keep_assets(folder: Path, assets: Mapping[str, bytes]) -> None:
    """Store the files that define the run's ids in its folder; each file whole or not at all.

    A run without a checkpoint has learned nothing, so files that are already there are replaced.

    Raises:
        TrainingError: the run has other files of these names, they are too large to be read again,
            or they cannot be written.
    """
    _check_sizes(folder, assets)
    begun = checkpoints.newest(str(folder / CHECKPOINTS)) is not None
    for name in check_assets(folder, assets) if begun else assets:
        _replace(folder / name, assets[name], "Free disk space, or give another --logdir")


def _check_sizes(folder: Path, assets: Mapping[str, bytes]) -> None:
    for name, content in assets.items():
        if len(content) > _MAX_ASSET_BYTES:
            raise errors.TrainingError(
                f"{folder / name} would have {len(content):,} bytes, and is read again only up to "
                f"{_MAX_ASSET_BYTES:,}. Use data with a smaller {name}"
            )


def write_result(folder: Path, values: Mapping[str, object]) -> None:
    """Record that the run is done, and its result; whole or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    content = f"{json.dumps(dict(values), indent=1)}\n".encode()
    _replace(
        folder / _RESULT,
        content,
        "The run is done and its last checkpoint whole; the same command writes it once there is "
        "space",
    )


def _replace(path: Path, content: bytes, advice: str) -> None:
    """Write a file whole or not at all; `advice` ends the message if it cannot be written."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise errors.TrainingError(
            f"{path} cannot be written: {error.strerror}. {advice}"
        ) from error


def remove_result(folder: Path) -> None:
    """Remove the record that the run is done.

    Raises:
        TrainingError: it cannot be removed.
    """
    try:
        (folder / _RESULT).unlink(missing_ok=True)
    except OSError as error:
        raise errors.TrainingError(
            f"{folder / _RESULT} cannot be removed: {error.strerror}. Remove it, or give another "
            "--logdir"
        ) from error


def is_over(folder: Path) -> bool:
    """Return whether the run is recorded as done; then its last checkpoint exists.

    Raises:
        TrainingError: the record is damaged.
    """
    path = folder / _RESULT
    try:
        result = regular_files.read_json(path)
        reason = None if isinstance(result, dict) else "it is not a result"
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise errors.TrainingError(
            f"{path} is damaged: {reason}. Remove it; the run's own command writes it again"
        )
    return True
