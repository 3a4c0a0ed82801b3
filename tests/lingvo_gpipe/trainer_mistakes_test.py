"""A user's mistake is one line that names what, where, the nearest right thing and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import trainer_calls
from tests.support.trainer_calls import Run


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return the trainer with a user's package of models; see `trainer_calls`."""
    with trainer_calls.trainer_with_package(tmp_path, monkeypatch, capsys) as call:
        yield call


# Model → flags → how the line begins.
MISTAKES: dict[str | None, dict[str, str]] = {
    None: {
        "--list_models=x*": "ParamsError: no model matches 'x*'. --list_models shows all",
        "--model=lab.Tony": "ParamsError: no model 'lab.Tony'; nearest 'lab.Tiny'",
        "": "ParamsError: --model=NAME is missing. --list_models shows all names",
        "--modle=x": "ParamsError: unknown flag --modle; nearest '--mode', '--model'",
        "--mode=": "ParamsError: --mode= is empty. Give a value, or leave it out",
    },
    "lab.Tiny": {
        "": "ParamsError: --logdir=FOLDER is missing: the run's folder of",
        "--data=real": "ParamsError: argument --data: invalid choice: 'r",
        "--logdir=/x --profile": (
            "ParamsError: training uses --profile only to choose by --schedule=auto. Add it, or "
            "leave"
        ),
        "--logdir=/x --hosts=2x4": (
            "ParamsError: training uses --hosts only to choose by --schedule=auto. Add it, or"
        ),
        "--logdir=/x --hosts=2x4,beween=1GB --schedule=auto": (
            "ParamsError: --hosts=2x4,beween=1GB: 'beween=1GB' is not one of memory, "
        ),
        "--mode=describe --hosts=2x4": "ParamsError: --hosts goes with --mode=",
        "--mode=plan --num_replicas=3 --num_micro_batches=2": (
            "PartitionError: num_replicas=3, but a mini-batch has 2 micro-batches in all, so that "
        ),
        "--mode=plan --params_override=model.slices={'head':2}": (
            "LayerError: head (Softmax): it cannot be divided into slices. Embeddings, "
        ),
        "--mode=trian": "ParamsError: lab.Tiny has no mode 'trian'; near",
        "--mode=decode": "ParamsError: lab.Tiny has no mode 'decode'",
        "--mode=plan --fit=1GiB --grow=depth --hosts=2x1": (
            "ParamsError: --fit searches for the memory of one device, --hosts names those of all"
        ),
        "--fit=1GiB --mode=train": "ParamsError: --fit goes with --mode=plan",
        "--mode=plan --cells_per_device=2": (
            "ScheduleError: gpipe has one cell per device, but cells_per_device=2. Use 1"
        ),
        "--mode=plan --schedule=interleaved --cells_per_device=9": (
            "PartitionError: the schedule's table has 18 cells on num_partitions=2, but there are"
        ),
        "--mode=plan --num_partitions=99": (
            "PartitionError: num_partitions=99, but there are 4 layers. Use 1 to 4"
        ),
        "--params_override=model.num_microbatches=4": (
            "ParamsError: lab.Tiny has no field 'model.num_microbatches'; nearest "
            "'model.num_micro_batches'"
        ),
        "--params_override=train.max_steps=many": (
            "ParamsError: lab.Tiny: 'train.max_steps' must be int, got many"
        ),
        "--params_override=train.callbacks=[callbacks.CSVLoggger]": (
            "ParamsError: lab.Tiny: 'train.callbacks': lingvo_gpipe has no class "
            "'callbacks.CSVLoggger'; nearest 'callbacks.CSVLogger'"
        ),
        "--params_override=train.max_steps": (
            "ParamsError: 'train.max_steps' is not an override; write path=value"
        ),
        "--data_dir=/data": (
            "ParamsError: --data_dir=/data: lab.Tiny reads no folder (its input is "
        ),
        "--schedule=1f1 --mode=describe": "ScheduleError: unknown schedule '1f1'; nearest '1f1b'",
        "--mode=eval --checkpoint=/nowhere/ckpt-3": (
            "CheckpointError: there is no checkpoint /nowhere/ckpt-3"
        ),
        "--mode=export --logdir=/nowhere": (
            "InputError: a model on Points cannot be exported: that input defines no serving. Add "
        ),
        "--mode=params --fields=batch_size": (
            "ParamsError: no field of lab.Tiny matches 'batch_size', a pattern of whole paths; nea"
        ),
        "--mode=params --fields=input.* --text": (
            "ParamsError: --text prints all fields, --fields some. Leave one out"
        ),
    },
}


@pytest.mark.parametrize(
    ("model", "flags"), [(model, flags) for model, rows in MISTAKES.items() for flags in rows]
)
def test_a_mistake_is_one_line_and_exit_code_1(run: Run, model: str | None, flags: str) -> None:
    found = run(*flags.split(), model=model)
    assert found.code == 1
    assert found.err[0].startswith(MISTAKES[model][flags])
    assert len(found.err) == 1
    assert found.out == []


def test_a_recipe_without_a_task_is_named(run: Run) -> None:
    found = run("--mode=describe", model="moded.Wrong")
    assert found.err == [
        "ParamsError: moded.Wrong: task() returns dict. Let it return task.Task.Params"
    ]


def test_a_bug_keeps_its_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("--mode=fail", model="moded.Moded")
