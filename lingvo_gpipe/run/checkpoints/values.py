"""What a checkpoint holds: values by key, with shapes and dtypes, without variables."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.run.checkpoints import files, keys, writing

UNREADABLE = (OSError, tf.errors.OpError, RuntimeError, ValueError, IndexError)
"""What is raised for a file that cannot be read; see `check_damaged`."""

# What says nothing about the file: memory, rights, a disk that does not answer (`UnknownError`).
_PASSING = (
    tf.errors.CancelledError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnauthenticatedError,
    tf.errors.UnknownError,
)
# The same in the text of an error, where TensorFlow's reader has no class for it.
_PASSING_TEXTS = tuple(
    os.strerror(number)
    for number in (errno.EIO, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE)
)
_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


class SavedValues:
    """The values of one checkpoint.

    Attributes:
        shapes: key → shape.
    """

    def __init__(self, prefix: str) -> None:
        """Read the index of a checkpoint; raises one of `UNREADABLE` if it cannot be read."""
        files.check_regular(prefix)
        self._prefix = prefix
        self._reader = tf.train.load_checkpoint(prefix)
        self.shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, tf.DType] = {}
        types = self._reader.get_variable_to_dtype_map()
        for name, shape in self._reader.get_variable_to_shape_map().items():
            key = keys.of_file(name)
            if key not in (None, keys.COUNTER):
                self.shapes[key], self._dtypes[key] = list(shape), tf.as_dtype(types[name])

    def read(self, key: str) -> np.ndarray[Any, Any]:
        """Return a value; raises one of `UNREADABLE` if it cannot be read."""
        value: np.ndarray[Any, Any] = self._reader.get_tensor(keys.in_file(key))
        return value

    def check_whole(self) -> None:
        """Read what each whole checkpoint has; raises one of `UNREADABLE` if it cannot be read."""
        self._reader.get_tensor(keys.OBJECT_GRAPH)

    def assign(self, pairs: Sequence[tuple[str, packing.Variable]]) -> None:
        """Assign saved values, each read by the process in which its variable is.

        Args:
            pairs: key of a saved value, and a variable of its shape and dtype.

        Raises one of `UNREADABLE` if a value cannot be read.
        """
        self.check_whole()
        by_device: dict[str, list[tuple[str, packing.Variable]]] = {}
        for key, variable in pairs:
            by_device.setdefault(variable.device, []).append((key, variable))

        restored: dict[str, list[tf.Tensor]] = {}
        for device, of_device in by_device.items():
            with tf.device(packing.host(device)):
                restored[device] = tf.raw_ops.RestoreV2(
                    prefix=self._prefix,
                    tensor_names=[keys.in_file(key) for key, _ in of_device],
                    shape_and_slices=[""] * len(of_device),
                    dtypes=[variable.dtype for _, variable in of_device],
                )
                # Waits for another process too, so that a damaged checkpoint changes nothing.
                tf.raw_ops.Rank(input=restored[device][0]).numpy()
        for device, of_device in by_device.items():
            targets = [variable for _, variable in of_device]
            packing.assign(zip(targets, restored[device], strict=True))

    def misfit(
        self, key: str, variable: packing.Variable, saved_key: str | None = None
    ) -> str | None:
        """Return how a saved shape or dtype differs from that of a variable; None if it does not.

        Args:
            key: key of the variable.
            variable: compared with the saved value.
            saved_key: key of the value; None: `key`.
        """
        saved_key = saved_key or key
        here = f"{variable.dtype.name}{variable.shape.as_list()}"
        there = f"{self._dtypes[saved_key].name}{self.shapes[saved_key]}"
        return None if here == there else f"{key} is {there} there, {here} here"


def trained_values(path: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return path in the network → value that evaluation uses: of weights and statistics.

    Where the run keeps averages, they replace what they are averages of.

    Args:
        path: a checkpoint, or a folder of them (`RUN/best`, `RUN/checkpoints`), of which the newest
            is read.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    prefix = files.at(path)
    start = keys.variable("")
    try:
        saved = SavedValues(prefix)
        of_path = {key.removeprefix(start): key for key in saved.shapes if key.startswith(start)}
        averages = {path: keys.average(path) for path in of_path}
        return {
            path: saved.read(averages[path] if averages[path] in saved.shapes else key)
            for path, key in of_path.items()
        }
    except UNREADABLE as error:
        check_damaged(prefix, error)
        raise errors.CheckpointError(
            f"{prefix} is torn and cannot be read: {reason(error)}"
        ) from error


def write_values(
    directory: str, step: int, values: dict[str, np.ndarray[Any, Any]], params_text: str
) -> str:
    """Write a checkpoint of values that no variable holds; return the prefix of its files.

    Args:
        directory: directory of checkpoints; created if it is missing.
        step: its number.
        values: by key; they are removed. Until all are written, memory holds them twice.
        params_text: stored with it.

    Raises:
        CheckpointError: it cannot be written.
    """
    snapshots = {}
    for key, value in values.items():
        snapshots[key] = writing.Snapshot(tf.as_dtype(value.dtype), _HOST)
        snapshots[key].value = functools.partial(_taken, values, key)
    prefix = os.path.join(directory, f"{files.NAME}-{step}")
    try:
        files.open_directory(directory)
        files.begin(prefix, params_text)
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**snapshots), directory, max_to_keep=1, checkpoint_name=files.NAME
        )
        options = tf.train.CheckpointOptions(
            experimental_write_callbacks=[lambda path: files.finish(path)]
        )
        manager.save(checkpoint_number=step, options=options)
    except (OSError, tf.errors.OpError) as error:
        raise errors.CheckpointError(
            f"{prefix}: checkpoint cannot be written ({reason(error)}). Free disk space "
            f"({files.free_space(os.path.dirname(directory))} free)"
        ) from error
    return prefix


def _taken(values: dict[str, np.ndarray[Any, Any]], key: str) -> tf.Tensor:
    with tf.device(_HOST):
        return tf.convert_to_tensor(values.pop(key))


def read_value(prefix: str, key: str) -> np.ndarray[Any, Any]:
    """Return one saved value, without restoring anything.

    Raises:
        CheckpointError: the checkpoint does not have `key`, or is torn.
    """
    try:
        values = SavedValues(prefix)
        if key in values.shapes:
            return values.read(key)
    except UNREADABLE as error:
        check_damaged(prefix, error)
        raise errors.CheckpointError(f"{prefix} is torn: {reason(error)}") from error
    near = errors.nearest(key, values.shapes) or sorted(values.shapes)[:3]
    raise errors.CheckpointError(f"{prefix} has no {key!r}; nearest {', '.join(near)}")


def check_damaged(prefix: str, error: Exception) -> None:
    """Check that an error of reading a checkpoint says that its files are damaged or missing.

    Args:
        prefix: prefix of its files.
        error: one of `UNREADABLE`.

    Raises:
        CheckpointError: it says something else, such as that memory is used up.
    """
    if isinstance(error, files.UnreadableNowError):
        raise error
    if isinstance(error, OSError):
        passes = not files.is_damage(error)
    else:
        passes = isinstance(error, _PASSING) or any(t in str(error) for t in _PASSING_TEXTS)
    if passes:
        raise files.unreadable_now(prefix, reason(error)) from error


def reason(error: BaseException) -> str:
    """Return the first line of the message of a file error or a TensorFlow error."""
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    return str(text).strip().splitlines()[0].rstrip(".") if str(text).strip() else repr(error)
