"""A run that starts from another run's checkpoint: what it restores and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, optim, pipelining, task
from lingvo_gpipe.input import InMemory
from lingvo_gpipe.run import checkpoints, loop

HEAD = ("head/bias", "head/kernel")
SIDE = ("side/bias", "side/kernel")
BODY = (
    "conv/kernel",
    "norm/beta",
    "norm/gamma",
    "norm/moving_mean",
    "norm/moving_variance",
)


class Squares(InMemory):
    """Random images of any size in any number of classes."""

    class Params(InMemory.Params):
        """Params of Squares."""

        size: int = hyperparams.field(6, "Height and width.")
        classes: int = hyperparams.field(3, "Labels below it.")

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        side = self.params.size
        return {"image": tf.TensorSpec([side, side, 2]), "label": tf.TensorSpec([], tf.int32)}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        random = np.random.RandomState(2)
        side = self.params.size
        images = random.normal(size=(12, side, side, 2)).astype(np.float32)
        labels = random.randint(0, self.params.classes, 12).astype(np.int32)
        return {split: {"image": images, "label": labels} for split in ("train", "test")}


def squares_task(
    size: int = 6, classes: int = 3, steps: int = 0, more: tuple[Any, ...] = (), **model: Any
) -> Any:
    """Return a network whose head side/* depends on the image size, like an auxiliary head."""
    flat = [
        layers.Conv2D.Params(name="conv", filters=4, use_bias=False, reads=("image",)),
        layers.BatchNorm.Params(name="norm", momentum=0.5),
        layers.Flatten.Params(name="flat", writes=("flat",)),
        layers.Softmax.Params(
            name="side",
            classes=3,
            reads=("flat", "label"),
            writes=("side",),
            loss_name="side",
            metric_prefix="side/",
        ),
        layers.GlobalPool2D.Params(name="pool"),
        layers.Softmax.Params(name="head", classes=classes),
        *more,
    ]
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=flat, outputs=("x", "side"), **model),
        input=Squares.Params(batch_size=4, size=size),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1), max_steps=steps
        ),
    )


def values(result: loop.Result, kind: str = "variables") -> dict[str, Any]:
    paths = (*BODY, *HEAD, *SIDE)
    return {path: checkpoints.read_value(result.checkpoint, f"{kind}/{path}") for path in paths}


def same(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {path for path, value in one.items() if np.array_equal(value, other[path])}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> loop.Result:
    """Return a run of three updates in two cells, with averages."""
    params = squares_task(steps=3, num_partitions=2, num_micro_batches=2)
    params.train.average = optim.Average.Params(decay=0.9)
    return loop.run(params, tmp_path_factory.mktemp("source"))


def begin(params: Any, folder: Path, source: loop.Result) -> tuple[Any, list[str]]:
    lines: list[str] = []
    result = loop.run(params, folder, start=source.checkpoint, report=lines.append)
    return result, lines[: next(n for n, line in enumerate(lines) if line.startswith("to see"))]


def test_averages_become_weights(source: loop.Result, tmp_path: Path) -> None:
    params = squares_task(num_partitions=3)
    result, lines = begin(params, tmp_path, source)
    assert lines == [f"started from {source.checkpoint}: 9 variables restored"]
    found = values(result)
    paths = {*BODY, *HEAD, *SIDE}
    assert same(found, values(source, "average")) == paths
    assert not same(found, values(source, "variables"))


def test_weights_of_a_run_without_averages_are_taken_as_they_are(
    source: loop.Result, tmp_path: Path
) -> None:
    plain = loop.run(squares_task(steps=2), tmp_path / "plain")
    result, _ = begin(squares_task(), tmp_path / "begun", plain)
    assert same(values(result), values(plain)) == {*BODY, *HEAD, *SIDE}
    assert source.step == 3


def test_what_begins_again_is_missing_or_does_not_fit_is_listed(
    source: loop.Result, tmp_path: Path
) -> None:
    more = (layers.Dense.Params(name="more", units=2),)
    params = squares_task(size=9, classes=7, more=more, num_partitions=2)
    params.train.start.without = ("norm/[bg]*", "head/bias")
    result, lines = begin(params, tmp_path, source)
    fresh = values(loop.run(squares_task(size=9, classes=7, more=more), tmp_path / "fresh"))
    assert lines == [
        f"started from {source.checkpoint}: 4 variables restored",
        "    initialised by train.start.without: norm/gamma",
        "    initialised by train.start.without: norm/beta",
        "    initialised by train.start.without: head/bias",
        "    missing in it: more/kernel",
        "    missing in it: more/bias",
        "    does not fit: side/kernel is float32[144, 3] there, float32[324, 3] here",
        "    does not fit: head/kernel is float32[4, 3] there, float32[4, 7] here",
    ]
    found = values(result)
    kept = {"conv/kernel", "norm/moving_mean", "norm/moving_variance", "side/bias"}
    assert same(found, values(source, "average")) == kept
    assert same(found, fresh) >= {"norm/gamma", "norm/beta", *HEAD, "side/kernel"}


@pytest.mark.parametrize(("pattern", "near"), [("heads/*", "'head'"), ("nrom/beta", "'norm/beta'")])
def test_a_pattern_that_fits_nothing_is_refused(
    source: loop.Result, tmp_path: Path, pattern: str, near: str
) -> None:
    params = squares_task()
    params.train.start.without = ("side/*", pattern)
    with pytest.raises(errors.ParamsError) as caught:
        begin(params, tmp_path, source)
    text = str(caught.value)
    assert text.startswith(
        f"train.start.without names '{pattern}', which matches no variable; near"
    )
    assert near in text


def test_a_start_that_takes_nothing_is_refused(source: loop.Result, tmp_path: Path) -> None:
    params = squares_task()
    params.train.start.without = ("*",)
    with pytest.raises(errors.CheckpointError, match=r"besides those of train\.start\.without"):
        begin(params, tmp_path, source)


def test_fine_tuning_leaves_frozen_layers_and_moves_groups_by_their_rates(
    source: loop.Result, tmp_path: Path
) -> None:
    def tuned(name: str, *groups: tuple[str, float]) -> dict[str, Any]:
        params = squares_task(
            steps=1, num_partitions=2, num_micro_batches=2, frozen=("conv/*", "norm/*")
        )
        params.train.start.without = ("head/*",)
        params.train.optimizer.groups = groups
        return values(begin(params, tmp_path / name, source)[0])

    begun = squares_task()
    begun.train.start.without = ("head/*",)
    first = values(begin(begun, tmp_path / "first", source)[0])
    one, ten = tuned("one"), tuned("ten", ("head/*", 10.0))
    # A frozen batch norm keeps its statistics too.
    assert same(first, one) == same(first, ten) == set(BODY)
    for path in HEAD:
        moved = one[path] - first[path]
        np.testing.assert_allclose(ten[path] - first[path], 10 * moved, rtol=1e-4, atol=1e-6)
        assert np.abs(moved).max() > 1e-3
    assert same(one, ten) == {*BODY, *SIDE}
