r"""A run with other slices: everything that a run needs to go on, in a folder of its own.

    python -m lingvo_gpipe.trainer --model=mine.Model --mode=reslice --checkpoint=runs/old \
        --logdir=runs/new --params_override="model.slices={'softmax': 8}"

Then `--mode=train` with the same `--logdir` and overrides goes on. The run that is read never
changes. The new folder is complete when it appears.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from absl import logging

from lingvo_gpipe import errors, hyperparams, optim, task
from lingvo_gpipe.input import Input
from lingvo_gpipe.run import checkpoints, log_directory, restoring
from lingvo_gpipe.run.reslicing import layout, values
from lingvo_gpipe.task import Task

_WRITING = ".writing"
_SHOWN_CHANGES = 3


def run(
    params: Task.Params,
    logdir: Path,
    start: str,
    *,
    report: Callable[[str], None] = logging.info,
) -> Path:
    """Write a run's checkpoint, its best one and its assets for a network in other slices.

    Args:
        params: params of the task, with the slices that are wanted.
        logdir: log directory of the new run; it must not exist, or be empty.
        start: log directory of a run, directory of checkpoints, or path of a checkpoint.
        report: receives the lines.

    Returns:
        The new log directory.

    Raises:
        UserError: there is no such checkpoint, the variables of the new network do not follow from
            it, or the folder is not empty or cannot be written.
    """
    target = Path(os.path.abspath(logdir))
    prefix = _source(start)
    _check_target(target, prefix)
    source, is_recalled = _input(params, prefix)
    params = task.complete(params, source)
    task.check(params)
    old_params = _params_of(prefix)
    if is_recalled:
        source.recall_params(params, old_params)
    _check_changes(prefix, old_params, params)
    old, new = (layout.of_task(each, source) for each in (old_params, params))
    divisions = values.divisions(old, new)
    _check_alike(old, new, divisions)
    if not divisions:
        raise errors.CheckpointError(
            f"{prefix} has these slices already: nothing is to be done. Train on in its own folder"
        )
    partial = target.with_name(target.name + _WRITING)
    with log_directory.locked(partial):
        try:
            _clear(partial)
            log_directory.keep_assets(partial, source.assets())
            text = params.to_text()
            step = checkpoints.step_of(prefix)
            for name, each in _prefixes(prefix):
                found = values.resliced(each, old, new)
                folder = str(partial / name)
                checkpoints.write_values(folder, checkpoints.step_of(each), found, text)
            partial.rename(target)
        except OSError as error:
            raise errors.CheckpointError(
                f"{target} cannot be written: {error.strerror}. Free disk space, or give another "
                "--logdir"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    report(f"resliced step={step} of {prefix} to {target}")
    for line in _lines(divisions, new.optimizer):
        report(f"    {line}")
    return target


def _source(start: str) -> str:
    """Return the prefix of the checkpoint that `start` names."""
    inside = os.path.join(start, log_directory.CHECKPOINTS)
    return checkpoints.at(inside if os.path.isdir(inside) else start)


def _input(params: Task.Params, prefix: str) -> tuple[Input, bool]:
    """Return the task's input, and whether it is on the stored files: if the data is not there.

    Raises:
        UserError: the data is not that of the run, or a stored file cannot be used.
    """
    made: Input = params.input.instantiate()
    if not made.is_there():
        return restoring.source(params, logdir=None, which=prefix), True
    log_directory.check_assets(Path(os.path.abspath(prefix)).parents[1], made.assets())
    return made, False


def _check_target(target: Path, prefix: str) -> None:
    """Refuse a folder that is not new.

    Raises:
        CheckpointError: it is not.
    """
    directory = Path(prefix).resolve().parent
    if target.resolve() in (directory, *directory.parents):
        raise errors.CheckpointError(
            f"--logdir={target} holds the checkpoint that is read, {prefix}. Give a new folder"
        )
    try:
        is_new = not any(target.iterdir())
    except FileNotFoundError:
        is_new = True
    except OSError as error:
        raise errors.CheckpointError(
            f"--logdir={target} cannot be used: {error.strerror}. Give a new folder"
        ) from error
    if not is_new:
        raise errors.CheckpointError(f"--logdir={target} is not empty. Give a new folder")


def _params_of(prefix: str) -> Task.Params:
    """Return the params with which a checkpoint was written.

    Raises:
        CheckpointError: it has none that can be read.
    """
    text = checkpoints.params_text(prefix)
    if text is None:
        raise errors.CheckpointError(
            f"{prefix} was saved without params, so its slices are not known. Give a checkpoint "
            "that a run has written"
        )
    try:
        old = hyperparams.from_text(text)
    except errors.ParamsError as error:
        raise errors.CheckpointError(
            f"the params of {prefix} cannot be read: {str(error).splitlines()[0]}. Name the "
            "package of its classes by --params_package"
        ) from error
    if not isinstance(old, Task.Params):
        raise errors.CheckpointError(f"the params of {prefix} are not those of a task")
    return old


def _check_changes(prefix: str, old: Task.Params, params: Task.Params) -> None:
    """Refuse params that differ from those of a checkpoint in more than slices.

    Raises:
        CheckpointError: they do.
    """
    change = layout.other_changes(old, params)
    if change.models is not None:
        raise errors.CheckpointError(
            f"{prefix} is of {change.models[0]}, not of {change.models[1]}. Give its --model"
        )
    if change.refused:
        shown = "; ".join([*change.refused[:_SHOWN_CHANGES], "…"][: len(change.refused)])
        raise errors.CheckpointError(
            f"{prefix} differs in more than slices ({shown}). Leave --model out, or give it with "
            "the overrides of its run, and change only slices"
        )


def _check_alike(old: layout.Layout, new: layout.Layout, changed: Collection[str]) -> None:
    """Refuse patterns that select other variables than before.

    Args:
        old: layout of the checkpoint.
        new: layout of the new run.
        changed: whole paths of the variables that have other slices.

    Raises:
        CheckpointError: they do.
    """
    for field, before, after in (
        ("model.frozen", old.which(old.trained()), new.which(new.trained())),
        ("train.optimizer.lazy", old.which(old.lazy()), new.which(new.lazy())),
    ):
        differ = [
            w for w in after if before[w] != after[w] or (after[w] == "some" and w in changed)
        ]
        if differ:
            raise errors.CheckpointError(
                f"{field} selects other weights than in the checkpoint: "
                f"{', '.join(differ[:_SHOWN_CHANGES])}. Set it so that it names all slices of the "
                "same weights"
            )


def _prefixes(prefix: str) -> list[tuple[str, str]]:
    """Return folder and prefix of each checkpoint that the new run begins with."""
    found = [(log_directory.CHECKPOINTS, prefix)]
    directory = Path(os.path.abspath(prefix)).parent
    if directory.name == log_directory.CHECKPOINTS:
        best = checkpoints.newest(str(directory.parent / log_directory.BEST))
        if best is not None and checkpoints.step_of(best) <= checkpoints.step_of(prefix):
            found.insert(0, (log_directory.BEST, best))
    return found


def _clear(folder: Path) -> None:
    """Remove what an earlier process left that was killed."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != log_directory.LOCK:
            path.unlink()


def _lines(divisions: dict[str, optim.Division], optimizer: optim.Optimizer) -> list[str]:
    """Return a line for each variable in other slices, and what they change."""
    lines = [
        f"{whole} {list(division.shape)}: {_slices(division.before)} → {_slices(division.after)}"
        for whole, division in divisions.items()
        if division.before != division.after  # else only its name changes
    ]
    note = optimizer.rule.of_slices
    return [*lines, f"updates are not those of the whole weights: {note}"] if note else lines


def _slices(sizes: tuple[int, ...]) -> str:
    """Return how sizes are shown.

    >>> _slices((7,)), _slices((3, 2, 2)), _slices((2,) * 9)
    ('whole', '3 slices of 3, 2, 2', '9 slices of 2, 2, …, 2')
    """
    if len(sizes) == 1:
        return "whole"
    shown = [str(size) for size in sizes]
    if len(sizes) > 4:
        shown = [*shown[:2], "…", shown[-1]]
    return f"{len(sizes)} slices of {', '.join(shown)}"
