"""Callbacks of a run: Keras' own class, with Params so that recipes and command lines name them.

    class StopAt(callbacks.Callback):
        class Params(callbacks.Callback.Params):
            accuracy: float = hyperparams.field(0.9, "Accuracy that is enough.")

        def on_test_end(self, logs=None):
            self.model.stop_training = logs["accuracy"] >= self.params.accuracy

    train = task.Train(callbacks=(StopAt.Params(),), ...)

Any `keras.callbacks.Callback` goes to `run.loop.run(params, logdir, callbacks=[...])`. What a
callback receives are numbers, so it cannot change a result. When each method is called is decided
by `lingvo_gpipe.run.loop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, optim

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task


class Callback(hyperparams.Configurable, keras.callbacks.Callback):
    """A Keras callback that is made from Params.

    Attributes:
        model: the run, a `RunModel`.
    """

    class Params(hyperparams.Configurable.Params):
        """Params of Callback."""

        def make(self, logdir: Path) -> keras.callbacks.Callback:
            """Return the callback of a run.

            Args:
                logdir: log directory of the run.
            """
            del logdir
            return self.instantiate()

    params: Any

    def __init__(self, params: Callback.Params) -> None:
        keras.callbacks.Callback.__init__(self)
        hyperparams.Configurable.__init__(self, params)

    def set_params(self, params: object) -> None:
        """Ignore what Keras calls params, numbers of epochs and steps; `params` are its own."""


class CSVLogger(Callback):
    """Writes a row per epoch by `keras.callbacks.CSVLogger`; a resumed run appends to the file."""

    class Params(Callback.Params):
        """Params of CSVLogger."""

        file: str = hyperparams.field("metrics.csv", "Name of the file in the log directory.")

        def make(self, logdir: Path) -> keras.callbacks.Callback:
            """See `Callback.Params.make`.

            Raises:
                ParamsError: it is not the name of a file.
            """
            if PurePath(self.file).name != self.file or self.file in ("", ".", ".."):
                raise errors.ParamsError(
                    f"CSVLogger: file={self.file!r} is not the name of a file in the log directory"
                )
            return keras.callbacks.CSVLogger(str(logdir / self.file), append=True)


@dataclasses.dataclass  # without slots: callbacks set attributes of their model
class RunModel:
    """A run as the `model` of its callbacks, with what those of Keras, MLflow and W&B read of it.

    Attributes:
        params: params of the run, frozen.
        logdir: log directory of the run.
        report: prints a line for the user.
        optimizer: settings and the present rate of the optimizer.
        summary_lines: returns the description of the model.
        stop_training: a callback sets it to end the run after this update; the run then evaluates
            and saves as at its last step.
    """

    params: Task.Params
    logdir: Path
    report: Callable[[str], None]
    optimizer: RunOptimizer
    summary_lines: Callable[[], Iterable[str]]
    stop_training: bool = False

    @property
    def step(self) -> int:
        """Number of updates done."""
        return int(self.optimizer.step.numpy())

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.params.name

    def summary(self, print_fn: Callable[[str], object] = print, **_: object) -> None:
        """Print the description of the model, as `keras.Model.summary` does."""
        for line in self.summary_lines():
            print_fn(line)


@dataclasses.dataclass(slots=True)
class RunOptimizer:
    """The optimizer of a run as callbacks read it.

    Attributes:
        optimizer: of the run.
        step: number of updates, a variable.
    """

    optimizer: optim.Optimizer
    step: tf.Variable

    @property
    def learning_rate(self) -> tf.Tensor:
        """Rate of the next update, a scalar."""
        return self.optimizer.rate(self.step.read_value())

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        raise errors.ParamsError(
            f"a callback sets the learning rate to {value:.6g}, but that of a run is a function of "
            "its step, so that it goes on where it was stopped. Set train.optimizer.learning_rate"
        )

    def get_config(self) -> dict[str, str]:
        """Return path → value as text of its settings."""
        return {path: str(value) for path, value, _ in self.optimizer.params.iter_paths()}
