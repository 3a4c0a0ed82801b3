"""Saving and restoring checkpoints, and refusing checkpoints that do not fit.

`keys` has the keys, `files` the names of files and how they are written.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.cluster import connection
from lingvo_gpipe.run.checkpoints import files, shards, writing
from lingvo_gpipe.run.checkpoints.values import UNREADABLE, SavedValues, check_damaged, reason


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        path: prefix of the checkpoint's files.
        step: its number.
        torn: newer checkpoints that could not be read: prefix and reason.
    """

    path: str
    step: int
    torn: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Matched:
    """What a partial restore did.

    Attributes:
        restored: keys whose saved values were assigned.
        missing: keys that the checkpoint does not have.
        misfits: keys saved with another shape or dtype, each with a line that describes it.
    """

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: Mapping[str, str]


class Checkpoints:
    """The checkpoints of one run in one directory.

    Attributes:
        directory: directory of their files.
    """

    def __init__(
        self,
        directory: str,
        variables: Mapping[str, packing.Variable],
        params_text: str = "",
        *,
        keep: int = 3,
        read_only: bool = False,
        writer: writing.Writer | None = None,
        resumed_from: str | None = None,
    ) -> None:
        """Open a directory, removing what an interrupted run left there.

        Args:
            directory: created if it is missing, unless `read_only`.
            variables: key → variable.
            params_text: stored with each checkpoint.
            keep: number of checkpoints to keep, newest first.
            read_only: nothing is created, removed or saved, because another run writes here.
            writer: writes the checkpoints; None: each is written at once.
            resumed_from: the directory whose newest one the run would continue from; None: this.

        Raises:
            CheckpointError: the directory cannot be written, or has another program's checkpoints.
        """
        files.refuse_patterns(directory)
        self.directory = directory
        self._resumed_from = resumed_from or directory
        self._variables = dict(variables)
        self._params_text = params_text
        self._snapshots = {
            key: writing.Snapshot(variable.dtype, packing.host(variable.device))
            for key, variable in self._variables.items()
        }
        self._checkpoint: writing.Checkpoint | shards.OverHosts
        self._checkpoint = writing.Checkpoint(**self._snapshots)
        if len({_process(variable.device) for variable in self._variables.values()}) > 1:
            self._checkpoint = shards.OverHosts(self._checkpoint)
        self._writer = writer or writing.Writer()
        self._begun: concurrent.futures.Future[writing.Written] | None = None
        self._keep = keep
        self._manager: tf.train.CheckpointManager | None = None
        self._present: str | None = None
        if read_only:
            return
        try:
            files.open_directory(directory)
            self._tidy()
        except OSError as error:
            raise errors.CheckpointError(
                f"{directory}: checkpoints cannot be written here: {error.strerror}. Choose "
                "another --logdir, or correct its permissions"
            ) from error

    def save(self, step: int) -> str:
        """Save the values of now under the number `step`; return the prefix of the files.

        The writer may complete it later. Saving the step that was just saved or restored does
        nothing.

        Raises:
            CheckpointError: it cannot be written, or one before it could not; older ones are kept.
        """
        manager = self._manager
        if manager is None:
            raise errors.CheckpointError(f"{self.directory} was opened read-only: nothing is saved")
        prefix = os.path.join(self.directory, f"{files.NAME}-{step}")
        if self._begun is not None and self._begun.done() and self._begun.exception():
            self._present = None
        if prefix == self._present:
            return prefix
        begun = time.perf_counter()
        if self._begun is not None:  # so that values of two moments are never held
            concurrent.futures.wait([self._begun])
        self._hold(packing.snapshot(self._variables))
        taken = time.perf_counter()

        def write() -> writing.Written:
            num_bytes = self._write(manager, prefix)
            written_s = time.perf_counter() - taken
            waited_s = taken - begun + (0.0 if self._writer.in_background else written_s)
            return writing.Written(prefix, step, waited_s, written_s, num_bytes)

        self._begun = self._writer.write(write)
        self._present = prefix
        return prefix

    def _hold(self, stored: Sequence[packing.Stored[str]]) -> None:
        """Hold the values that are written next, and no others."""
        if isinstance(self._checkpoint, shards.OverHosts):
            self._checkpoint.stored = stored
            return
        for snapshot in self._snapshots.values():
            snapshot.value = writing.no_value
        for one in stored:
            for key, value in zip(one.keys, one.values(), strict=True):
                self._snapshots[key].value = functools.partial(_itself, value)

    def _write(self, manager: tf.train.CheckpointManager, prefix: str) -> int:
        """Write the snapshots; return the bytes of the files."""
        try:
            if files.discard(prefix):
                manager = self._tidy()
            files.begin(prefix, self._params_text)
            options = tf.train.CheckpointOptions(
                experimental_write_callbacks=[lambda path: files.finish(path)]
            )
            manager.save(checkpoint_number=files.step_of(prefix), options=options)
            files.sweep(self.directory)
            return files.size_of(prefix)
        except (OSError, tf.errors.OpError) as error:
            with contextlib.suppress(OSError):
                files.sweep(self.directory)
            whole = files.newest(self._resumed_from)
            last = f"{self._resumed_from} has no older one"
            if whole:
                last = f"the last whole one is {whole}"
            free = files.free_space(self.directory)
            raise errors.CheckpointError(
                f"{prefix}: checkpoint cannot be written ({reason(error)}); {last}. Free disk "
                f"space ({free} free), then start the same command again"
            ) from error
        finally:
            self._hold(())

    def restore(self, which: int | str | None = None, *, subset: bool = False) -> Restored | None:
        """Assign all variables their saved values.

        Args:
            which: a step of this directory, the path of a checkpoint or of a directory of them,
                or None: the newest of this directory.
            subset: the variables are only some of those saved (evaluation has no slots).

        The params text of a checkpoint is a part of it, except for a subset.

        Returns:
            What was restored; None if `which` is None and the directory has no checkpoint. If
            `which` is None, newer checkpoints that are torn are skipped and listed.

        Raises:
            CheckpointError: there is no such checkpoint, it is torn, of another network, or cannot
                be read now, whatever its files hold.
        """
        torn: list[tuple[str, str]] = []
        for prefix in self._candidates(which):
            if not subset and (fault := files.text_fault(prefix)) is not None:
                torn.append((prefix, fault))
                continue
            try:
                saved = SavedValues(prefix)
                self._check(saved, prefix, subset=subset)
                saved.assign(tuple(self._variables.items()))
            except errors.CheckpointError:
                raise
            except connection.LOST_ERRORS:
                raise  # the loss of a worker says nothing about the file
            except UNREADABLE as error:
                check_damaged(prefix, error)
                torn.append((prefix, reason(error)))
                continue
            inside = os.path.dirname(os.path.abspath(prefix)) == os.path.abspath(self.directory)
            self._present = prefix if inside and not subset else None
            if torn and self._manager is not None:
                files.set_aside(prefix for prefix, _ in torn)
                self._tidy()
            return Restored(prefix, files.step_of(prefix), tuple(torn))
        if not torn:
            return None
        prefix, why = torn[0]
        whole = files.find(os.path.dirname(prefix))
        others = [other for other in whole if other not in dict(torn)]
        way_out = f"whole ones: {', '.join(others)}" if others else "no other is left"
        raise errors.CheckpointError(f"{prefix} is torn and cannot be restored: {why}; {way_out}")

    def _candidates(self, which: int | str | None) -> list[str]:
        """Return the prefixes to try, newest first."""
        if which is None:
            return files.find_marked(self.directory)[::-1]
        if isinstance(which, int):
            which = os.path.join(self.directory, f"{files.NAME}-{which}")
        return [files.at(which)]

    def _check(self, saved: SavedValues, prefix: str, *, subset: bool) -> None:
        """Refuse a checkpoint whose keys, shapes or dtypes are not those of the variables."""
        missing = [key for key in self._variables if key not in saved.shapes]
        extra = [] if subset else [key for key in saved.shapes if key not in self._variables]
        misfits = [
            misfit
            for key, variable in self._variables.items()
            if key in saved.shapes and (misfit := saved.misfit(key, variable))
        ]
        if not (missing or extra or misfits):
            return
        faults = [f"{len(misfits)} differ ({_some(misfits)})"] if misfits else []
        faults += [f"{len(missing)} are missing in it ({_some(missing)})"] if missing else []
        faults += [f"{len(extra)} are not in this network ({_some(extra)})"] if extra else []
        raise errors.CheckpointError(
            f"{prefix} is of another network: {'; '.join(faults)}. Give another --logdir, or the "
            "model and params it was written with"
        )

    def _tidy(self) -> tf.train.CheckpointManager:
        """Sweep, make TensorFlow's state list the whole checkpoints, and continue from it."""
        files.sweep(self.directory)
        files.repair_state(self.directory)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint,
            self.directory,
            max_to_keep=self._keep,
            checkpoint_name=files.NAME,
        )
        return self._manager


def restore_matching(
    variables: Mapping[str, packing.Variable],
    path: str,
    names: Mapping[str, Sequence[str]] | None = None,
) -> Matched:
    """Assign saved values to the variables that they fit, to start from another network.

    Args:
        variables: key → variable.
        path: path of a checkpoint, or of a directory of them (the newest).
        names: key here → keys in the checkpoint, of which the first that exists is used. A key
            that is not in `names` has the same key there. A key with no names is skipped.

    Raises:
        CheckpointError: there is no such checkpoint, or it is torn.
    """
    prefix = files.at(path)
    restored, missing, misfits = [], [], {}
    pairs: list[tuple[str, packing.Variable]] = []
    try:
        saved = SavedValues(prefix)
        for key, variable in variables.items():
            sources = (names or {}).get(key, (key,))
            if not sources:
                continue
            source = next((name for name in sources if name in saved.shapes), None)
            if source is None:
                missing.append(key)
            elif misfit := saved.misfit(key, variable, source):
                misfits[key] = misfit
            else:
                restored.append(key)
                pairs.append((source, variable))
        saved.assign(pairs)
    except connection.LOST_ERRORS:
        raise
    except UNREADABLE as error:
        check_damaged(prefix, error)
        raise errors.CheckpointError(
            f"{prefix} is torn and cannot be restored: {reason(error)}; choose another one"
        ) from error
    return Matched(tuple(restored), tuple(missing), misfits)


def _process(device: str) -> tuple[str | None, int | None]:
    """Return job and task of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def _itself(value: tf.Tensor) -> tf.Tensor:
    return value


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
