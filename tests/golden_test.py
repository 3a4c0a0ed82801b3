"""Files of earlier commits are restored: checkpoints, exports, records and params texts.

Each folder of `golden/` was written by the commit that its README names, and is never rewritten.
Restored values are compared bit for bit. Results computed from them are compared within
`ROUNDING`, because processors and numbers of threads round differently.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe.run import eval_mode, export, loop
from tests.golden import make, recipes

Array = np.ndarray[Any, Any]

GOLDEN = Path(__file__).with_name("golden")
SETS = {path.parent.name: path.parent for path in sorted(GOLDEN.glob("*/registered.txt.xz"))}
RUNS = {
    str(path.parent.relative_to(GOLDEN)): path.parent
    for path in sorted(GOLDEN.glob("*/*/tensors.npz"))
}
RESUMABLE = [name for name, home in RUNS.items() if len(make.prefixes(home / "run")) > 1]
EXPORTS = [name for name, home in RUNS.items() if (home / "served.npz").exists()]

# Largest relative error of results computed from equal values.
ROUNDING = 1e-5
# The same after more updates, which amplify it; then the error relative to the tensor's largest.
AMPLIFIED = 1e-3
# Weights without effect on the loss, whose gradient is only rounding error: a bias before a batch
# norm, a bias of keys. Adam divides the gradient by its size, so the error grows.
WITHOUT_EFFECT = re.compile(r"\.S(separable|key)\.Sbias(\.S|$)")
# Thread counts depend on the machine.
OF_THE_MACHINE = ("threads",)


def newest(home: Path) -> str:
    """Return the prefix of the last checkpoint of a run."""
    return make.prefixes(home / "run")[-1]


def golden_task(home: Path) -> task.Task.Params:
    """Return the task that the run stores, on the data in its folder."""
    return make.kept_task(newest(home), home / "data")


def expected(home: Path, checkpoint: str) -> dict[str, Array]:
    """Return the tensors of `initial` or of a checkpoint, such as `best/ckpt-2`, by key."""
    start = f"{checkpoint}:"
    with np.load(home / "tensors.npz") as arrays:
        return {k.removeprefix(start): arrays[k] for k in arrays.files if k.startswith(start)}


def name_of(home: Path, prefix: str) -> str:
    return str(Path(prefix).relative_to(home / "run"))


def compare(
    tensors: Mapping[str, Array],
    wanted: Mapping[str, Array],
    same: Callable[[Array, Array], bool],
) -> list[str]:
    """Return the keys that one of the two lacks, or whose shape, dtype or value differs."""
    assert wanted
    keys = (tensors.keys() | wanted.keys()) - set(OF_THE_MACHINE)
    return sorted(
        key
        for key in keys
        if key not in tensors
        or key not in wanted
        or np.asarray(tensors[key]).dtype != np.asarray(wanted[key]).dtype
        or np.shape(tensors[key]) != np.shape(wanted[key])
        or not same(np.asarray(tensors[key]), np.asarray(wanted[key]))
    )


def same_bits(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


def close(one: Array, other: Array, tolerance: float) -> bool:
    """Compare relative to each value and to the tensor's largest value; integers exactly."""
    if not np.issubdtype(other.dtype, np.floating):
        return bool(np.array_equal(one, other))
    largest = np.abs(other[np.isfinite(other)]).max(initial=0.0)
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance * largest))


def copied(home: Path, folder: Path, without: str) -> Path:
    """Return a copy of a run without the files of the checkpoint `without`."""
    ignored = shutil.ignore_patterns(f"{without}.*")
    shutil.copytree(home / "run", folder, ignore=ignored)
    return folder


def changed_fields(lines: list[str]) -> set[str]:
    """Return the paths of the fields that a run has reported as changed."""
    pattern = re.compile(r"\s+(?:[-+] )?([\w.\[\]]+): ")
    return {match[1] for line in lines if (match := pattern.match(line))}


def test_there_are_golden_files() -> None:
    """Bazel and a checkout have all sets: with a missing folder, its tests would be skipped."""
    assert set(SETS) == {path.name for path in GOLDEN.iterdir() if (path / "README.md").exists()}
    assert {name.split("/")[0] for name in RUNS} == set(SETS)
    assert len(RESUMABLE) >= 2 * len(SETS)
    assert len(EXPORTS) >= len(SETS)


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_is_restored_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The trainer restores all that was saved and saves it again, because the step is another."""
    home = RUNS[name]
    last = Path(newest(home))
    step = int(last.name.removeprefix("ckpt-"))
    other = f"ckpt-{step - 1}"
    shutil.copytree(home / "run" / "checkpoints", tmp_path / "checkpoints")
    for path in (tmp_path / "checkpoints").glob(f"{last.name}.*"):
        path.rename(path.with_name(path.name.replace(last.name, other)))
    for kept in (home / "run").iterdir():
        if kept.is_file():
            shutil.copy(kept, tmp_path)
    lines: list[str] = []
    result = loop.run(golden_task(home), tmp_path, report=lines.append)
    assert result.step == step
    assert changed_fields(lines) <= {"input.data_dir"}
    tensors = make.tensors(str(tmp_path / "checkpoints" / last.name))
    wanted = expected(home, name_of(home, str(last)))
    wanted["eval.Sstep"] = np.array(-1)  # this run does not evaluate
    assert compare(tensors, wanted, same_bits) == []


@pytest.mark.parametrize("name", RUNS)
def test_tensorflow_reads_what_it_read_then(name: str) -> None:
    home = RUNS[name]
    for prefix in make.prefixes(home / "run"):
        wanted = expected(home, name_of(home, prefix))
        assert compare(make.tensors(prefix), wanted, same_bits) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.reliability_full] if "translation" in name else [])
        for name in RESUMABLE
    ],
)
def test_a_run_continues_to_the_same_end(name: str, tmp_path: Path) -> None:
    """Updates, averages, data, random numbers, evaluation and best equal those of the old run."""
    home = RUNS[name]
    last = Path(newest(home))
    folder = copied(home, tmp_path / "run", last.name)
    lines: list[str] = []
    result = loop.run(golden_task(home), folder, evaluate=True, report=lines.append)
    assert changed_fields(lines) <= {"input.data_dir"}
    tensors = make.tensors(str(folder / "checkpoints" / last.name))
    wanted = expected(home, name_of(home, str(last)))
    within = functools.partial(close, tolerance=AMPLIFIED)
    differing = compare(tensors, wanted, within)
    assert [key for key in differing if not WITHOUT_EFFECT.search(key)] == []
    metrics = json.loads((home / "metrics.json").read_text())[name_of(home, str(last))]
    assert result.metrics == pytest.approx(metrics, rel=AMPLIFIED)


@pytest.mark.parametrize("name", RUNS)
def test_weights_begin_with_the_same_values(name: str, tmp_path: Path) -> None:
    home = RUNS[name]
    params = golden_task(home)
    params.train.max_steps = 0
    result = loop.run(params, tmp_path)
    within = functools.partial(close, tolerance=ROUNDING)
    assert compare(make.tensors(result.checkpoint), expected(home, "initial"), within) == []


# --- Evaluation and exports -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMABLE)
def test_checkpoints_are_evaluated_and_exported_as_then(name: str, tmp_path: Path) -> None:
    home = RUNS[name]
    metrics = json.loads((home / "metrics.json").read_text())
    evaluator = eval_mode.CheckpointEvaluator(golden_task(home), str(tmp_path))
    for prefix in make.prefixes(home / "run"):
        evaluated = evaluator.evaluate(prefix)
        assert evaluated is not None
        assert evaluated.values == pytest.approx(metrics[name_of(home, prefix)], rel=ROUNDING)
    if name in EXPORTS:
        made = export.run(golden_task(home), tmp_path, which=newest(home))
        check_served(home, served_here(made, home))


def served_here(folder: Path, home: Path) -> dict[str, Array]:
    """Return the outputs of an export in this process."""
    with np.load(home / "served.npz") as arrays:
        given = {
            k.removeprefix("input:"): tf.constant(arrays[k]) for k in arrays if k[:6] == "input:"
        }
    told = tf.saved_model.load(str(folder)).signatures["serving_default"](**given)
    return {key: value.numpy() for key, value in told.items()}


def check_served(home: Path, outputs: Mapping[str, Array]) -> None:
    with np.load(home / "served.npz") as arrays:
        wanted = {k.removeprefix("output:"): arrays[k] for k in arrays if k[:7] == "output:"}
    within = functools.partial(close, tolerance=ROUNDING)
    assert compare(outputs, wanted, within) == []


# Of the last two, TensorFlow's Keras imports what it needs nowhere: a third of its import.
HIDDEN = ("lingvo_gpipe", "sentencepiece", "tensorflow_text", "sklearn", "matplotlib")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Array]]:
    """Return the outputs of each golden export in a process that imports only TensorFlow."""
    folder = tmp_path_factory.mktemp("answers")
    program = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HIDDEN!r}:
            raise ImportError(name + " is hidden")
sys.meta_path.insert(0, Hidden())
import numpy as np
import tensorflow as tf
for name in {EXPORTS!r}:
    with np.load({str(GOLDEN)!r} + "/" + name + "/served.npz") as arrays:
        given = {{k[6:]: tf.constant(arrays[k]) for k in arrays if k.startswith("input:")}}
    model = tf.saved_model.load({str(GOLDEN)!r} + "/" + name + "/export")
    served = model.signatures["serving_default"](**given)
    variables = {{
        "variable:" + path: variable.numpy() for path, variable in model.variables_by_path.items()
    }}
    arrays = {{key: value.numpy() for key, value in served.items()}} | variables
    np.savez({str(folder)!r} + "/" + name.replace("/", ".") + ".npz", **arrays)
assert "lingvo_gpipe" not in sys.modules
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return {name: dict(np.load(folder / f"{name.replace('/', '.')}.npz")) for name in EXPORTS}


@pytest.mark.parametrize("name", EXPORTS)
def test_tensorflow_alone_serves_an_export(name: str, answers: dict[str, dict[str, Array]]) -> None:
    home = RUNS[name]
    outputs = {k: v for k, v in answers[name].items() if not k.startswith("variable:")}
    check_served(home, outputs)
    saved = expected(home, name_of(home, newest(home)))
    variables = {k: v for k, v in answers[name].items() if k.startswith("variable:")}
    assert variables
    for key, value in variables.items():
        path = key.removeprefix("variable:").replace(".", "..").replace("/", ".S")
        kept = [
            saved[f"{kind}.S{path}"]
            for kind in ("average", "variables")
            if f"{kind}.S{path}" in saved
        ]
        assert same_bits(value, kept[0]), key


# --- Texts ----------------------------------------------------------------------------------------


def values(text: str) -> dict[str, str]:
    """Return path → value of the fields of a text, without names of classes."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {path: value for path, _, value in pairs if not re.search(r"(^|\.)class$", path)}


def check_read(text: str) -> hyperparams.Params:
    """Return the params of an old text, after checking that their new text has all its values."""
    params = hyperparams.from_text(text)
    assert values(text).items() - values(params.to_text()).items() == set()
    return params


def check_read_again(params: hyperparams.Params) -> None:
    assert hyperparams.from_text(params.to_text()) == params


@pytest.mark.parametrize("name", RUNS)
def test_texts_that_runs_keep_are_read(name: str) -> None:
    paths = sorted((RUNS[name] / "run").glob("*/*.params.txt"))
    assert paths
    for path in paths:
        check_read_again(check_read(path.read_text()))


# --- What makes a set -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", registry.Registry(["tests.golden"]).names("recipes.*"))
def test_recipes_of_the_next_set_are_complete(model: str) -> None:
    params = getattr(recipes, model.removeprefix("recipes."))().task()
    task.check(params)
    assert hyperparams.from_text(params.to_text()) == params
