"""When callbacks are called, what they may do, and that they change no number of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import callbacks, errors, hyperparams, optim
from lingvo_gpipe.run import checkpoints, log_directory, loop
from tests.support import saved
from tests.tiny_task import one_layer_task, stop_after, tiny_task

CALLS: list[tuple[str, int]] = []


class Recorded(callbacks.Callback):
    """Records its calls; stops and fails where its params say so."""

    class Params(callbacks.Callback.Params):
        """Params of Recorded."""

        fails_in: str = hyperparams.field("", "Method that fails.")
        fails_at: int = hyperparams.field(0, "First step at which it does.")
        stop_at: int = hyperparams.field(0, "Step after which it ends the run; 0: never.")

    params: Params

    def record(self, moment: str) -> None:
        CALLS.append((moment, self.model.step))
        self.fail(moment)

    def fail(self, moment: str) -> None:
        if self.params.fails_in == moment and self.model.step >= self.params.fails_at:
            raise ValueError("it is broken")

    def on_train_begin(self, *_: Any) -> None:
        self.record("train_begin")

    def on_epoch_begin(self, epoch: int, *_: Any) -> None:
        assert epoch == self.model.step // 2
        self.record("epoch_begin")

    def on_train_batch_begin(self, *_: Any, **__: Any) -> None:
        self.fail("batch_begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert batch == (self.model.step - 1) % 2
        assert logs["loss"] > 0
        self.record("batch_end")
        if self.model.step == self.params.stop_at:
            self.model.stop_training = True

    def on_test_end(self, logs: Any = None) -> None:
        assert 0 <= logs["accuracy"] <= 1
        self.record("test_end")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert epoch == (self.model.step - 1) // 2
        assert logs["loss"] > 0
        self.record("epoch_end")

    def on_train_end(self, *_: Any) -> None:
        self.record("train_end")


def recorded(**fields: Any) -> Any:
    """Return a task of 4 updates with a `Recorded` callback."""
    CALLS.clear()
    params = one_layer_task(max_steps=4, save_interval_steps=2, async_checkpoints=False)
    params.train.callbacks = (Recorded.Params(**fields),)
    return params


def test_a_callback_is_called_at_each_moment_of_a_run_and_of_a_resumed_one(tmp_path: Path) -> None:
    params = recorded()
    # Asked before each update, and before each of two mini-batches of an evaluation.
    cut = loop.run(params, tmp_path, evaluate=True, should_stop=stop_after(5))
    assert cut.ended == "signal"
    assert CALLS[:] == [
        *[("train_begin", 0), ("epoch_begin", 0), ("batch_end", 1), ("batch_end", 2)],
        *[("test_end", 2), ("epoch_end", 2), ("epoch_begin", 2), ("batch_end", 3)],
        ("train_end", 3),
    ]
    CALLS.clear()
    loop.run(params, tmp_path, evaluate=True)
    assert CALLS[:] == [
        *[("train_begin", 3), ("epoch_begin", 3), ("batch_end", 4), ("test_end", 4)],
        *[("epoch_end", 4), ("train_end", 4)],
    ]


def test_without_evaluations_an_epoch_lies_between_two_checkpoints(tmp_path: Path) -> None:
    loop.run(recorded(), tmp_path)
    assert [step for moment, step in CALLS if moment == "epoch_end"] == [2, 4]
    assert "test_end" not in dict(CALLS)


class Numbered(callbacks.Callback):
    """Records the numbers of epochs and updates."""

    def on_epoch_begin(self, epoch: int, *_: Any) -> None:
        CALLS.append(("epoch_begin", epoch))

    def on_train_batch_begin(self, batch: int, *_: Any, **__: Any) -> None:
        CALLS.append(("batch_begin", batch))

    def on_train_batch_end(self, batch: int, *_: Any, **__: Any) -> None:
        CALLS.append(("batch_end", batch))

    def on_epoch_end(self, epoch: int, *_: Any, **__: Any) -> None:
        CALLS.append(("epoch_end", epoch))


def test_an_update_that_is_skipped_begins_no_epoch_again(tmp_path: Path) -> None:
    CALLS.clear()
    params = tiny_task(max_steps=2, loss_scale=optim.LossScale.Params(initial=2.0**40))
    params.model.dtype = "mixed_float16"
    params.train.set(callbacks=(Numbered.Params(),), save_interval_steps=2)
    result = loop.run(params, tmp_path)
    skipped = int(checkpoints.read_value(result.checkpoint, "loss_scale/skipped"))
    assert skipped > 1
    update = [[("batch_begin", batch), ("batch_end", batch)] for batch in (0, 1)]
    assert CALLS[:] == [
        ("epoch_begin", 0),
        *update[0] * (skipped + 1),
        *update[1],
        ("epoch_end", 0),
    ]


class Meddling(callbacks.Callback):
    """Does all that a callback can: draws, seeds, and changes what it receives."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tf.random.set_seed(batch)
        keras.utils.set_random_seed(batch)
        np.random.rand()
        tf.random.normal([2])
        logs.clear()


def test_no_callback_changes_a_number(tmp_path: Path) -> None:
    params = tiny_task(max_steps=5, save_interval_steps=2)
    plain = loop.run(params, tmp_path / "plain", evaluate=True)
    params.train.callbacks = (Meddling.Params(), callbacks.CSVLogger.Params())
    called = loop.run(params, tmp_path / "called", evaluate=True)
    assert called.metrics == plain.metrics
    saved.check_same(plain.checkpoint, called.checkpoint)


def test_a_callback_may_end_a_run(tmp_path: Path) -> None:
    result = loop.run(recorded(stop_at=3), tmp_path, evaluate=True)
    assert (result.step, result.ended) == (3, "callback")
    assert result.metrics  # it is evaluated as at a last step
    assert json.loads((tmp_path / "result.json").read_text())["ended"] == "callback"
    assert CALLS[-3:] == [("test_end", 3), ("epoch_end", 3), ("train_end", 3)]


@pytest.mark.parametrize(
    ("moment", "step", "restored"),
    [
        ("train_begin", 0, 0),
        ("batch_begin", 3, 3),
        ("batch_end", 3, 3),
        ("test_end", 2, 2),
        ("epoch_end", 2, 2),
        ("train_end", 4, 4),
    ],
)
def test_a_callback_that_fails_ends_the_run_and_no_update_is_lost(
    tmp_path: Path, moment: str, step: int, restored: int
) -> None:
    with pytest.raises(ValueError, match="it is broken"):
        loop.run(recorded(fails_in=moment, fails_at=step), tmp_path, evaluate=True)
    whole = checkpoints.find(str(tmp_path / log_directory.CHECKPOINTS))
    assert [checkpoints.step_of(path) for path in whole][-1:] == ([restored] if restored else [])
    assert loop.run(recorded(), tmp_path, evaluate=True).step == 4


def test_callbacks_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    params = recorded()
    loop.run(params, tmp_path)
    params.train.callbacks = ()
    params.train.max_steps = 5
    assert loop.run(params, tmp_path).step == 5


def test_metrics_of_epochs_are_a_table_that_a_resumed_run_continues(tmp_path: Path) -> None:
    params = recorded()
    params.train.set(max_steps=2, callbacks=(callbacks.CSVLogger.Params(file="x.csv"),))
    loop.run(params, tmp_path, evaluate=True)
    params.train.max_steps = 4
    result = loop.run(params, tmp_path, evaluate=True)
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[1]["val_accuracy"]) == pytest.approx(result.metrics["accuracy"])
    params.train.callbacks = (callbacks.CSVLogger.Params(file="../x.csv"),)
    with pytest.raises(errors.ParamsError, match=r"file='\.\./x\.csv' is not the name of a file"):
        loop.run(params, tmp_path)


# --- callbacks of others --------------------------------------------------------------------------


def test_callbacks_of_keras_run_as_they_are(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=100, save_interval_steps=2)
    params.train.optimizer.learning_rate = 0.0
    history = keras.callbacks.History()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2)
    result = loop.run(params, tmp_path, evaluate=True, callbacks=[history, stopping])
    assert (result.step, result.ended) == (6, "callback")
    assert history.epoch == [0, 1, 2]
    assert history.history["val_loss"] == [pytest.approx(result.metrics["loss"])] * 3


def test_a_callback_that_sets_the_learning_rate_is_refused(tmp_path: Path) -> None:
    scheduler = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
    with pytest.raises(errors.ParamsError, match=r"to 0\.01, but that of a run is a function"):
        loop.run(one_layer_task(max_steps=1), tmp_path, callbacks=[scheduler])


def test_a_run_has_what_trackers_read_of_a_model(tmp_path: Path) -> None:
    """As `mlflow.keras.MlflowCallback` and `wandb.integration.keras.WandbMetricsLogger` read it."""
    found: dict[str, Any] = {}

    class Tracker(keras.callbacks.Callback):
        def on_train_begin(self, *_: Any) -> None:
            found["config"] = self.model.optimizer.get_config()
            lines: list[str] = []
            self.model.summary(print_fn=lines.append)
            found["summary"] = "\n".join(lines)

        def on_epoch_end(self, *_: Any) -> None:
            found["rate"] = float(self.model.optimizer.learning_rate.numpy().item())

    loop.run(one_layer_task(max_steps=1), tmp_path, callbacks=[Tracker()])
    assert found["config"]["learning_rate"] == "0.02"
    assert "head" in found["summary"]
    assert found["rate"] == 0.02
