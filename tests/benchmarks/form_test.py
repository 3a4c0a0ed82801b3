"""Benchmarks begin and end alike, and disturbed runs do not count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.support import processes

FOLDER = Path(processes.__file__).parents[1]
ALIKE = [
    "bound",
    "breakdown",
    "build",
    "scaling",
    "schedules",
    "speedup",
    "tables",
    "plans/activations",
    "plans/prediction",
    "kernels/__main__",
    "rivals/__main__",
    "parts/groups",
    "parts/phases",
    "parts/step_checks",
]


@pytest.mark.parametrize("name", ALIKE)
def test_a_benchmark_takes_quick_and_ends_with_its_figure_and_aim(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    called = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert "processes.parser" in called
    last = main.body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    assert ast.unparse(last.value.func) == "processes.conclude"


def test_runs_are_dropped_and_counted_where_others_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {
        "a": [{"other_load": 0.0}, {"other_load": 0.5}],
        "b": [{"other_load": 0.2}],
        "c": [{"other_load": 0.06}],
    }
    assert processes.quiet(found["a"]) == found["a"][:1]
    processes.conclude("bound", "0.98", "at least 0.97", found)
    load, last = capsys.readouterr().out.splitlines()
    assert load == (
        "other load 0.000 to 0.500 cores; dropped for more than 0.06: 1 of 4 runs; 1 more count, "
        "since no run of their kind was quiet"
    )
    assert last == "bound: 0.98 (aim at least 0.97)"


def test_without_runs_the_load_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    processes.conclude("schedules", "0 worse", "0 worse")
    assert capsys.readouterr().out == "schedules: 0 worse (aim 0 worse)\n"
