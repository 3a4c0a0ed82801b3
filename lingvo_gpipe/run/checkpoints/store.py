"""Writing checkpoints while training goes on, and restoring those that fit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf
from tensorflow.python.eager import context, executor

from lingvo_gpipe import errors, packing
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.run.checkpoints import files, keys
from lingvo_gpipe.run.checkpoints.keys import Part
from lingvo_gpipe.run.checkpoints.saved import SavedValues, reason

Variables = Mapping[str, packing.Variable]


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        path: prefix of the checkpoint's files.
        step: its number.
        torn: newer checkpoints that are damaged: prefix and reason.
    """

    path: str
    step: int
    torn: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Matched:
    """What a partial restore did.

    Attributes:
        restored: names of the variables whose saved values were assigned.
        missing: names of those that the checkpoint does not have.
        misfits: names of those that were saved with another shape or dtype → what differs.
    """

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: Mapping[str, str]


class WriterThread:
    """Writes checkpoints one after the other in a thread, while training goes on.

    A checkpoint may refer to those before it (the best one): after one that failed, those that
    were begun are not written either.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        # An executor of its own: in the common one, operations of workers would wait for each
        # other, so that training would wait until all is written.
        self._executor = executor.new_executor(enable_async=False, enable_streaming_enqueue=False)
        self._begun: list[concurrent.futures.Future[None]] = []

    def submit(self, job: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Do a job after those before it."""
        before = self._begun[-1] if self._begun else None

        def run() -> None:
            if before is not None:
                before.result()
            with context.executor_scope(self._executor):
                job()

        self._begun.append(self._pool.submit(run))
        return self._begun[-1]

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once.

        Raises:
            CheckpointError: there is one.
        """
        done = [future for future in self._begun if future.done()]
        self._begun = [future for future in self._begun if future not in done]
        for future in done:
            future.result()

    def join(self) -> None:
        """Wait until all is written; raises what `check` does."""
        concurrent.futures.wait(self._begun)
        self.check()

    def close(self) -> BaseException | None:
        """Wait until all is written; return an error that was not raised."""
        self._pool.shutdown()
        return next(filter(None, (future.exception() for future in self._begun)), None)


class Checkpoints:
    """The checkpoints of a run in one directory.

    Values of several processes are written by these processes, all at once.

    Attributes:
        directory: directory of their files.
    """

    def __init__(
        self,
        directory: str,
        variables: Variables,
        params_text: str = "",
        *,
        thread: WriterThread | None = None,
        parts: Mapping[str, Part] | None = None,
        keep: int = 3,
        resumed_from: str | None = None,
    ) -> None:
        """Open a directory, removing what an interrupted run left there.

        Args:
            directory: created if it is missing.
            variables: key → variable.
            params_text: stored with each checkpoint.
            thread: writes them; None: each is on the disk when `save` returns.
            parts: see `keys.parts`.
            keep: number of checkpoints to keep, newest first.
            resumed_from: the directory whose newest one the run would continue from; None: this.

        Raises:
            CheckpointError: the directory cannot be written.
        """
        files.refuse_patterns(directory)
        self.directory = directory
        self._variables = variables
        self._params_text = params_text
        self._thread = thread or WriterThread()
        self._waits = thread is None
        self._parts = parts or {}
        self._keep = keep
        self._resumed_from = resumed_from or directory
        self._save = outer_function.OuterFunction(self._saved)
        self._stored: Sequence[packing.Stored[str]] = ()
        self._begun: concurrent.futures.Future[None] | None = None
        self._present: str | None = None
        with tf.device("CPU:0"):
            self._here = str(tf.constant(0).device)
        try:
            os.makedirs(directory, exist_ok=True)
            files.sweep(directory)
        except OSError as error:
            raise errors.CheckpointError(
                f"{directory}: checkpoints cannot be written here: {error.strerror}. Choose "
                "another --logdir, or correct its permissions"
            ) from error

    def save(self, step: int) -> str:
        """Save the values of now under the number `step`; return the prefix of the files.

        The thread completes it later. Saving the step that was just saved or restored does nothing.
        """
        prefix = os.path.join(self.directory, f"{files.NAME}-{step}")
        if self._begun is not None:  # so that values of two moments are never held
            concurrent.futures.wait([self._begun])
        if prefix == self._present:
            return prefix
        stored = packing.snapshot(self._variables)
        self._begun = self._thread.submit(functools.partial(self._write, prefix, stored))
        if self._waits:
            self._thread.join()
        return prefix

    def _write(self, prefix: str, stored: Sequence[packing.Stored[str]]) -> None:
        try:
            files.discard([prefix])
            files.sweep(self.directory)
            files.begin(prefix, self._params_text)
            self._stored = stored
            self._save(tf.constant(prefix), [each.tensor for each in stored]).numpy()
            files.finish(prefix)
            # One of a later step is of a run that went another way; it is older, too.
            older = [other for other in files.find(self.directory) if other != prefix]
            files.discard(older[: max(0, len(older) + 1 - self._keep)])
            files.sweep(self.directory)
        except (OSError, tf.errors.OpError) as error:
            with contextlib.suppress(OSError):
                files.sweep(self.directory)
            whole = files.newest(self._resumed_from)
            last = f"the last whole one is {whole}" if whole else "there is no older one"
            raise errors.CheckpointError(
                f"{prefix}: checkpoint cannot be written ({reason(error)}); {last}. Free disk "
                f"space ({files.free_space(os.path.dirname(self._resumed_from))} free), then start "
                "the same command again"
            ) from error
        finally:
            self._stored = ()
        self._present = prefix

    def _saved(self, prefix: tf.Tensor, tensors: list[tf.Tensor]) -> tf.Tensor:
        """Write a file in each process, then join their indices; in-graph, traced once.

        Returns:
            A scalar that is there once all is written.
        """
        by_process: dict[str, list[tuple[Part, tf.Tensor]]] = {}
        for stored, tensor in zip(self._stored, tensors, strict=True):
            process = _cpu_of_process(stored.tensor.device)
            with tf.device(process):
                values = stored.values(tensor)
            for key, value in zip(stored.keys, values, strict=True):
                part = self._parts.get(key) or Part(key, tuple(value.shape))
                by_process.setdefault(process, []).append((part, value))
        pieces, saved = [], []
        for number, (process, written) in enumerate(by_process.items()):
            name = f"_temp/part-{number:05d}-of-{len(by_process):05d}"
            with tf.device(self._here):
                pieces.append(tf.strings.join([prefix, name]))
            with tf.device(process):
                saved.append(
                    tf.raw_ops.SaveV2(
                        prefix=pieces[-1],
                        tensor_names=[part.key for part, _ in written],
                        shape_and_slices=[part.spec for part, _ in written],
                        tensors=[value for _, value in written],
                    )
                )
        with tf.device(self._here), tf.control_dependencies(saved):
            joined = tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=pieces, destination_prefix=prefix, delete_old_dirs=True
            )
            with tf.control_dependencies([joined]):
                return tf.zeros([])

    def restore(self) -> Restored | None:
        """Restore all variables from the newest whole checkpoint; torn ones are set aside.

        Returns:
            What was restored; None if there is no checkpoint.

        Raises:
            CheckpointError: all are torn; or one is of another network, or cannot be read now.
        """
        restored = restore(self.directory, self._variables, self._parts, whole=True)
        if restored is not None:
            files.set_aside(prefix for prefix, _ in restored.torn)
            self._present = restored.path
        return restored


def restore(
    path: str,
    variables: Variables,
    parts: Mapping[str, Part],
    *,
    whole: bool = False,
) -> Restored | None:
    """Assign all variables their saved values.

    Args:
        path: path of a checkpoint, or of a directory: then the newest that is not torn.
        variables: key → variable.
        parts: see `keys.parts`.
        whole: whether they are all that was saved (evaluation has no slots), and the text of the
            params must be whole, too.

    Returns:
        What was restored; None if the directory has no checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint; it is torn, of another network, or cannot be
            read now.
    """
    torn: list[tuple[str, str]] = []
    first: files.DamagedError | None = None
    is_directory = os.path.isdir(path)
    for prefix in files.find_completed(path)[::-1] if is_directory else [files.at(path)]:
        try:
            if whole:
                files.params_text(prefix)
            saved = SavedValues(prefix)
            pairs, used = [], set[str]()
            for key, variable in variables.items():
                part = parts.get(key) or Part(key, tuple(variable.shape))
                if not part.shape and (alike := _of_other_slices(saved, part.key)):
                    used.update(alike)
                    part = Part(alike[0], ())
                pairs.append((part, variable))
            _check(saved, pairs, prefix, used if whole else saved.shapes)
            saved.assign(pairs)
            return Restored(prefix, files.step_of(prefix), tuple(torn))
        except files.DamagedError as error:
            torn.append((prefix, error.reason))
            first = first or error
    if first is not None:
        raise first
    return None


def _of_other_slices(saved: SavedValues, key: str) -> list[str]:
    """Return the keys of a scalar slot in other slices, if all of them have one value."""
    if key in saved.shapes:
        return []
    slot = key.rpartition("/")[0] if keys.is_of_a_slice(key) else key
    others = [
        other
        for other in saved.shapes
        if other == slot or (other.startswith(f"{slot}/") and keys.is_of_a_slice(other))
    ]
    values = {saved.read(k).tobytes() for k in others if not saved.shapes[k]}
    return others if len(values) == 1 else []


def restore_matching(
    variables: Variables, path: str, candidates: Mapping[str, Sequence[Part]]
) -> Matched:
    """Assign saved values to the variables that they fit, to start from another network.

    Args:
        variables: name → variable.
        path: path of a checkpoint, or of a directory of them (the newest).
        candidates: name → parts in the checkpoint, of which the first that exists is used.

    Raises:
        CheckpointError: there is no such checkpoint, it is torn, or cannot be read now.
    """
    saved = SavedValues(files.at(path))
    restored, missing, misfits = [], [], {}
    pairs: list[tuple[Part, packing.Variable]] = []
    for name, of_variable in candidates.items():
        part = next((part for part in of_variable if part.key in saved.shapes), None)
        if part is None:
            missing.append(name)
        elif misfit := saved.misfit(name, part, variables[name]):
            misfits[name] = misfit
        else:
            restored.append(name)
            pairs.append((part, variables[name]))
    if pairs:
        saved.assign(pairs)
    return Matched(tuple(restored), tuple(missing), misfits)


def _check(
    saved: SavedValues,
    pairs: Sequence[tuple[Part, packing.Variable]],
    prefix: str,
    unused: Collection[str],
) -> None:
    """Refuse a checkpoint whose keys, shapes or dtypes are not those of the variables.

    Args:
        saved: its values.
        pairs: part of a saved value, and the variable that receives it.
        prefix: its prefix.
        unused: keys that need no variable.
    """
    wanted = {part.key for part, _ in pairs}
    missing = wanted - saved.shapes.keys()
    extra = saved.shapes.keys() - wanted - set(unused)
    if divided := sorted(key for key in missing | extra if keys.is_of_a_slice(key)):
        raise errors.CheckpointError(
            f"{prefix} is of other slices: {divided[0]} is not of its weight's shape, so it cannot "
            "be divided again. Give the slices that it was written with, or start from the weights "
            f"alone: --checkpoint={prefix} and another --logdir"
        )
    misfits = [
        misfit
        for part, variable in pairs
        if part.key in saved.shapes and (misfit := saved.misfit(part.key, part, variable))
    ]
    faults = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''})"
        for names, what in (
            (misfits, "differ"),
            (missing, "are missing in it"),
            (extra, "are not in this network"),
        )
        if names
    ]
    if faults:
        raise errors.CheckpointError(
            f"{prefix} is of another network: {'; '.join(faults)}. Give another --logdir, or the "
            "model and params it was written with"
        )


def _cpu_of_process(device: str) -> str:
    """Return the first CPU of a device's process.

    >>> _cpu_of_process("/job:worker/replica:0/task:1/device:CPU:3")
    '/job:worker/replica:0/task:1/device:CPU:0'
    """
    spec = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
    return str(spec.to_string())
