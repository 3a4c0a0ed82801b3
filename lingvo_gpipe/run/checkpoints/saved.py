"""What a checkpoint holds: values by key, read without variables or assigned to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.cluster import chief
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.run.checkpoints import files, keys
from lingvo_gpipe.run.checkpoints.keys import Part

Array = np.ndarray[Any, Any]
# What TensorFlow raises for files that are cut off, changed or missing.
_DAMAGE = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)


class SavedValues:
    """The values of one checkpoint.

    Attributes:
        shapes: key → shape.
    """

    def __init__(self, prefix: str) -> None:
        """Read the index of a checkpoint.

        Raises:
            DamagedError: a file is damaged or missing.
            UnreadableError: a file cannot be read now.
        """
        files.check_readable(prefix)
        self._prefix = prefix
        try:
            reader = tf.train.load_checkpoint(prefix)
            self.shapes = {k: tuple(s) for k, s in reader.get_variable_to_shape_map().items()}
            types = reader.get_variable_to_dtype_map()
        except (tf.errors.OpError, RuntimeError, ValueError) as error:  # it can be opened
            raise files.DamagedError(prefix, reason(error)) from error
        self._dtypes = {key: tf.as_dtype(dtype) for key, dtype in types.items()}

    def read(self, key: str) -> Array:
        """Return a value.

        Raises:
            CheckpointError: there is none of this key, or it cannot be read.
        """
        if key not in self.shapes:
            near = errors.suggestion(key, self.shapes)
            raise errors.CheckpointError(f"{self._prefix} has no {key!r}; {near}")
        with self._reading(), tf.device("CPU:0"):
            (value,) = self._restored([Part(key, self.shapes[key])], [self._dtypes[key]])
            array: Array = value.numpy()
            return array

    def assign(self, pairs: Sequence[tuple[Part, packing.Variable]]) -> None:
        """Assign saved values, each read by the process in which its variable is; all or none.

        Args:
            pairs: part of a saved value, and a variable of its shape and dtype.

        Raises:
            CheckpointError: a value cannot be read.
        """
        by_device: dict[str, list[tuple[Part, packing.Variable]]] = {}
        for part, variable in pairs:
            by_device.setdefault(packing.host(variable.device), []).append((part, variable))

        def restored() -> list[list[tf.Tensor]]:
            values = []
            for device, of_device in by_device.items():
                with tf.device(device):
                    dtypes = [variable.dtype for _, variable in of_device]
                    values.append(self._restored([part for part, _ in of_device], dtypes))
            return values

        with self._reading():
            # One function: if a file is damaged, nothing is assigned in any process.
            values = outer_function.OuterFunction(restored)()
        for of_device, new in zip(by_device.values(), values, strict=True):
            packing.assign(zip([variable for _, variable in of_device], new, strict=True))

    def misfit(self, name: str, part: Part, variable: packing.Variable) -> str | None:
        """Return how a saved shape or dtype differs from that of a variable; None: not at all."""
        here = f"{variable.dtype.name}{list(part.shape)}"
        there = f"{self._dtypes[part.key].name}{list(self.shapes[part.key])}"
        return None if here == there else f"{name} is {there} there, {here} here"

    def _restored(self, parts: Sequence[Part], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        tensors: list[tf.Tensor] = tf.raw_ops.RestoreV2(
            prefix=self._prefix,
            tensor_names=[part.key for part in parts],
            shape_and_slices=[part.spec for part in parts],
            dtypes=list(dtypes),
        )
        return tensors

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Tell damaged files from those that cannot be read now, and from a lost worker."""
        try:
            yield
        except chief.LOST_ERRORS:
            raise
        except _DAMAGE as error:
            raise files.DamagedError(self._prefix, reason(error)) from error
        except tf.errors.OpError as error:
            raise files.UnreadableError(self._prefix, reason(error)) from error


def read_value(prefix: str, key: str) -> Array:
    """Return one saved value.

    Raises:
        CheckpointError: the checkpoint does not have `key`, or cannot be read.
    """
    return SavedValues(prefix).read(key)


def trained_values(path: str) -> dict[str, Array]:
    """Return path in the network → value that evaluation uses: of weights and statistics.

    Where the run keeps averages, they replace what they are averages of. Slices are joined.

    Args:
        path: a checkpoint, or a folder of them (`RUN/best`, `RUN/checkpoints`), of which the newest
            is read.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    saved = SavedValues(files.at(path))
    start = keys.variable("")
    values = {}
    for key in saved.shapes:
        if key.startswith(start):
            path = key.removeprefix(start)
            average = keys.average(path)
            values[path] = saved.read(average if average in saved.shapes else key)
    return values


def reason(error: BaseException) -> str:
    """Return the first line of the message of a file error or a TensorFlow error."""
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    line = errors.without_graph_names(str(text)).strip().splitlines()[:1]
    return line[0].rstrip(".") if line else repr(error)
