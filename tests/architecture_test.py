"""The import law of the house: a module imports only from rows above its own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A line is a row, a word a module or a folder of `lingvo_gpipe/`. Inside a folder imports are free,
# as they are between files that `+` joins into one subject. A new file needs its word here.
ROWS = """
errors
hyperparams+hyperparams_fields+hyperparams_text+hyperparams_types
seeds precision readable runtime graph_memory command
layers losses
stream partition schedule
recompute
simulate placement workers microbatch capacity layer_bytes
network
cells
executor
door diagnose
pipelining
input optimizer+update checkpoint summaries timeline progress metrics
update
task learner
describe logdir footprint
measure restoring
budget
fit
plan registry confusion
evaluation
export
train_loop
trainer
repeat
"""
# Tasks and recipes build models: they neither run the loop nor read flags.
FIRST_ROW_CLOSED_TO_MODELS = "evaluation"
WITHOUT_TENSORFLOW = ("partition", "schedule", "recompute", "simulate")
TENSORFLOW = ("tensorflow", "keras", "tensorflow_datasets")

ROW_OF: dict[str, int] = {}
SUBJECT_OF: dict[str, str] = {}
for _row, _line in enumerate(ROWS.split("\n")[1:-1]):
    for _subject in _line.split():
        for _word in _subject.split("+"):
            ROW_OF[_word] = _row
            SUBJECT_OF[_word] = _subject


def imports(module: str, source: str) -> Iterator[str]:
    """Yield the dotted names that `source` imports, wherever in it; `from a import b` is a.b."""
    package = module.rsplit(".", 1)[0].split(".")
    for node in ast.walk(ast.parse(source, filename=module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def fault(module: str, imported: str) -> str | None:
    """Tell what is wrong with `module` importing the dotted name `imported`, or None."""
    if imported.split(".")[0] in ("params", "tasks"):
        return f"is a second copy of lingvo_gpipe.{imported}: import that"
    own = module.split(".")
    if own[0] != "lingvo_gpipe":
        return None
    room = own[1]
    if room in WITHOUT_TENSORFLOW and imported.split(".")[0] in TENSORFLOW:
        return f"{room} is plain Python, without TensorFlow"
    if imported.split(".")[0] != "lingvo_gpipe":
        return None
    target = imported.split(".")[1]
    if target in ("params", "tasks"):
        allowed = {"params": ("params", "tasks"), "tasks": ("tasks",)}.get(room, ())
        return None if target in allowed else "is loaded by name, through the registry alone"
    if room == "__init__":
        return None
    if target not in ROW_OF:
        return "is no module of the rows: import what defines it"
    if room in ("params", "tasks"):
        closed = ROW_OF[target] >= ROW_OF[FIRST_ROW_CLOSED_TO_MODELS]
        return "is closed to tasks and params" if closed else None
    if SUBJECT_OF[target] == SUBJECT_OF[room] or ROW_OF[target] < ROW_OF[room]:
        return None
    return f"row {ROW_OF[target]} does not lie above row {ROW_OF[room]}"


def faults(module: str, source: str) -> list[str]:
    """List what `source`, the text of `module`, imports against the law."""
    own = module.split(".")
    if own[0] == "lingvo_gpipe" and own[1] not in (*ROW_OF, "__init__", "params", "tasks"):
        return [f"{module} has no row: put it into ROWS of tests/architecture_test.py"]
    found = ((name, fault(module, name)) for name in imports(module, source))
    return [f"{module} imports {name}: {text}" for name, text in found if text]


def modules() -> dict[str, Path]:
    """Map the dotted name of every source file to its path, params and tasks by their links."""
    found = {}
    for top in ("lingvo_gpipe", "tests", "benchmarks"):
        for folder, _, files in os.walk(ROOT / top, followlinks=True):
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def test_every_module_keeps_the_law() -> None:
    found = modules()
    assert "lingvo_gpipe.errors" in found
    assert "lingvo_gpipe.params.__init__" in found
    broken = [text for name, path in found.items() for text in faults(name, path.read_text())]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("lingvo_gpipe.partition", "import lingvo_gpipe.executor", "does not lie above"),
        ("lingvo_gpipe.cells", "from lingvo_gpipe import executor", "does not lie above"),
        ("lingvo_gpipe.cells", "from . import executor", "does not lie above"),
        ("lingvo_gpipe.layers.dense", "from ..cells import build", "does not lie above"),
        ("lingvo_gpipe.stream", "from lingvo_gpipe import partition", "does not lie above"),
        ("lingvo_gpipe.train_loop", "from lingvo_gpipe import trainer", "does not lie above"),
        ("lingvo_gpipe.cells", "def f():\n  import lingvo_gpipe.task", "does not lie above"),
        ("lingvo_gpipe.cells", "from lingvo_gpipe import Pipeline", "import what defines it"),
        ("lingvo_gpipe.registry", "import lingvo_gpipe.params.image", "through the registry"),
        ("lingvo_gpipe.__init__", "import lingvo_gpipe.tasks.mt", "through the registry"),
        ("lingvo_gpipe.schedule.gpipe", "import tensorflow as tf", "without TensorFlow"),
        ("lingvo_gpipe.simulate", "from keras import layers", "without TensorFlow"),
        ("lingvo_gpipe.tasks.image.net", "import lingvo_gpipe.params.image", "registry alone"),
        ("lingvo_gpipe.tasks.image.net", "import lingvo_gpipe.train_loop", "closed to tasks"),
        ("lingvo_gpipe.params.image.digits", "from lingvo_gpipe import trainer", "closed to tasks"),
        ("benchmarks.bound", "import params.image.digits", "second copy"),
        ("tests.x_test", "from tasks import image", "second copy"),
        ("lingvo_gpipe.utils", "", "has no row"),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str, text: str) -> None:
    (found,) = faults(module, source)
    assert module in found
    assert text in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lingvo_gpipe.executor", "from lingvo_gpipe import cells, errors\nimport tensorflow"),
        ("lingvo_gpipe.layers.dense", "from lingvo_gpipe.layers import base\nfrom . import pool"),
        ("lingvo_gpipe.hyperparams", "from lingvo_gpipe import hyperparams_text"),
        ("lingvo_gpipe.schedule.gpipe", "from lingvo_gpipe.schedule import table\nimport numpy"),
        ("lingvo_gpipe.tasks.image.net", "from lingvo_gpipe import task, registry"),
        ("lingvo_gpipe.params.image.digits", "from lingvo_gpipe.tasks.image import convnet"),
        ("lingvo_gpipe.__init__", "from lingvo_gpipe import pipelining"),
        ("benchmarks.bound", "import lingvo_gpipe.params.image\nfrom lingvo_gpipe import executor"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert faults(module, source) == []


def modules_loaded_by(source: str) -> set[str]:
    """Run `source` in a fresh interpreter and return the modules that it then holds."""
    report = "\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source) + report],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_plan_modules_load_no_tensorflow() -> None:
    wanted = [
        name
        for name in modules()
        if name.startswith("lingvo_gpipe.") and name.split(".")[1] in WITHOUT_TENSORFLOW
    ]
    assert {name.split(".")[1] for name in wanted} == set(WITHOUT_TENSORFLOW)
    names = [name.removesuffix(".__init__") for name in wanted]
    loaded = modules_loaded_by("\n".join(f"import {name}" for name in names))
    assert loaded.issuperset(names)
    assert loaded.isdisjoint(TENSORFLOW)


def test_models_load_under_one_name_only() -> None:
    loaded = modules_loaded_by(
        """
        import importlib, pkgutil
        for folder in ("lingvo_gpipe.tasks", "lingvo_gpipe.params"):
            package = importlib.import_module(folder)
            for found in pkgutil.walk_packages(package.__path__, folder + "."):
                importlib.import_module(found.name)
        """
    )
    assert "lingvo_gpipe.params" in loaded
    twice = [name for name in loaded if name.split(".")[0] in ("params", "tasks")]
    assert not twice
