"""Weights from checkpoints: for evaluation and export, and to start from those of another run."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from absl import logging

from lingvo_gpipe import errors, network, packing, task
from lingvo_gpipe.input import Input, synthetic
from lingvo_gpipe.layers import base
from lingvo_gpipe.run import checkpoints, log_directory
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.task import Task


def saved_keys(specs: Mapping[str, base.VariableSpec], train: task.Train) -> dict[str, str]:
    """Return path → key in checkpoints of the value that evaluation uses.

    If training keeps averages, they replace weights and statistics; frozen weights have none.

    Args:
        specs: path → spec of the network in training.
        train: training settings of the task.
    """
    return {
        path: keys.average(path)
        if train.average is not None and (spec.trainable or spec.is_state)
        else keys.variable(path)
        for path, spec in specs.items()
    }


def restore(
    by_path: Mapping[str, packing.Variable],
    trained: network.Analysis,
    params: Task.Params,
    *,
    logdir: Path | None,
    which: str | None,
) -> checkpoints.Restored:
    """Assign a network's variables the values that evaluation uses.

    Args:
        by_path: path → variable, for some or all variables of the network.
        trained: the network in training.
        params: params of the task.
        logdir: log directory of the run.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit.
    """
    path = which if logdir is None else which or str(logdir / log_directory.CHECKPOINTS)
    if path is None:
        raise errors.CheckpointError("neither a checkpoint nor a log directory is named")
    key_of = saved_keys(trained.variables, params.train)
    variables = {key_of[each]: variable for each, variable in by_path.items()}
    restored = None
    if which is not None or os.path.isdir(path):
        parts = keys.parts(trained.params, trained.fields, trained.variables)
        restored = checkpoints.restore(path, variables, parts)
    if restored is None:
        raise errors.CheckpointError(
            f"{path} has no checkpoint. Train first, or name one by --checkpoint"
        )
    for prefix, why in restored.torn:
        logging.warning("%s is torn, an older one is used: %s", prefix, why)
    return restored


def start_from(
    start: str,
    learner: Learner,
    params: Task.Params,
    source: Input,
    report: Callable[[str], None],
) -> None:
    """Start a run with the weights and statistics of another network's checkpoint that fit.

    Averages are taken in their place where the checkpoint has them.

    Args:
        start: path of the checkpoint, or of a directory of them.
        learner: the network to train.
        params: params of the task; `train.start` says which variables are taken.
        source: the task's input.
        report: receives each line that a user should read.

    Raises:
        UserError: there is no such checkpoint, it has no variable that fits, or a pattern of
            `train.start.without` matches nothing.
    """
    by_path = learner.pipe.by_path
    skipped = _matching(params.train.start.without, by_path)
    candidates = {
        path: [
            learner.saved_parts.get(key(path)) or keys.Part(key(path), tuple(variable.shape))
            for key in (keys.average, keys.variable)
        ]
        for path, variable in by_path.items()
        if path not in skipped
    }
    matched = checkpoints.restore_matching(by_path, start, candidates)
    if not matched.restored:
        raise errors.CheckpointError(
            f"--checkpoint={start} has no variable of this network"
            f"{' besides those of train.start.without' if skipped else ''}. Give one of a network "
            "with layers of the same names"
        )
    report(f"started from {start}: {len(matched.restored)} variables restored")
    for what, lines in (
        ("initialised by train.start.without", skipped),
        ("missing in it", matched.missing),
        ("does not fit", tuple(matched.misfits.values())),
    ):
        for line in lines:
            report(f"    {what}: {line}")
    places = log_directory.folders(None, start)
    if any((folder / synthetic.FILE).exists() for folder in places):
        report("    it was trained on made-up examples: nothing that it has learned holds here")
    stored = [log_directory.kept_assets(folder, source.asset_names) for folder in places]
    for name, content in next(filter(None, stored), {}).items():
        if content != source.assets()[name]:
            report(f"    another {name} there: what was learned about its ids is not valid here")
    learner.reset_to_weights()


def _matching(patterns: Sequence[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return the variable paths that match a pattern.

    Raises:
        ParamsError: a pattern matches none; names the nearest.
    """
    matches: set[str] = set()
    for pattern in patterns:
        matching = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not matching:
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = errors.suggestion(pattern.rstrip("/*"), known)
            raise errors.ParamsError(
                f"train.start.without names {pattern!r}, which matches no variable; {near}. "
                "Patterns match whole paths: NAME/* is a layer"
            )
        matches |= matching
    return tuple(path for path in paths if path in matches)
