"""The import rule: a package imports only from packages in the rows above its own."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support import programs

ROOT = Path(__file__).parents[1]

# Packages and modules directly in `lingvo_gpipe/`, row by row: each imports from the rows above it,
# and freely inside itself. `+` joins modules that are one subject.
ROWS = (
    ("errors nests text_file", "what every other module may need"),
    (
        "console hyperparams keras_add precision seeds graphs schedule packing",
        "tools that know no layer",
    ),
    ("layers cluster", "what a network is made of; the processes that run it"),
    ("keras_layers network optim", "networks and update rules, apart"),
    ("execution", "cells on devices"),
    ("pipelining", "the layer that users build"),
    (
        "task+input+registry+callbacks",
        "network, data, training and callbacks as one tree of Params; names of models",
    ),
    ("plan", "what a step will need"),
    ("fitting run", "`fit` of a Keras model; the trainer's runs: training, checkpoints, export"),
    ("trainer+modes+recipes+repeat", "command lines"),
)
# Tasks and recipes build models: they neither run the loop nor read flags.
CLOSED_TO_MODELS = ("run.loop", "run.evaluation", "run.export", "trainer", "repeat")
WITHOUT_TENSORFLOW = (
    "schedule",
    "cluster.chief_supervisor",
    "cluster.child",
    "cluster.launch",
    "cluster.lease",
    "cluster.local",
    "cluster.members",
    "cluster.peers",
    "cluster.worker_supervisor",
    "console",
    "errors",
    "text_file",
)
TENSORFLOW = ("tensorflow", "keras", "tensorflow_datasets")

ROW_OF: dict[str, int] = {}
SUBJECT_OF: dict[str, str] = {}
for _row, (_line, _) in enumerate(ROWS):
    for _subject in _line.split():
        for _word in _subject.split("+"):
            ROW_OF[_word] = _row
            SUBJECT_OF[_word] = _subject


def lies_in(module: str, places: Iterable[str]) -> bool:
    """Whether `module`, dotted below lingvo_gpipe, is one of `places` or lies inside one."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


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
    """Return what is wrong with `module` importing the dotted name `imported`, or None."""
    if imported.split(".")[0] in ("params", "tasks"):
        return f"is a second copy of lingvo_gpipe.{imported}: import that"
    package, _, name = module.partition(".")
    if package != "lingvo_gpipe":
        return None
    if lies_in(name, WITHOUT_TENSORFLOW) and imported.split(".")[0] in TENSORFLOW:
        return f"{name} is plain Python, without TensorFlow"
    package, _, target = imported.partition(".")
    if package != "lingvo_gpipe":
        return None
    own, other = name.split(".")[0], target.split(".")[0]
    if other in ("params", "tasks"):
        allowed = {"params": ("params", "tasks"), "tasks": ("tasks",)}.get(own, ())
        return None if other in allowed else "is loaded by name, through the registry alone"
    if own == "__init__":
        return None
    if other not in ROW_OF:
        return "is not a package of ROWS: import what defines it"
    if own in ("params", "tasks"):
        return "is closed to tasks and params" if lies_in(target, CLOSED_TO_MODELS) else None
    if SUBJECT_OF[other] == SUBJECT_OF[own] or ROW_OF[other] < ROW_OF[own]:
        return None
    return f"row {ROW_OF[other]} does not lie above row {ROW_OF[own]}"


def faults(module: str, source: str) -> list[str]:
    """List the imports in `source`, the text of `module`, that break the rule."""
    own = module.split(".")
    if own[0] == "lingvo_gpipe" and own[1] not in (*ROW_OF, "__init__", "params", "tasks"):
        return [f"{module} has no row: put it into ROWS of tests/architecture_test.py"]
    found = ((name, fault(module, name)) for name in imports(module, source))
    return [f"{module} imports {name}: {text}" for name, text in found if text]


def modules() -> dict[str, Path]:
    """Map the dotted name of every source file to its path; params and tasks through links."""
    found = {}
    for top in ("lingvo_gpipe", "tests", "benchmarks"):
        for folder, _, files in os.walk(ROOT / top, followlinks=True):
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def test_every_module_keeps_the_rule() -> None:
    found = modules()
    assert "lingvo_gpipe.errors" in found
    assert "lingvo_gpipe.params.__init__" in found
    broken = [text for name, path in found.items() for text in faults(name, path.read_text())]
    assert not broken, "\n".join(broken)


def test_every_name_of_the_law_exists() -> None:
    found = modules()
    named = [*ROW_OF, *CLOSED_TO_MODELS, *WITHOUT_TENSORFLOW]
    dotted = {name.removeprefix("lingvo_gpipe.").removesuffix(".__init__") for name in found}
    assert [name for name in named if name not in dotted] == []
    assert len(ROWS) <= 10
    assert all(meaning for _, meaning in ROWS)


def test_every_package_begins_with_what_belongs_there() -> None:
    silent = [
        name
        for name, path in modules().items()
        if name.startswith("lingvo_gpipe.") and name.endswith(".__init__")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("execution.executor", "from lingvo_gpipe import pipelining", "does not lie above"),
        ("layers.dense", "from ..execution.cell_programs import Cell", "does not lie above"),
        ("execution.executor", "def f():\n  import lingvo_gpipe.task", "does not lie above"),
        ("execution.executor", "from lingvo_gpipe import Pipeline", "import what defines it"),
        ("registry", "import lingvo_gpipe.params.image", "through the registry"),
        ("schedule.named", "import tensorflow as tf", "without TensorFlow"),
        ("tasks.image.net", "import lingvo_gpipe.run.loop", "closed to tasks"),
        ("utils", "", "has no row"),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str, text: str) -> None:
    module = f"lingvo_gpipe.{module}"
    (found,) = faults(module, source)
    assert module in found
    assert text in found


@pytest.mark.parametrize(
    ("module", "source"),
    [("benchmarks.bound", "import params.image.digits"), ("tests.x_test", "from tasks import mt")],
)
def test_a_second_copy_is_named(module: str, source: str) -> None:
    (found,) = faults(module, source)
    assert "second copy" in found


def modules_loaded_by(source: str) -> set[str]:
    """Run `source` in a new interpreter and return the modules that are loaded afterwards."""
    report = "\nimport sys\nprint(*sys.modules)"
    out = programs.output(textwrap.dedent(source) + report, TF_CPP_MIN_LOG_LEVEL="2")
    return set(out.splitlines()[-1].split())


def test_plain_modules_load_no_tensorflow() -> None:
    dotted = (name.removesuffix(".__init__") for name in modules())
    plain = [
        name for name in dotted if lies_in(name.removeprefix("lingvo_gpipe."), WITHOUT_TENSORFLOW)
    ]
    assert len(plain) > len(WITHOUT_TENSORFLOW)
    plain.append("lingvo_gpipe.trainer")  # flags are read before TensorFlow is imported
    loaded = modules_loaded_by("\n".join(f"import {name}" for name in plain))
    assert loaded.issuperset(plain)
    assert loaded.isdisjoint(TENSORFLOW)
