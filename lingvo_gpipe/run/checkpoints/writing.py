"""Writing checkpoints while training goes on: what is written, by which thread, what it cost."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable
from tensorflow.python.eager import context, executor

_SAVED = "VARIABLE_VALUE"  # the last part of the key of a value in a checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is on the disk.

    Attributes:
        path: prefix of its files.
        step: its number.
        waited_s: seconds that training waited for it.
        written_s: seconds until it was complete, from the moment whose values it has.
        num_bytes: bytes of its files.
    """

    path: str
    step: int
    waited_s: float
    written_s: float
    num_bytes: int

    @property
    def metrics(self) -> dict[str, float]:
        """What it cost, by the names of TensorBoard's curves."""
        return {
            "checkpoint/waited_s": self.waited_s,
            "checkpoint/written_s": self.written_s,
            "checkpoint/mib": self.num_bytes / 2**20,
        }


def no_value() -> tf.Tensor:
    """Stand for a value that is not there.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a checkpoint is written without its values")


class Snapshot(tf.__internal__.tracking.Trackable):
    """What `tf.train.Checkpoint` saves in the place of a variable: its value at some moment."""

    def __init__(self, dtype: tf.DType, device: str) -> None:
        """Make one that has no value yet.

        Args:
            dtype: dtype of the variable.
            device: device of its value; the process of this device writes it.
        """
        self.value: Callable[[], tf.Tensor] = no_value
        self._dtype = dtype
        self._device = device

    def _serialize_to_tensors(self) -> dict[str, tensor_callable.Callable]:
        return {_SAVED: tensor_callable.Callable(self.value, self._dtype, self._device)}


class Checkpoint(tf.train.Checkpoint):
    """Writes what `tf.train.Checkpoint` does, and may do so beside any other thread.

    TensorFlow's own waits for the executors of all threads. Each `next` of a dataset has one that
    it then frees: waited for by another thread, it ends the process (segmentation fault).
    """

    def _write(self, file_prefix: str, options: tf.train.CheckpointOptions) -> str:
        """Write the files, then do as the options say; a `tf.train.CheckpointManager` calls it.

        Raises:
            tf.errors.OpError: they cannot be written.
        """
        self._saver.save(file_prefix=file_prefix, options=options).numpy()
        for callback in options.experimental_write_callbacks:
            callback(file_prefix)
        return file_prefix


class Writer:
    """Writes checkpoints one after the other, in a thread of its own or at once.

    A checkpoint may refer to those before it (the best one). So after one that failed nothing is
    written until its error has been raised.

    Attributes:
        in_background: whether it has a thread of its own.
    """

    def __init__(self, *, background: bool = False) -> None:
        """Start.

        Args:
            background: whether to write in a thread, while the caller goes on.
        """
        self.in_background = background
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if background else None
        # An executor of its own: in the thread's common one, operations of workers would wait for
        # each other, so that training would wait until all is written. It is one for all
        # checkpoints: one that is freed must not be waited for by other threads.
        self._executor = executor.new_executor(enable_async=False, enable_streaming_enqueue=False)
        self._begun: list[concurrent.futures.Future[Written]] = []
        self._has_failed = False

    def write(self, job: Callable[[], Written]) -> concurrent.futures.Future[Written]:
        """Do a job, in the background if this writer does so.

        Raises:
            Exception: that of the job, if it was done at once, or of an earlier one.
        """
        self._raise_error()
        if self._thread is not None:
            future = self._thread.submit(self._do, job)
        else:
            future = concurrent.futures.Future()
            future.set_result(job())
        self._begun.append(future)
        return future

    def finished(self) -> list[Written]:
        """Return the checkpoints that were completed since the last call.

        Raises:
            Exception: that of the first job that failed; those after it were not done.
        """
        self._raise_error()
        done = [future for future in self._begun if future.done()]
        self._begun = [future for future in self._begun if future not in done]
        return [future.result() for future in done]

    def wait(self) -> list[Written]:
        """Wait until all is written; return and raise what `finished` does."""
        concurrent.futures.wait(self._begun)
        return self.finished()

    def close(self) -> BaseException | None:
        """Wait until all is written; return an error that was not raised."""
        if self._thread is not None:
            self._thread.shutdown()
        return next(filter(None, (future.exception() for future in self._begun)), None)

    def _raise_error(self) -> None:
        if self._has_failed:
            concurrent.futures.wait(self._begun)
            failed = next(future for future in self._begun if future.exception())
            self._begun, self._has_failed = [], False
            failed.result()

    def _do(self, job: Callable[[], Written]) -> Written:
        if self._has_failed:
            raise RuntimeError("a checkpoint before it failed")
        try:
            with context.executor_scope(self._executor):
                return job()
        except Exception:
            self._has_failed = True
            raise
