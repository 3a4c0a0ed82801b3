"""The documents are true: names in them exist, and commands in them run and print what is shown."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, modes, pipelining, registry, repeat, trainer
from lingvo_gpipe.cluster import members
from lingvo_gpipe.params.image import digits
from lingvo_gpipe.params.mt import multi30k
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.tasks.mt import prepare
from tests import architecture_test
from tests.support.documents import FOREIGN_FIRST_COLUMN, NAMES, ROOT, code, fenced, prose, read

ENDINGS = ("py", "md", "json", "txt", "tsv", "csv", "model")  # file names look like MODULE.NAME


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(found.read_text()), f"{name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_named_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    for named in re.findall(r"(?:^    |`|\$ )make ([a-z-]+)", read(name), flags=re.MULTILINE):
        assert named in targets, f"{name}: make {named}"


@pytest.mark.parametrize("name", NAMES)
def test_named_flags_exist(name: str) -> None:
    commands = (trainer, prepare, repeat)
    known = {name for each in commands for name in vars(each.flags().parse_args([]))}
    if name in ("docs/evidence.md", "docs/measurements.md"):  # benchmarks have further flags
        sources = [path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")]
        known.update(re.findall(r'"--([a-z_]+)"', "".join(sources)))
    text = read(name) if name != FOREIGN_FIRST_COLUMN else prose(name)
    text = re.sub(r"^#SBATCH .*$", "", text, flags=re.MULTILINE)
    for flag in re.findall(r"(?<![\w=-])--([a-z_]+)", text):  # XLA_FLAGS=--… are of XLA
        assert flag in known, f"{name}: --{flag}"


@pytest.mark.parametrize("name", NAMES)
def test_named_modes_exist(name: str) -> None:
    importlib.import_module("lingvo_gpipe.tasks.mt.task")  # registers further modes
    for mode in re.findall(r"--mode=(\w+)", prose(name)):
        assert mode in {*modes.MODES, *registry._MODES}, f"{name}: --mode={mode}"


@pytest.mark.parametrize("name", NAMES)
def test_named_models_exist(name: str) -> None:
    for model in re.findall(r"(?<![\w.])(?:image|lm|mt)\.\w+\.[A-Z]\w+", prose(name)):
        module, _, kind = f"lingvo_gpipe.params.{model}".rpartition(".")
        assert hasattr(importlib.import_module(module), kind), f"{name}: {model}"


@pytest.mark.parametrize("name", NAMES)
def test_named_fields_of_a_task_exist(name: str) -> None:
    task = digits.ConvNet().task()
    for path in re.findall(r"\b((?:model|train|eval)\.[a-z_]+)\b(?!\()", prose(name)):
        task.get(path)  # raises an error with the nearest fields


@pytest.mark.parametrize("name", NAMES)
def test_named_overrides_are_fields_of_some_task(name: str) -> None:
    tasks = (digits.ConvNet().task(), multi30k.De().task())
    for path in re.findall(r"--params_override='?\s*([a-z_]+\.[\w.\[\]]+)=", prose(name)):
        try:
            tasks[0].get(path)
        except errors.ParamsError:
            tasks[1].get(path)  # raises an error with the nearest fields


@pytest.mark.parametrize("name", NAMES)
def test_named_files_and_commands_exist(name: str) -> None:
    for path in re.findall(r"`((?:lingvo_gpipe|tests|docs|tools)/[\w./]+\w)`", prose(name)):
        assert (ROOT / path).exists(), f"{name}: {path}"
    modules = re.findall(r"(?:`|python -m )((?:benchmarks|lingvo_gpipe)\.\w+)", read(name))
    for module in modules:
        assert importlib.util.find_spec(module) is not None, f"{name}: {module}"


@functools.cache
def owned_names() -> dict[str, set[str]]:
    """Map every class of the package to its members, and every module to the names it defines."""
    found: dict[str, set[str]] = {}
    for module, path in architecture_test.modules().items():
        if not module.startswith("lingvo_gpipe."):
            continue
        tree = ast.parse(path.read_text())
        last = module.removesuffix(".__init__").rsplit(".", 1)[-1]
        found.setdefault(last, set()).update(_defined(tree.body))
        if module.endswith(".__init__"):
            found[last].update(other.stem for other in path.parent.glob("*.py"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_defined(node.body))
    return found


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.If):  # names for type checkers, exported lazily
            yield from _defined(node.body)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name.split(".")[-1] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


# Names that are both modules and root fields of a task: the class of the field.
FIELDS_BESIDE_MODULES = {
    "input": "Params",
    "decode": "Decode",
    "model": "PipelineParams",
    "score": "Scoring",
    "vocabulary": "VocabularyTraining",
}
# Not checked here: packages, whose modules other tests check, and other projects.
OUTSIDE = ("lingvo_gpipe", "tasks", "params", "image", "lm", "mt", "tf", "keras", "tfds")


@pytest.mark.parametrize("name", NAMES)
def test_named_code_exists(name: str) -> None:
    owned = owned_names()
    for span in code(name):
        for one, other in re.findall(r"(?<![\w./@{-])(\w+)\.(\w+)\b(?!\.\w)", span):
            if one in owned and one not in OUTSIDE and other not in ENDINGS:
                fields = FIELDS_BESIDE_MODULES.get(one)
                known = owned[one] | (owned[fields] if fields else set())
                assert other in known, f"{name}: {span}"
            elif one[0].isupper():
                assert one in OUTSIDE, f"{name}: {span}: this project has no class {one!r}"


@functools.cache
def texts_of_the_code() -> list[str]:
    """Return every text of the package, with `…` in place of what is filled in."""
    found = []
    for module, path in architecture_test.modules().items():
        if module.startswith("lingvo_gpipe."):
            tree = ast.parse(path.read_text())
            described = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            found += [_text(node) for node in ast.walk(tree) if node not in described]
    return [text for text in found if text]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""


def test_lines_of_troubleshooting_are_those_of_the_code() -> None:
    lines = re.findall(r"^\| `([^`]+)` \|", read("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(lines) == len(set(lines)) > 50
    unknown = []
    for line in lines:
        pieces = [piece for piece in line.split("…") if piece.strip(" .,:()")]
        assert len("".join(pieces)) > 10, line
        pattern = re.compile(".*".join(map(re.escape, pieces)))
        if not any(map(pattern.search, texts_of_the_code())):
            unknown.append(line)
    assert unknown == []


def test_packages_are_those_of_the_law() -> None:
    text = read("docs/architecture.md").split("## Packages", 1)[1].split("\n\n", 3)[2]
    shown = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    rows = [re.findall(r"`([a-z_0-9]+)/?`", cell) for cell, _ in shown]
    law = [line.replace("+", " ").split() for line, _ in architecture_test.ROWS]
    assert rows == law
    assert [meaning for _, meaning in shown] == [meaning for _, meaning in architecture_test.ROWS]


def own_files(folder: Path, document: str = "docs/first_model.md") -> dict[str, Path]:
    """Write each block of a document to the file that its first line names."""
    found = {}
    for block in fenced(document, "python"):
        name = block.splitlines()[0].removeprefix("# ")
        found[name] = folder / name
        found[name].parent.mkdir(parents=True, exist_ok=True)
        found[name].write_text(block)
    return found


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder whose packages can be imported, and forget them afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget_packages_of_the_user()


def forget_packages_of_the_user() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mymodels"]:
        del sys.modules[name]


def trainer_calls(document: str) -> list[tuple[list[str], list[str]]]:
    """Return the trainer's arguments in a document's first session, and the lines shown below."""
    session = fenced(document, "console")[0]
    calls = re.findall(
        r"^\$ python -m lingvo_gpipe\.trainer (.+)\n((?:[^$].*\n)*)", session, flags=re.MULTILINE
    )
    return [(shlex.split(arguments), shown.splitlines()) for arguments, shown in calls]


class Runs:
    """Runs blocks in this process, and fails if TensorFlow logs a warning."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        self._capsys = capsys
        self._caplog = caplog

    def __call__(self, path: Path) -> tuple[str, dict[str, Any]]:
        """Return what a block printed, and its variables."""
        variables = runpy.run_path(str(path))
        assert [record.getMessage() for record in self._caplog.records] == []
        return self._capsys.readouterr().out, variables


@pytest.fixture
def run_block(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Runs:
    return Runs(capsys, caplog)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, while it saves
def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = fenced("README.md", "python")
    path = tmp_path / "example.py"
    path.write_text(block)
    monkeypatch.chdir(tmp_path)
    model = runpy.run_path(str(path))["model"]
    saved = keras.models.load_model(tmp_path / "trained.keras")
    for one, other in zip(saved.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_keras_model_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_block: Runs
) -> None:
    monkeypatch.chdir(tmp_path)
    out, _ = run_block(own_files(tmp_path, "docs/from_keras.md")["keras_fit.py"])
    accuracy = re.fullmatch(r"accuracy (0\.\d+)\n", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


def test_own_loop_learns(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["own_loop.py"])
    accuracy = re.fullmatch(r"accuracy (0\.\d+) after 60 steps\n", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert variables["total"] == sum(
        1 for batch in variables["digits"].evaluation("test") for _ in batch["label"]
    )


def test_own_tape_gives_gradients_by_path(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["own_tape.py"])
    pipe = variables["pipe"]
    assert ast.literal_eval(out) == sorted(pipe.weights)
    assert variables["ctx"].step == variables["step"] == 2
    assert all(float(tf.reduce_max(tf.abs(mean))) > 0 for mean in pipe.state.values())


def test_own_fields_tie_and_count(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["own_fields.py"])
    assert "words/table" in out
    assert "sequence_softmax/kernel" not in variables["result"].gradients
    assert {"auxiliary_loss", "loss"} <= set(variables["result"].losses)
    assert "top3_of_keras" in variables["result"].sums


def test_own_layer_runs(tmp_path: Path, run_block: Runs) -> None:
    out, _ = run_block(own_files(tmp_path)["own_layer.py"])
    assert out.splitlines()[1] == "(8,)"
    assert ast.literal_eval(out.splitlines()[0]).keys() == {"gate", "loss"}


def test_own_statistic_is_of_the_whole_mini_batch(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["own_statistic.py"])
    assert out == "{'centred_sum/mean': TensorShape([4])}\n"
    moments = variables["result"].moments["centred_sum"]
    assert float(moments["rows"]) == 10


def test_own_data_is_a_function_of_its_position(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["own_data.py"])
    assert out == "['label', 'x'] True\n"
    sent = variables["lines"].serving()
    assert sent.fields({"points": tf.ones([2, 2])}).keys() == {"x"}


def test_own_family_has_members_of_any_size(tmp_path: Path, run_block: Runs) -> None:
    _, variables = run_block(own_files(tmp_path)["mymodels/lab/wide.py"])
    task = variables["Wide"]().resized("units", 64).task()
    assert [layer.get("units") for layer in task.model.layers[1:2]] == [64]
    assert step_plan.make_for(task).parameters == 64 * 64 + 64 + 64 * 10 + 10


def test_keras_model_is_cut(tmp_path: Path, run_block: Runs) -> None:
    out, variables = run_block(own_files(tmp_path)["keras_net.py"])
    assert out.splitlines()[0] == "True"
    assert out.splitlines()[1].startswith(f"{len(variables['pipe'].weights)} (")


def test_a_keras_model_trains_and_goes_back_into_keras(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = own_files(user_folder, "docs/from_keras.md")
    ((arguments, shown),) = trainer_calls("docs/from_keras.md")
    assert trainer.run(arguments) == 0
    out = capsys.readouterr().out
    for line in shown:
        wanted = re.escape(line).replace("…", r"(\d+)")
        assert re.search(rf"^{wanted}", out, flags=re.MULTILINE), out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Keras, while it saves
        model = runpy.run_path(str(files["mymodels/back.py"]))["model"]
    examples = digits.ConvNet().task().input.instantiate().evaluation("test", batch_size=500)
    batch = next(iter(examples))
    found = np.argmax(model.predict(batch["image"], verbose=0), -1) == batch["label"]
    accuracy = re.search(r"^test accuracy (\d\.\d+)", out, flags=re.MULTILINE)
    assert accuracy is not None
    assert np.mean(found) == pytest.approx(float(accuracy[1]), abs=1e-4)


def test_a_keras_model_learns_in_a_loop(tmp_path: Path, run_block: Runs) -> None:
    out, _ = run_block(own_files(tmp_path, "docs/from_keras.md")["keras_loop.py"])
    found = re.fullmatch(r"accuracy (0\.\d+) before, (0\.\d+) after\n", out)
    assert found is not None, out
    assert float(found[1]) < 0.6
    assert float(found[2]) > 0.85


@pytest.mark.parametrize(
    ("name", "wanted_modes"),
    [("docs/trainer.md", ["describe", "plan"]), ("docs/imagenet.md", ["plan"])],
)
def test_documents_show_what_describe_and_plan_print(
    name: str, wanted_modes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = "".join(fenced(name, "console"))
    shown = re.findall(
        r"^\$ python -m lingvo_gpipe\.trainer (.+)\n((?:[^$].*\n|\n)*)", session, flags=re.MULTILINE
    )
    assert [command.split("--mode=")[1].split()[0] for command, _ in shown] == wanted_modes
    for command, wanted in shown:
        assert trainer.run(shlex.split(command)) == 0
        # A line with nothing but … stands for some that are left out.
        pattern = ".*\n".join(map(re.escape, re.split(r"^…\n", wanted, flags=re.MULTILINE)))
        out = capsys.readouterr().out
        assert re.fullmatch(pattern, out, flags=re.DOTALL), out


def test_what_the_walkthrough_watches_is_written() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \| ", read("docs/imagenet.md").split("## 5.", 1)[1], flags=re.MULTILINE
    )
    watched = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(watched) > 5
    assert [name for name in watched if name not in texts_of_the_code()] == []


def test_what_lingvo_becomes_trains(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = own_files(user_folder, "docs/from_lingvo.md")
    assert set(files) == {  # the first and the third are Lingvo's
        "lm_small_in_lingvo.py",
        "mymodels/lm/small.py",
        "gate_in_lingvo.py",
        "gate.py",
    }
    ((arguments, (shown,)),) = trainer_calls("docs/from_lingvo.md")
    assert trainer.run(arguments) == 0
    wanted = re.escape(shown).replace("…", "")
    assert re.search(wanted, capsys.readouterr().err)
    gate = runpy.run_path(str(files["gate.py"]))["Gate"].Params(name="gate")
    pipe = pipelining.PipeliningLayer.Params(layers=[gate]).instantiate()
    x = tf.ones([3, 2])
    assert np.allclose(pipe(x), 0.5)
    assert list(pipe.weights) == ["gate/gain"]


@pytest.mark.slow
def test_own_package_trains_by_name(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = own_files(user_folder)["mymodels/lab/small.py"]
    assert len(package.read_text().splitlines()) <= 32
    calls = trainer_calls("docs/first_model.md")
    assert len(calls) == 3
    for arguments, shown in calls:
        code = trainer.run(arguments)
        out, err = capsys.readouterr()
        assert code == 0, err
        for line in shown:
            wanted = re.escape(line).replace("…", r"\d+")
            assert any(re.match(wanted, told) for told in out.splitlines()), (
                f"{line!r} not in:\n{out}"
            )
        forget_packages_of_the_user()  # as in a new process


def test_own_callback_ends_a_run_by_name(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, block = fenced("docs/callbacks.md", "python")
    package = user_folder / block.splitlines()[0].removeprefix("# ")
    package.parent.mkdir()
    package.write_text(block)
    assert len(block.splitlines()) <= 16
    ((arguments, (shown,)),) = trainer_calls("docs/callbacks.md")
    assert trainer.run(arguments) == 0
    wanted = re.escape(shown).replace("…", r"\d+")
    assert any(re.fullmatch(wanted, line) for line in capsys.readouterr().out.splitlines())


def test_the_slurm_script_names_a_cluster_and_starts_its_processes(tmp_path: Path) -> None:
    """With programs that stand for Slurm's: two nodes, whose tasks run here."""
    found = re.search(r"```bash\n(.*?)```", read("docs/hosts.md"), re.DOTALL)
    assert found is not None
    programs = {
        "scontrol": "printf 'n2\\nn10\\n'",
        "srun": 'for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "python": f'[ "$1" = -c ] && exec {sys.executable} "$@"\n'
        'echo "$LINGVO_GPIPE_TOKEN $@" >> calls',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[2,10]",
    }
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", found[1]], check=True, env=environment, cwd=tmp_path)
    path = tmp_path / "cluster-7.json"
    named = members.read(str(path))
    assert named is not None
    assert named[0] == members.Cluster("n2:2222", ("n2:2223", "n10:2223"))
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    (token,) = {call[0] for call in calls}
    assert len(token) >= 32
    read_flags = [trainer.read_flags(call[3:]) for call in calls]
    roles = [(flags.job, flags.task) for flags in read_flags if flags is not None]
    assert sorted(map(str, roles)) == ["('worker', 0)", "('worker', 1)", "(None, None)"]
    assert {flags.cluster for flags in read_flags if flags is not None} == {str(path)}
