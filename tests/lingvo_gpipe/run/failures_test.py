"""What remains of a run if its evaluation, its loss or its machine fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, optim
from lingvo_gpipe.input import Reading
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.run import (
    checkpoints,
    evaluation,
    log_directory,
    loop,
    process,
)
from tests.tiny_task import BrokenPoints, Points, one_layer_task, tiny_task


def saved(folder: Path) -> list[int]:
    return [
        checkpoints.step_of(path)
        for path in checkpoints.find(str(folder / log_directory.CHECKPOINTS))
    ]


def content(result: loop.Result) -> dict[str, Any]:
    """Return what the run's last checkpoint holds, by key."""
    keys = tf.train.load_checkpoint(result.checkpoint).get_variable_to_shape_map()
    paths = [key for key in keys if key.startswith(("variables", "average"))]
    paths += ["best/value", "best/misses", "eval/step", "step"]
    return {path: checkpoints.read_value(result.checkpoint, path) for path in paths}


@pytest.mark.parametrize("mark", "*?[\\")
def test_a_folder_that_would_be_a_pattern_is_refused_before_it_is_made(
    tmp_path: Path, mark: str
) -> None:
    folder = tmp_path / f"lr{mark}0.1]"
    for evaluate in (True, False):
        with pytest.raises(errors.CheckpointError) as caught:
            loop.run(tiny_task(), folder, evaluate=evaluate)
        assert str(caught.value) == (
            f"{folder}: TensorFlow takes {mark} in a path of checkpoints for a pattern, and cannot "
            "restore them. Use a path without * ? [ and \\"
        )
    with pytest.raises(errors.CheckpointError, match="in a path of checkpoints for a pattern"):
        checkpoints.restore(str(folder / "ckpt-3"), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_fails_costs_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = one_layer_task(
        max_steps=6, save_interval_steps=6, average=optim.Average.Params(decay=0.9)
    )
    params.eval.set(best="accuracy", interval_steps=2)
    whole = loop.run(params, tmp_path / "whole", evaluate=True)
    real = evaluation.evaluate

    def scarce(*given: Any, step: int, **named: Any) -> Any:
        if step == 4:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        return real(*given, step=step, **named)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "evaluate", scarce)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            loop.run(params, tmp_path / "parts", evaluate=True)
    assert saved(tmp_path / "parts") == [4]
    lines: list[str] = []
    parts = loop.run(params, tmp_path / "parts", evaluate=True, report=lines.append)
    assert [line.split()[1] for line in lines if line.startswith("eval ")] == ["step=4", "step=6"]
    np.testing.assert_equal(content(parts), content(whole))


class Scarce(Points):
    """Points of which only some mini-batches of training can be read."""

    class Params(Points.Params):
        """Params of Scarce."""

        count: int = hyperparams.field(5, "Number of these mini-batches.")
        fault: str = hyperparams.field("", "Why there are no more; empty: they end.")

    params: Params

    def batches(self, seed: int, position: int = 0) -> Any:
        whole, params = super().batches(seed, position), self.params

        class Some(Reading):
            def __iter__(self) -> Iterator[Any]:
                yield from itertools.islice(whole, params.count - position)
                if params.fault:
                    raise errors.InputError(params.fault)

        return Some()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            "",
            "the training data ended after 5 mini-batches. Input.batches must be endless: let it "
            "begin again at the end of the data",
        ),
        ("the disk is gone", "the disk is gone"),
    ],
)
def test_training_data_that_ends_costs_no_update(tmp_path: Path, fault: str, text: str) -> None:
    params = one_layer_task(accumulate=2)
    params.input = Scarce.Params(batch_size=8, fault=fault)
    for _ in range(2):  # again from the checkpoint
        with pytest.raises(errors.InputError) as caught:
            loop.run(params, tmp_path / "run")
        assert str(caught.value) == text
        assert saved(tmp_path / "run") == [2]
    params.input.count = 0
    with pytest.raises(errors.InputError, match=text.replace("5", "0")):
        loop.run(params, tmp_path / "new")
    assert saved(tmp_path / "new") == []


class Generated(Points):
    """Returns a generator."""

    def batches(self, seed: int, position: int = 0) -> Any:
        return (batch for batch in super().batches(seed, position))


def test_batches_by_a_generator_name_what_takes_one(tmp_path: Path) -> None:
    params = tiny_task(max_steps=2)
    params.input = Generated.Params(batch_size=8)
    with pytest.raises(
        errors.InputError, match=r"Generated\.batches returns a generator, expected"
    ):
        loop.run(params, tmp_path)


class Shares(base.Layer):
    """Returns x, and as a metric a vector without names, as some of Keras' metrics are."""

    class Params(base.Layer.Params):
        """Params of Shares."""

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(inputs[0], metrics=(base.MetricSpec("shares", tf.identity),))

    params: Params

    def fprop(self, theta: Any, inputs: Any, ctx: base.Context) -> Nest:
        del theta
        ctx.add_sum("shares", tf.reduce_sum(inputs, 0))
        return inputs


def test_a_best_that_is_not_a_number_is_refused_by_the_first_evaluation(tmp_path: Path) -> None:
    params = tiny_task(max_steps=6, save_interval_steps=6)
    params.model.layers = [
        *params.model.layers[:-1],
        Shares.Params(name="shares"),
        params.model.layers[-1],
    ]
    params.eval.set(best="shares", interval_steps=2)
    text = r"eval.best names 'shares', which is not a single number, .* one of accuracy, loss"
    with pytest.raises(errors.ParamsError, match=text):
        loop.run(params, tmp_path, evaluate=True)
    assert saved(tmp_path) == [2]


def test_a_mark_that_was_set_after_the_last_checkpoint_stays(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=4)
    # The first loss is the highest.
    params.eval.set(best="loss", best_is="highest", interval_steps=3)
    loop.run(params, tmp_path)
    told = loop.run(params, tmp_path, evaluate=True).metrics["loss"]
    params.train.max_steps = 5
    lines: list[str] = []
    last = loop.run(params, tmp_path, evaluate=True, report=lines.append)
    assert [line.split()[1] for line in lines if line.startswith("eval ")] == ["step=5"]
    assert last.metrics["loss"] < told
    found = content(last)
    assert (found["best/value"], found["best/misses"]) == (pytest.approx(told), 1)
    assert [path.name for path in (tmp_path / "best").glob("*.index")] == ["ckpt-4.index"]


def test_a_mark_of_another_metric_is_not_taken(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=4)
    params.eval.set(best="accuracy", interval_steps=3)
    loop.run(params, tmp_path)
    loop.run(params, tmp_path, evaluate=True)
    params.train.max_steps = 5
    params.eval.best = "loss"
    last = loop.run(params, tmp_path, evaluate=True)
    assert content(last)["best/value"] == pytest.approx(last.metrics["loss"])


def test_a_network_of_which_all_is_frozen_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    params = tiny_task(max_steps=1)
    loop.run(params, tmp_path)
    params.model.frozen = ("*",)
    with pytest.raises(errors.ParamsError, match="there is nothing to train"):
        loop.run(params, tmp_path / "frozen")
    assert evaluation.run(params, tmp_path) is not None


@pytest.mark.parametrize("train", [{}, {"finite_guard": False}, {"accumulate": 2}])
def test_a_value_of_the_data_that_is_not_finite_is_named_by_field_and_row(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    params = tiny_task(**train)
    params.input = BrokenPoints.Params(batch_size=8, place=3)
    with pytest.raises(errors.InputError) as caught:
        loop.run(params, tmp_path)
    step = 3 // params.train.accumulate
    assert str(caught.value) == (
        f"the update of step {step} is not finite, because mini-batch 3 is not: its field 'point' "
        f"holds a NaN or an infinity in row 5; there is no checkpoint yet. Correct the data"
    )


def test_a_loss_scale_of_one_is_tried_before_a_run_gives_up(tmp_path: Path) -> None:
    params = tiny_task(max_steps=2, loss_scale=optim.LossScale.Params(initial=2.0))
    params.input = BrokenPoints.Params(batch_size=8)
    result = loop.run(params, tmp_path)
    assert result.step == 2
    assert checkpoints.read_value(result.checkpoint, "loss_scale/skipped") == 1
    assert checkpoints.read_value(result.checkpoint, "loss_scale/scale") == 1.0
    params.train.loss_scale.initial = 1.0
    with pytest.raises(errors.InputError, match="the update of step 0 is not finite"):
        loop.run(params, tmp_path / "other")


def test_a_torn_checkpoint_and_a_start_that_is_not_read_are_reported(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=2, save_interval_steps=1)
    newest = loop.run(params, tmp_path).checkpoint
    Path(f"{newest}.index").write_bytes(b"garbage" * 99)
    lines: list[str] = []
    assert loop.run(params, tmp_path, start="/of/another/run", report=lines.append).step == 2
    assert lines[0].startswith(f"{newest} is torn and set aside: ")
    assert lines[1:3] == [
        "restored step=1",
        "/of/another/run is not read: the run goes on from its own checkpoint",
    ]


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\x00" * 9)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [garble, empty])
def test_damaged_texts_of_a_run_are_set_aside_or_reported(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    params = one_layer_task(max_steps=2, save_interval_steps=1)
    params.eval.set(best="accuracy", interval_steps=1)
    whole = loop.run(params, tmp_path, evaluate=True)
    text = Path(f"{whole.checkpoint}.params.txt")
    (best,) = (tmp_path / "best").glob("*.params.txt")
    damage(text)
    damage(best)
    assert evaluation.run(params, tmp_path) is not None
    lines: list[str] = []
    again = loop.run(params, tmp_path, evaluate=True, report=lines.append)
    assert lines[0].startswith(f"{whole.checkpoint} is torn and set aside: {text}")
    assert lines[1] == "restored step=1"
    assert lines[2].startswith(f"{tmp_path}/best/ckpt-1 is torn and cannot be restored: {best}")
    assert (again.step, again.metrics) == (2, whole.metrics)
    for path in (tmp_path / "checkpoints").glob("*.params.txt"):
        damage(path)
    with pytest.raises(errors.TrainingError) as caught:
        loop.run(params, tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(text))
    assert str(caught.value).endswith(f"--checkpoint={again.checkpoint} starts from these weights")


def test_more_devices_than_tensorflow_began_with_are_refused() -> None:
    model = tiny_task().model.set(num_partitions=99)
    with pytest.raises(errors.DeviceError, match=r"^99 logical CPU devices are needed, but Ten"):
        process.prepare_devices(model)
