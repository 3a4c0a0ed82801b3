"""A run goes on with other slices as if they had never been others; and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors, modes, optim, registry
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.run import checkpoints, eval_mode, loop
from lingvo_gpipe.run.reslicing import mode
from tests.sliced_task import ASSETS, THREE, UNEQUAL, WHOLE, Ids, in_slices, task_of


def values(prefix: str) -> dict[str, Any]:
    saved = checkpoints.SavedValues(prefix)
    return {key: saved.read(key) for key in saved.shapes}


def newest(folder: Path, name: str = "checkpoints") -> str:
    found = checkpoints.newest(str(folder / name))
    assert found is not None
    return found


def trained(folder: Path, params: Any, steps: int, *, evaluate: bool = False) -> Path:
    params = params.copy()
    params.train.max_steps = steps
    loop.run(params, folder, evaluate=evaluate, report=lambda _: None)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_equal(one: Mapping[str, Any], other: Mapping[str, Any], **tolerance: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if tolerance:
            np.testing.assert_allclose(other[key], value, err_msg=key, **tolerance)
        else:
            np.testing.assert_array_equal(other[key], value, err_msg=key)
            assert other[key].dtype == value.dtype


def optimizer(name: str, **config: Any) -> Any:
    return optim.Optimizer.Params(name=name, config=config, learning_rate=0.02)


ADAM = {
    "average": optim.Average.Params(decay=0.9),
    "clip_norm": 0.5,
    "accumulate": 2,
}


@pytest.mark.parametrize(
    ("train", "tie", "path"),
    [
        (ADAM, True, (UNEQUAL,)),
        pytest.param(ADAM, True, (UNEQUAL, WHOLE), marks=pytest.mark.reliability_full),
        pytest.param(ADAM, True, (THREE, UNEQUAL), marks=pytest.mark.reliability_full),
        pytest.param(
            {"optimizer": optimizer("SGD", momentum=0.9)},
            False,
            (UNEQUAL, THREE),
            marks=pytest.mark.reliability_full,
        ),
        pytest.param(  # it has a scalar slot
            {"optimizer": optimizer("Nadam")},
            False,
            (THREE,),
            marks=pytest.mark.reliability_full,
        ),
    ],
    ids=["adam, averages, accumulation", "whole again", "three slices", "momentum", "nadam"],
)
def test_a_run_goes_on_with_other_slices_as_the_whole_one(
    tmp_path: Path, train: Any, tie: bool, path: tuple[Any, ...]
) -> None:
    """From whole to other slices, one after the other, each with two updates, and back.

    Cells and replicas change, too.
    """

    def params(slices: Any) -> Any:
        made = task_of(slices, tie=tie, **train)
        return made.set({"model.num_partitions": 2, "model.num_replicas": min(2, len(slices)) or 1})

    steps = 2 + 2 * len(path)
    once = values(newest(trained(tmp_path / "once", params(WHOLE), steps)))
    run = trained(tmp_path / "0", params(WHOLE), 2)
    for number, slices in enumerate(path, 1):
        run = mode.run(params(slices), tmp_path / str(number), str(run))
        trained(run, params(slices), 2 * number + 2)
    if path[-1] is not WHOLE:
        run = mode.run(params(WHOLE), tmp_path / "joined", str(run))
    found = values(newest(run))
    assert found["step"] == steps
    # The true gradient of a key's bias is 0: of its rounding, Adam makes updates.
    assert_equal(once, found, rtol=1e-10, atol=2e-11)
    assert any(np.any(value != 0.0) for key, value in found.items() if key.startswith("slots/"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a whole run of four updates, evaluated, with averages."""
    params = task_of(WHOLE, average=optim.Average.Params(decay=0.9), dtype="float32")
    return trained(tmp_path_factory.mktemp("source") / "run", params, 4, evaluate=True)


@pytest.mark.parametrize("slices", [THREE, UNEQUAL], ids=["three", "unequal"])
def test_dividing_and_joining_returns_every_bit(tmp_path: Path, source: Path, slices: Any) -> None:
    """Also of the best checkpoint and of the files about ids; the run that is read stays as is."""
    before = files(source)
    divided = mode.run(in_slices(slices), tmp_path / "divided", str(source))
    joined = mode.run(in_slices(WHOLE), tmp_path / "joined", str(divided))
    assert files(source) == before
    for name in ("checkpoints", "best"):
        assert_equal(values(newest(source, name)), values(newest(joined, name)))
        one, other = (checkpoints.step_of(newest(run, name)) for run in (source, joined))
        assert one == other
        found = values(newest(divided, name))
        assert found["variables/softmax_0/kernel"].shape[0] == (4 if slices is THREE else 1)
        assert found["average/mlp_1/output/kernel"].shape[0] == (3 if slices is THREE else 1)
        assert "variables/mlp_1/output/bias" not in found
    assert (joined / "ids.txt").read_bytes() == ASSETS["ids.txt"]
    assert {path.name for path in joined.iterdir()} == {
        "best",
        "checkpoints",
        "ids.txt",
        "run.lock",
    }
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".writing")] == []


def test_slices_of_a_recipe_become_others_and_none(tmp_path: Path) -> None:
    """Fields of the layers count as those of the network do, and layers without such fields."""
    two = {"vocabulary_slices": 2, "feed_forward_slices": (4, 8)}
    run = trained(tmp_path / "two", task_of(WHOLE, recipe=two), 1)
    whole = mode.run(task_of(WHOLE), tmp_path / "whole", str(run))
    found = values(newest(whole))
    assert found["variables/softmax/kernel"].shape == (11, 8)
    assert "variables/embedding/table" in found
    three = mode.run(task_of(THREE, recipe=two), tmp_path / "three", str(run))
    also = mode.run(task_of(THREE), tmp_path / "also", str(whole))
    assert_equal(values(newest(three)), values(newest(also)))
    again = mode.run(task_of(WHOLE, recipe=two), tmp_path / "again", str(three))
    assert_equal(values(newest(again)), values(newest(run)))


def test_a_certain_checkpoint_is_read(tmp_path: Path, source: Path) -> None:
    first = checkpoints.find(str(source / "checkpoints"))[0]
    assert checkpoints.step_of(first) == 2
    run = mode.run(in_slices(THREE), tmp_path / "new", first)
    assert checkpoints.step_of(newest(run)) == 2
    whole = values(first)["variables/embedding/table"]
    parts = [values(newest(run))[f"variables/embedding_{n}/table"] for n in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_files_are_kept_before_a_checkpoint(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a checkpoint but without the notice of made-up data holds a run on data."""
    monkeypatch.setattr(synthetic, "FILE", next(iter(ASSETS)))
    run = mode.run(in_slices(THREE), tmp_path / "new", str(source))
    assert (run / synthetic.FILE).is_file()


def test_the_lines_name_each_variable_in_other_slices(tmp_path: Path, source: Path) -> None:
    lines: list[str] = []
    mode.run(in_slices(THREE), tmp_path / "new", str(source), report=lines.append)
    assert lines[0] == f"resliced step=4 of {newest(source)} to {tmp_path / 'new'}"
    assert "    embedding/table [11, 8]: whole → 3 slices of 4, 4, 3" in lines
    assert "    mlp/middle/kernel [8, 7]: whole → 2 slices of 4, 3" in lines
    assert not any("/output/bias" in line for line in lines)
    assert len(lines) == 1 + 3 + 3 + 3  # tables; the block's and the sliced feed-forward part


def test_adafactor_goes_on_with_factors_of_each_slice(tmp_path: Path) -> None:
    """Joined, they are the row of the whole one bit for bit, and its column up to rounding."""
    rule = optim.Adafactor.Params(momentum=0.9, min_factored=3)

    def params(slices: Any) -> Any:
        return task_of(slices, optimizer=optim.Optimizer.Params(rule=rule, learning_rate=0.02))

    run = trained(tmp_path / "whole", params(WHOLE), 2)
    lines: list[str] = []
    divided = mode.run(params(UNEQUAL), tmp_path / "divided", str(run), report=lines.append)
    assert lines[-1].endswith(
        "updates are not those of the whole weights: Adafactor has factors of v, and a limit of "
        "the update, of each slice alone"
    )
    slots = values(newest(divided))
    assert slots["slots/embedding_0/table/second_moment"].shape == (1, 8)
    assert slots["slots/embedding_1/table/row"].shape == (10,)
    joined = mode.run(params(WHOLE), tmp_path / "joined", str(divided))
    before, after = values(newest(run)), values(newest(joined))
    factored = [key for key in before if key.endswith(("/row", "/column"))]
    assert "slots/softmax/kernel/column" in factored
    assert_equal(
        {key: value for key, value in before.items() if key not in factored},
        {key: value for key, value in after.items() if key not in factored},
    )
    assert_equal(
        {key: before[key] for key in factored}, {key: after[key] for key in factored}, rtol=1e-14
    )
    trained(divided, params(UNEQUAL), 4)


# --- what is refused ------------------------------------------------------------------------------


def refused(tmp_path: Path, params: Any, start: Any, logdir: Path | None = None) -> str:
    """Return the first line of the refusal; nothing is left."""
    target = tmp_path / "new" if logdir is None else logdir
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(errors.UserError) as refusal:
        mode.run(params, target, str(start))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == there
    return str(refusal.value)


def test_a_run_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, in_slices(THREE), tmp_path / "missing")
    assert text.startswith(f"there is no checkpoint {tmp_path / 'missing'}; ")
    (tmp_path / "empty").mkdir()
    text = refused(tmp_path, in_slices(THREE), tmp_path / "empty")
    assert text == f"{tmp_path / 'empty'} has no whole checkpoint"


def test_a_folder_that_is_not_new_is_refused(tmp_path: Path, source: Path) -> None:
    before = files(source)
    for folder in (source, source / "checkpoints"):
        text = refused(tmp_path, in_slices(THREE), source, folder)
        assert text.startswith(f"--logdir={folder} holds the checkpoint that is read, ")
    assert files(source) == before
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    text = refused(tmp_path, in_slices(THREE), source, tmp_path / "used")
    assert text == f"--logdir={tmp_path / 'used'} is not empty. Give a new folder"
    text = refused(tmp_path, in_slices(THREE), source, tmp_path / "used" / "notes.txt")
    assert "cannot be used: Not a directory" in text


def test_an_empty_folder_is_filled(tmp_path: Path, source: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = mode.run(in_slices(THREE), tmp_path / "empty", str(source))
    assert checkpoints.step_of(newest(run)) == 4


def test_the_same_slices_are_refused(tmp_path: Path, source: Path) -> None:
    text = refused(tmp_path, in_slices({"embedding": 1}), source)
    assert text == (
        f"{newest(source)} has these slices already: nothing is to be done. Train on in its own "
        "folder"
    )


def test_other_params_are_refused(tmp_path: Path, source: Path) -> None:
    params = in_slices(THREE)
    params.model.layers[2].hidden = 13
    params.model.slices = {"embedding": 2, "softmax": 2}
    params.train.clip_norm = 1.0  # may change
    assert refused(tmp_path, params, source) == (
        f"{newest(source)} differs in more than slices (model.layers[2].hidden: 12 -> 13). Leave "
        "--model out, or give it with the overrides of its run, and change only slices"
    )
    other = in_slices(THREE)
    other.train.optimizer.name = "SGD"
    assert "(train.optimizer.name: 'Adam' -> 'SGD')" in refused(tmp_path, other, source)


def test_what_only_the_data_determines_is_that_of_the_run(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recall(own: object, params: Any, of_run: Any) -> None:
        del own
        params.model.layers[2].hidden = of_run.model.layers[2].hidden

    params = in_slices(THREE)
    params.model.layers[2].hidden = 13
    monkeypatch.setattr(Ids, "recall_params", recall)
    mode.run(params, tmp_path / "new", str(source))
    monkeypatch.setattr(Ids, "is_there", lambda _: True)
    assert "differs in more than slices" in refused(tmp_path, params, source, tmp_path / "other")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    named = in_slices(THREE).set(name="mine.Model")
    run = trained(tmp_path / "named", in_slices(WHOLE).set(name="mine.Other"), 0)
    text = refused(tmp_path, named, run)
    assert text.endswith("is of 'mine.Other', not of 'mine.Model'. Give its --model")


def test_patterns_that_select_other_weights_are_refused(tmp_path: Path) -> None:
    frozen = task_of(WHOLE)
    frozen.model.frozen = ("embedding/*",)
    run = trained(tmp_path / "frozen", frozen, 0)
    other = task_of({"embedding": 2})
    for pattern in ("softmax/*", "embedding_0/*"):
        other.model.frozen = (pattern,)
        text = refused(tmp_path, other, run)
        assert text.startswith("model.frozen selects other weights than in the checkpoint: embedd")
    other.model.frozen = ("embedding_*",)
    assert mode.run(other, tmp_path / "same", str(run)).exists()
    lazy = task_of(WHOLE)
    lazy.train.optimizer.lazy = ("embedding/table",)
    run = trained(tmp_path / "lazy", lazy, 0)
    other = task_of({"embedding": 2})
    text = refused(tmp_path, other, run)
    assert text.startswith("train.optimizer.lazy selects other weights than in the checkpoint: em")
    other.train.optimizer.lazy = ("embedding_?/table",)
    assert mode.run(other, tmp_path / "lazy_too", str(run)).exists()


def test_slots_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    rule = optimizer("Adafactor")
    run = trained(tmp_path / "keras", task_of(WHOLE, optimizer=rule), 0)
    text = refused(tmp_path, task_of(THREE, optimizer=rule), run)
    assert text.startswith("embedding/table: slot 'r' of [11] numbers, of a weight of [11, 8], can")


def test_a_checkpoint_whose_params_are_not_known_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", in_slices(WHOLE), 0)
    text = Path(f"{newest(run)}.params.txt")
    kept = text.read_text().splitlines(keepends=True)
    text.write_text(in_slices(WHOLE).model.to_text())  # older ones begin without a checksum
    assert refused(tmp_path, in_slices(THREE), run) == (
        f"the params of {newest(run)} are not those of a task"
    )
    text.write_text("".join(line for line in kept if line.startswith("class")) + "nonsense: 1\n")
    found = refused(tmp_path, in_slices(THREE), run)
    assert found.startswith(f"the params of {newest(run)} cannot be read: ")
    assert found.endswith(". Name the package of its classes by --params_package")
    prefix = newest(run)
    text.unlink()
    found = refused(tmp_path, in_slices(THREE), prefix)
    assert found.startswith(f"{prefix} was saved without params, so its slices are not known. ")


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", in_slices(WHOLE), 0)
    shard = Path(f"{newest(run)}.data-00000-of-00001")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{newest(run)} is torn and cannot be read: " in refused(tmp_path, in_slices(THREE), run)


def test_resuming_with_other_slices_names_the_tool(source: Path) -> None:
    with pytest.raises(errors.TrainingError) as refusal:
        loop.run(in_slices({"softmax": 2}), source)
    first = str(refusal.value).splitlines()[0]
    assert first.startswith(
        f"{source} holds a run with other slices (model.slices: {{}} -> {{'softmax': 2}}). "
        "--mode=reslice with --checkpoint of that run and another --logdir joins and divides its "
        "slices, optimizer state included. Give another --logdir; there, --checkpoint="
    )
    other = in_slices({"softmax": 2})
    other.model.layers[2].hidden = 13
    with pytest.raises(errors.TrainingError, match="a run with other params") as refusal:
        loop.run(other, source)
    assert "--mode=reslice" not in str(refusal.value)
    frozen = in_slices(WHOLE)
    frozen.model.frozen = ("softmax/*",)
    with pytest.raises(errors.TrainingError, match="a run with other params"):
        loop.run(frozen, source)


def test_evaluating_with_other_slices_names_the_tool(source: Path) -> None:
    text = (
        f"{newest(source)} has other slices than this network: set them as its run has them. "
        "--mode=reslice with --checkpoint of that run and another --logdir joins"
    )
    with pytest.raises(errors.CheckpointError) as refusal:
        eval_mode.run(in_slices({"softmax": 2}), source)
    assert str(refusal.value).startswith(text)
    with pytest.raises(errors.CheckpointError) as refusal:
        eval_mode.run(in_slices({"softmax": 2}), None, which=str(source / "best"))
    assert "best/ckpt-" in str(refusal.value)
    other = in_slices({"softmax": 2})
    other.model.layers[2].hidden = 13
    with pytest.raises(errors.CheckpointError, match="is of another network"):
        eval_mode.run(other, source)


def test_starting_from_weights_in_other_slices_names_the_tool(tmp_path: Path, source: Path) -> None:
    start = str(source / "checkpoints")
    for slices, named in (({"softmax": 2}, True), (WHOLE, False)):
        lines: list[str] = []
        params = in_slices(slices)
        params.train.max_steps = 0
        loop.run(params, tmp_path / str(named), start=start, report=lines.append)
        assert ("    missing in it: softmax_1/kernel" in lines) == named
        hint = "    its slices are other ones: --mode=reslice with --checkpoint of that run"
        assert any(line.startswith(hint) for line in lines) == named


def test_flags_that_are_missing_are_named(tmp_path: Path) -> None:
    for logdir, checkpoint, missing in ((None, "old", "--logdir=NEW"), (tmp_path, None, "RUN")):
        job = registry.Job(
            model="m",
            task=task_of(WHOLE),
            logdir=logdir,
            checkpoint=checkpoint,
            report=print,
            should_stop=lambda: False,
            rebuild=lambda *_: task_of(WHOLE),
        )
        with pytest.raises(errors.ParamsError, match=f"--mode=reslice needs .*{missing}: "):
            modes.MODES["reslice"](job)


# --- killed ---------------------------------------------------------------------------------------

KILLED = """
import os, pathlib, signal, sys
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.reslicing import mode
from tests import sliced_task

true = checkpoints.write_values

def killed(folder, *arguments):
    true(folder, *arguments)
    if folder.endswith("/checkpoints"):  # the last of all that is written
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.write_values = killed
mode.run(sliced_task.in_slices(sliced_task.THREE), pathlib.Path(sys.argv[2]), sys.argv[1])
"""


def test_nothing_is_visible_of_a_run_that_is_killed(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "new"
    program = [sys.executable, "-c", textwrap.dedent(KILLED), str(source), str(target)]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(program, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["new.writing"]
    (tmp_path / "new.writing" / "checkpoints" / "ckpt-9.index").write_bytes(b"of an older one")
    mode.run(in_slices(THREE), target, str(source))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not (target / "checkpoints" / "ckpt-9.index").exists()
    joined = mode.run(in_slices(WHOLE), tmp_path / "joined", str(target))
    assert_equal(values(newest(source)), values(newest(joined)))


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.files, "begin", full)
    text = refused(tmp_path, in_slices(THREE), source)
    assert "checkpoint cannot be written (No space left on device). Free disk space" in text
