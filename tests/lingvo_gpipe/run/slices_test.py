"""A run goes on with other slices as if they had never been others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors, optim
from lingvo_gpipe.run import checkpoints, evaluation, learner, loop, run_state
from tests.sliced_task import THREE, UNEQUAL, WHOLE, in_slices, task_of
from tests.support.saved import check_same, newest, values


def trained(folder: Path, params: Any, steps: int, **options: Any) -> list[str]:
    """Train to a step; return the lines for the user."""
    params = params.copy()
    params.train.max_steps = steps
    lines: list[str] = []
    loop.run(params, folder, report=lines.append, **options)
    return lines


def optimizer(name: str, **config: Any) -> Any:
    return optim.Optimizer.Params(name=name, config=config, learning_rate=0.02)


ADAM = {"average": optim.Average.Params(decay=0.9), "clip_norm": 0.5, "accumulate": 2}


@pytest.mark.parametrize(
    ("train", "tie", "path"),
    [
        (ADAM, True, (UNEQUAL,)),
        pytest.param(ADAM, True, (THREE, WHOLE), marks=pytest.mark.reliability_full),
        pytest.param(
            {"optimizer": optimizer("SGD", momentum=0.9)},
            False,
            (UNEQUAL, THREE),
            marks=pytest.mark.reliability_full,
        ),
        pytest.param(  # it has a scalar slot
            {"optimizer": optimizer("Nadam")},
            False,
            (THREE, WHOLE),
            marks=pytest.mark.reliability_full,
        ),
    ],
    ids=["adam, averages, accumulation", "three slices", "momentum", "nadam"],
)
def test_a_run_goes_on_with_other_slices_as_the_whole_one(
    tmp_path: Path, train: Any, tie: bool, path: tuple[Any, ...]
) -> None:
    """From whole to other slices, one after the other, each with two updates.

    Cells and replicas change, too.
    """

    def params(slices: Any) -> Any:
        made = task_of(slices, tie=tie, **train)
        return made.set({"model.num_partitions": 2, "model.num_replicas": min(2, len(slices)) or 1})

    steps = 2 + 2 * len(path)
    trained(tmp_path / "once", params(WHOLE), steps)
    trained(tmp_path / "run", params(WHOLE), 2)
    for number, slices in enumerate(path, 1):
        lines = trained(tmp_path / "run", params(slices), 2 * number + 2)
        assert f"restored step={2 * number}" in lines
        assert any(line.startswith("    model.slices") for line in lines)
    once, run = newest(tmp_path / "once"), newest(tmp_path / "run")
    found = values(run)
    assert found["step"] == steps
    # The true gradient of a key's bias is 0: of its rounding, Adam makes updates.
    check_same(once, run, rtol=1e-10, atol=2e-11)
    assert any(np.any(value != 0.0) for key, value in found.items() if key.startswith("slots/"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a whole run of four updates, evaluated, with averages."""
    folder = tmp_path_factory.mktemp("source") / "run"
    trained(folder, in_slices(WHOLE), 4, evaluate=True)
    return folder


@pytest.mark.parametrize(
    "slices",
    [pytest.param(THREE, marks=pytest.mark.reliability_full), UNEQUAL],
    ids=["three", "unequal"],
)
def test_values_in_slices_are_saved_as_those_of_the_whole(
    tmp_path: Path, source: Path, slices: Any
) -> None:
    """Bit by bit; and the best checkpoint is evaluated in any slices."""
    shutil.copytree(source, tmp_path / "run")
    params = in_slices(slices)
    params.train.keep_checkpoints = 1
    trained(tmp_path / "run", params, 5, evaluate=True)
    after = values(newest(tmp_path / "run"))
    assert after.keys() == values(newest(source)).keys()
    for name in ("checkpoints", "best"):
        one, other = (
            evaluation.run(in_slices(each), None, which=str(tmp_path / "run" / name))
            for each in (WHOLE, slices)
        )
        assert one is not None
        assert other is not None
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-6)
    again = tmp_path / "again"
    shutil.copytree(source, again)
    for each in (slices, WHOLE):  # saved without an update
        params = in_slices(each)
        learned = learner.Learner(params, params.input.instantiate().element_spec(training=True))
        state = run_state.RunState(params, learned, again, evaluates=True)
        assert state.restore(None, lambda _: None)
        state.checkpoints._present = None  # so that it is written
        state.save()
        state.close(lambda _: None)
    check_same(newest(source), newest(again))


def test_adafactor_goes_on_with_the_same_slices_and_refuses_others(tmp_path: Path) -> None:
    """Its row and column are means over a slice."""
    rule = optim.Adafactor.Params(momentum=0.9, min_factored=3)

    def params(slices: Any) -> Any:
        return task_of(slices, optimizer=optim.Optimizer.Params(rule=rule, learning_rate=0.02))

    trained(tmp_path, params(UNEQUAL), 1)
    slots = values(newest(tmp_path))
    assert slots["slots/embedding/table/second_moment/11 8 0,1:-"].shape == (1, 8)
    assert slots["slots/embedding/table/row/11 8 1,10:-"].shape == (10,)
    assert "restored step=1" in trained(tmp_path, params(UNEQUAL), 2)
    for other in (WHOLE, THREE):
        with pytest.raises(errors.CheckpointError, match=r"ckpt-2 is of other slices: slots/\w+/"):
            trained(tmp_path, params(other), 3)
    evaluation.run(params(WHOLE), tmp_path)
    start = str(tmp_path / "checkpoints")
    assert trained(tmp_path / "again", params(THREE), 1, start=start)


def test_starting_from_weights_joins_and_divides_them(tmp_path: Path, source: Path) -> None:
    lines = trained(tmp_path, in_slices(THREE), 0, start=str(source / "checkpoints"))
    assert not any("missing in it" in line or "does not fit" in line for line in lines)
    kernel = checkpoints.trained_values(str(source / "checkpoints"))["softmax/kernel"]
    found = checkpoints.trained_values(str(tmp_path / "checkpoints"))["softmax/kernel"]
    np.testing.assert_array_equal(found, kernel)


def test_other_params_are_refused_as_ever(source: Path) -> None:
    params = in_slices({"softmax": 2})
    params.model.layers[2].hidden = 13
    with pytest.raises(errors.TrainingError, match=r"other params \(model\.layers\[2\]\.hidden"):
        loop.run(params, source)
