"""A user's mistake is one line that names what, where, the nearest right thing and a way out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingvo_gpipe import errors, trainer
from tests.support import trainer_calls
from tests.support.trainer_calls import Run


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return the trainer with a user's package of models; see `trainer_calls`."""
    with trainer_calls.trainer_with_package(tmp_path, monkeypatch, capsys) as call:
        yield call


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--list_models=x*"], "ParamsError: no model matches 'x*'. --list_models shows all"),
        (["--model=lab.Tony"], "ParamsError: no model 'lab.Tony'; nearest 'lab.Tiny'"),
        ([], "ParamsError: --model=NAME is missing. --list_models shows all names"),
        (["--modle=x"], "ParamsError: unknown flag --modle; nearest --mode, --model"),
        (["--max_steps=x"], "ParamsError: flag --max_steps: 'x' is not a whole number. --help"),
        (["train"], "ParamsError: 'train' stands alone: every argument is a flag"),
        (["--model=lab.Tiny"], "ParamsError: --mode=train needs --logdir=FOLDER"),
        (
            ["--model=lab.Tiny", "--logdir=/x", "--profile"],
            "ParamsError: --profile measures layers, which --mode=train needs only for",
        ),
        (
            ["--model=lab.Tiny", "--logdir=/x", "--hosts=2x4"],
            "ParamsError: --hosts states links and memory by which --schedule=auto chooses; "
            "--mode=train with",
        ),
        (
            ["--model=lab.Tiny", "--logdir=/x", "--hosts=2x4,beween=1GB", "--schedule=auto"],
            "ParamsError: --hosts=2x4,beween=1GB: 'beween=1GB' is not one of memory, ",
        ),
        (
            ["--model=lab.Tiny", "--mode=describe", "--hosts=2x4"],
            "ParamsError: --hosts goes with --mode=",
        ),
        (
            ["--model=lab.Tiny", "--logdir=/x", "--params_override=model.jit_compile=fast"],
            "ParamsError: lab.Tiny: 'model.jit_compile' must be bool or ",
        ),
        (
            ["--model=lab.Tiny", "--logdir=/x", "--num_replicas=3", "--num_micro_batches=2"],
            "PartitionError: num_replicas=3, but a mini-batch has 2 micro-batches in all, so that ",
        ),
        (
            ["--model=lab.Tiny", "--mode=plan", "--params_override=model.slices={'head': 2}"],
            "LayerError: head (Softmax): it cannot be divided into slices. Embeddings, ",
        ),
        (["--model=lab.Tiny", "--mode=trian"], "ParamsError: no mode 'trian'; nearest 'train'"),
        (
            ["--model=lab.Tiny", "--mode=decode"],
            "ParamsError: no mode 'decode' for lab.Tiny: only translation models (mt.*) have it. "
            "--mode=export saves a program that predicts; --mode=eval measures on held-out "
            "examples, and shows some with predictions in TensorBoard. Use one of train, eval, ",
        ),
        (
            ["--model=lab.Tiny", "--mode=score"],
            "ParamsError: no mode 'score' for lab.Tiny: only translation models (mt.*) have it. "
            "--mode=eval measures on held-out examples",
        ),
        (["--model=lab.Tiny", "--mode=fit"], "ParamsError: no mode 'fit' for lab.Tiny. --mode=t"),
        (["--model=lab.Tiny", "--follow"], "ParamsError: --follow goes with --mode=eval"),
        (
            ["--model=lab.Tiny", "--mode=eval", "--follow", "--checkpoint=c", "--logdir=l"],
            "ParamsError: --follow evaluates each new checkpoint of --logdir, --checkpoint a",
        ),
        (
            ["--model=lab.Tiny", "--dry_run", "--mode=eval"],
            "ParamsError: --dry_run goes with --mode=train or train_eval",
        ),
        (
            ["--model=lab.Tiny", "--fit=1GiB", "--mode=train"],
            "ParamsError: --fit goes with --mode=plan",
        ),
        (
            ["--model=lab.Tiny", "--mode=plan", "--cells_per_device=2"],
            "ScheduleError: gpipe has one cell per device, but cells_per_device=2. Use 1",
        ),
        (
            ["--model=lab.Tiny", "--mode=plan", "--schedule=interleaved", "--cells_per_device=9"],
            "PartitionError: the schedule's table has 18 cells on num_partitions=2, but there are",
        ),
        (
            ["--model=lab.Tiny", "--num_partitions=99"],
            "PartitionError: --num_partitions=99, but lab.Tiny has 4 layers. Use 1 to 4; --mode=",
        ),
        (
            ["--model=lab.Tiny", "--params_override=model.num_microbatches=4"],
            "ParamsError: lab.Tiny has no field 'model.num_microbatches'; nearest "
            "'model.num_micro_batches'",
        ),
        (
            ["--model=lab.Tiny", "--params_override=num_microbatches=4"],
            "ParamsError: lab.Tiny has no field 'num_microbatches'; nearest "
            "'model.num_micro_batches'",
        ),
        (
            ["--model=lab.Tiny", "--params_override=train.max_steps=many"],
            "ParamsError: lab.Tiny: 'train.max_steps' must be int, got many",
        ),
        (
            ["--model=lab.Tiny", "--params_override=train.max_steps"],
            "ParamsError: 'train.max_steps' is not an override; write path=value",
        ),
        (
            ["--model=lab.Tiny", "--data_dir=/data"],
            "ParamsError: --data_dir=/data: lab.Tiny reads no folder (its input is ",
        ),
        (
            ["--model=lab.Tiny", "--schedule=1f1", "--mode=describe"],
            "ScheduleError: unknown schedule '1f1'; nearest '1f1b'",
        ),
        (
            ["--model=lab.Tiny", "--mode=eval", "--checkpoint=/nowhere/ckpt-3"],
            "CheckpointError: there is no checkpoint /nowhere/ckpt-3",
        ),
        (
            ["--model=lab.Tiny", "--mode=export", "--logdir=/nowhere"],
            "InputError: a model on Points cannot be exported: that input defines no serving. Add ",
        ),
        (
            ["--model=lab.Tiny", "--mode=params", "--fields=batch_size"],
            "ParamsError: no field of lab.Tiny matches 'batch_size', a pattern of whole paths. Try",
        ),
        (
            ["--model=lab.Tiny", "--mode=params", "--fields=input.*", "--text"],
            "ParamsError: --text prints all fields, --fields some. Leave one out",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(run: Run, arguments: list[str], text: str) -> None:
    found = run(*arguments, model=None)
    assert found.code == 1
    assert found.err[0].startswith(text)
    assert len(found.err) == 1
    assert found.out == []


def test_an_override_that_does_not_exist_comes_with_one_that_does(run: Run) -> None:
    found = run("--params_override=model.num_microbatches=4")
    assert found.err[0].endswith(". Try --params_override=model.num_micro_batches=4")


@pytest.mark.parametrize(
    ("assignment", "present"),
    [
        ("train.max_steps=many", "train.max_steps=12"),
        ("model.layers[2].rate=x y", "'model.layers[2].rate=0.25'"),
        ("eval.best_is=smallest", "eval.best_is=None"),
    ],
)
def test_an_override_of_the_wrong_kind_comes_with_the_present_value(
    run: Run, assignment: str, present: str
) -> None:
    found = run(f"--params_override={assignment}", "--mode=describe")
    assert len(found.err) == 1
    assert found.err[0].endswith(f". Try --params_override={present}, as it is now")
    (offered,) = shlex.split(present)
    assert run(f"--params_override={offered}", "--mode=describe").code == 0


@pytest.mark.parametrize(
    ("assignment", "offered"),
    [
        ("train.callbacks=callbacks.CSVLogger", "train.callbacks=[callbacks.CSVLogger]"),
        ("eval.metrics=accuracy", "eval.metrics=['accuracy']"),
    ],
)
def test_one_value_in_place_of_several_comes_with_its_brackets(
    run: Run, assignment: str, offered: str
) -> None:
    (line,) = run(f"--params_override={assignment}", "--mode=params").err
    text, _, way_out = line.partition(". Try --params_override=")
    assert f"'{assignment.partition('=')[0]}' must be tuple[" in text
    assert shlex.split(way_out) == [offered]
    assert run(f"--params_override={offered}", "--mode=params").code == 0


@pytest.mark.parametrize(
    ("assignment", "offered"),
    [
        ("train.callbacks=[CSVLogger]", "train.callbacks=[callbacks.CSVLogger]"),
        ("train.callbacks=csvlogger", "train.callbacks=[callbacks.CSVLogger]"),
        ("train.callbacks=[callbacks.CSVLoggger]", "train.callbacks=[callbacks.CSVLogger]"),
        ("train.average=Averag", "train.average=optim.Average"),
    ],
)
def test_a_wrong_name_of_a_class_comes_with_the_right_one(
    run: Run, assignment: str, offered: str
) -> None:
    (line,) = run(f"--params_override={assignment}", "--mode=params").err
    assert shlex.split(line.partition(". Try --params_override=")[2]) == [offered]
    assert run(f"--params_override={offered}", "--mode=params").code == 0


RATE = "train.optimizer.learning_rate"
RATE_CONFIG = f"{RATE}.config.initial_learning_rate"


@pytest.mark.parametrize(
    ("assignment", "end"),
    [
        (f"{RATE}=0.001", f"set '{RATE_CONFIG}'. Try --params_override={RATE_CONFIG}=0.001"),
        (f"{RATE}=os.system", "which no plain value replaces; override its fields"),
        ("train.optimizer=Adam", "set one of its fields: 'train.optimizer.name' (now 'Adam')"),
        ("train.optimizer.cls=os.system", "nearest 'model.cells'"),
        ("model.nam=os.system", "nearest 'name', 'model.layers[0].name', 'model.name'"),
        ("model.layer=3", "'model.layers', 'model.layers[0]', 'train.optimizer.lazy'"),
    ],
)
def test_an_override_is_suggested_if_it_works_and_names_no_foreign_code(
    run: Run, assignment: str, end: str
) -> None:
    (line,) = run("--model=image.digits.MLP", f"--params_override={assignment}").err
    assert line.startswith("ParamsError: image.digits.MLP")
    assert line.endswith(end)
    assert "=os.system" not in line


def test_a_rate_of_other_fields_comes_with_their_present_values(run: Run) -> None:
    (line,) = run("--model=lm.transformer.L3", f"--params_override={RATE}=0.001").err
    assert line.endswith(
        f"which no plain value replaces; set one of its fields: '{RATE}.factor' (now 0.3)"
    )


def test_after_a_mistake_nothing_is_left_that_python_would_write_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> int:
        sys.stdout.write("more than the disk takes")
        raise errors.InputError("the disk is full")

    monkeypatch.setattr(trainer, "_run", fail)
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    monkeypatch.setattr(sys, "stdout", full)
    assert trainer.run([]) == 1
    full.close()


def test_a_recipe_without_a_task_is_named(run: Run) -> None:
    found = run("--mode=describe", model="moded.Wrong")
    assert found.err == [
        "ParamsError: moded.Wrong: task() returns dict. Let it return task.Task.Params"
    ]


def test_a_bug_keeps_its_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("--mode=fail", model="moded.Moded")
