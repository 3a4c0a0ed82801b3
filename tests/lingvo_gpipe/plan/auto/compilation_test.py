"""Cells are compiled where measured times say so, a run keeps the choice, and gradients stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, modes, network
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.layers import base
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.plan import auto, report, slot_times
from lingvo_gpipe.plan.auto import compilation
from lingvo_gpipe.plan.measured import cell_times
from lingvo_gpipe.run import checkpoints, loop
from lingvo_gpipe.run.profiles.steps import Profiles
from tests.tiny_task import tiny_task

NAMED = {"schedule": "1f1b", "jit_compile": "auto"}


class Written(base.Layer):
    """x → x + the length of the text of each number: XLA has no strings."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: Any) -> base.Meta:
            return base.Meta(inputs[0])

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        del theta, ctx
        return inputs + tf.cast(tf.strings.length(tf.strings.as_string(inputs)), inputs.dtype)


def task_of(**model: Any) -> Any:
    """Return a task of four cells of one layer each."""
    task = tiny_task(max_steps=2)
    hidden = [
        layers.Dense.Params(units=16, reads=("point",) if not n else ("x",), activation="relu")
        for n in range(3)
    ]
    task.model.set(
        layers=[*hidden, layers.Softmax.Params(name="head", classes=3)],
        **{"num_partitions": 4, "num_micro_batches": 4, "cuts": (1, 1, 1, 1), **NAMED, **model},
    )
    task.input.batch_size = 16
    return task


@pytest.fixture
def given_times(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Replace the measurement: programs of cell k take this share of their time if compiled."""
    shares: list[float | None] = [1.0] * 4
    monkeypatch.setattr(cell_times, "devices_at_once", lambda _: ["one"])

    def each(analysis: network.Analysis, *_: Any) -> list[cell_times.CellTimes | None]:
        found: list[cell_times.CellTimes | None] = []
        for cell in analysis.cells:
            share = shares[cell.index] if cell.compiled else 1.0
            if share is None:
                found.append(None)
            else:
                found.append(cell_times.CellTimes(slot_times.SlotTimes(*[share] * 7), None))
        return found

    monkeypatch.setattr(cell_times, "_each", each)
    return shares


def test_cells_that_become_faster_are_compiled(given_times: list[float | None]) -> None:
    given_times[:] = [0.5, 0.98, None, 0.5]
    lines: list[str] = []
    task = auto.resolved(task_of(), lines.append, profile=True)
    assert task.model.jit_compile == (True, False, False, True)
    (line,) = lines
    assert line.startswith(
        "XLA compiles cells 0, 3: compiled, the cells take 50.0 %, 98.0 %, cannot, 50.0 % of their "
        "time; the step takes "
    )
    # Cells 1 and 2 are now the slowest, so that the step is not half as long.
    assert 50.0 < float(line.split()[-2]) < 97.0


def test_no_cell_is_compiled_where_the_step_gains_nothing(given_times: list[float | None]) -> None:
    given_times[:] = [1.0, 1.0, 0.96, 1.0]
    lines: list[str] = []
    task = auto.resolved(task_of(), lines.append, profile=True)
    assert task.model.jit_compile is False
    assert lines == [
        "XLA compiles no cell: compiled, the cells take 100.0 %, 100.0 %, 96.0 %, 100.0 % of their "
        "time"
    ]


@pytest.mark.usefixtures("given_times")
def test_a_disturbed_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs use the cores while those without XLA are measured for the first time."""
    each, calls = cell_times._each, []

    def disturbed(analysis: network.Analysis, *rest: Any) -> list[cell_times.CellTimes]:
        found = each(analysis, *rest)
        calls.append(analysis.cells[0].compiled)
        slow = cell_times.CellTimes(slot_times.SlotTimes(*[2.0] * 7), None)
        return [slow] * len(found) if len(calls) == 1 else found

    monkeypatch.setattr(cell_times, "_each", disturbed)
    lines: list[str] = []
    assert auto.resolved(task_of(), lines.append, profile=True).model.jit_compile is False
    assert calls == [False, True, False, True]
    assert "100.0 %, 100.0 %" in lines[0]


def test_the_choice_needs_measured_times() -> None:
    wanted = r"^model.jit_compile=auto needs times that are measured. Add --profile"
    with pytest.raises(errors.ParamsError, match=wanted):
        auto.resolved(task_of(), print)
    with pytest.raises(errors.ParamsError, match=wanted):
        auto.choose(task_of(schedule="auto"))
    with pytest.raises(errors.ParamsError, match=r"^jit_compile='auto' is not chosen yet"):
        task_of().model.instantiate().build({"point": tf.TensorSpec([16, 2])})


def test_the_number_of_values_is_that_of_the_cells() -> None:
    with pytest.raises(errors.PartitionError, match=r"^jit_compile has 3 values for 4 cells"):
        report.plan(task_of(jit_compile=(True, False, True)))


def test_cells_that_cannot_be_measured_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_times, "measure", lambda *_: None)
    lines: list[str] = []
    task = auto.resolved(task_of(), lines.append, profile=True)
    assert task.model.jit_compile is False
    assert lines[0].startswith("XLA compiles no cell: their programs could not be measured")


def test_a_schedule_and_its_compiled_cells_are_chosen_and_kept(
    tmp_path: Path, given_times: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_times[:] = [0.5] * 4
    task = task_of(schedule="auto", cells_per_device=1, recompute="never")
    lines: list[str] = []
    loop.run(task, tmp_path, report=lines.append, profiles=Profiles(layers=True))
    (table,) = [line for line in lines if line.startswith("auto ")]
    assert table.endswith(
        "the cells take 50.0 %, 50.0 %, 50.0 %, 50.0 % of their time; the step takes 50.0 %"
    )
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    assert text.written_values(kept[1])["model.jit_compile"] == "(True, True, True, True)"
    # It goes on with its choice, without measuring again; other modes take it, too.
    monkeypatch.setattr(compilation, "choose", None)
    task.train.max_steps = 3
    loop.run(task, tmp_path, report=lambda _: None, profiles=Profiles(layers=True))
    compiled = modes.with_kept_choice(task, str(tmp_path)).model.jit_compile
    assert compiled == (True, True, True, True)
    only_jit = task_of()
    assert modes.with_kept_choice(only_jit, str(tmp_path)).model.jit_compile == compiled
    assert modes.with_kept_choice(only_jit, None).model.jit_compile is False


def test_a_cell_that_xla_refuses_is_measured_without_it() -> None:
    params = PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(units=4),
            Written.Params(),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=3,
        cuts=(1, 1, 1),
        jit_compile=True,
    )
    analysis = network.analyze(params, {name: tf.TensorSpec([8, 4]) for name in ("x", "target")})
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:1]]
    found = cell_times.of_compiled(analysis, devices)
    assert [times is None for times in found] == [False, True, False]
    with pytest.raises(tf.errors.OpError):
        cell_times.on_devices(analysis, devices)


@pytest.mark.parametrize("compiled", [(True, False, True), (False, True, False)])
def test_gradients_are_those_of_cells_that_are_not_compiled(compiled: tuple[bool, ...]) -> None:
    x = tf.random.stateless_normal([8, 4], [1, 2], dtype=tf.float64)
    batch = {"x": x, "target": tf.ones_like(x)}

    def gradients(jit: Any) -> dict[str, tf.Tensor]:
        hidden = [layers.Dense.Params(units=n, activation="gelu") for n in (5, 3, 4)]
        pipe = PipeliningLayer.Params(
            layers=[*hidden, layers.MeanSquaredError.Params()],
            dtype="float64",
            num_partitions=3,
            num_micro_batches=4,
            schedule="zb_h1",
            recompute="full,never,full",
            jit_compile=jit,
        ).instantiate()
        found = pipe.value_and_gradients(batch).gradients
        programs = [cell.compiled for cell in pipe.analysis.cells]
        assert programs == list(jit or (False,) * 3)
        return found

    wanted = gradients(False)
    for path, gradient in gradients(compiled).items():
        np.testing.assert_allclose(gradient, wanted[path], rtol=1e-10, atol=1e-13)
