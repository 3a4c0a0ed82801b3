"""The paper's tables: models of the right size, speeds within the schedule's bound, pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.support import paper_tables, table_pictures
from lingvo_gpipe.plan import step_plan

_LETTERS = {"M": 1e6, "B": 1e9}
_PNG = b"\x89PNG"


@pytest.mark.parametrize("name", paper_tables.FAMILIES)
def test_models_have_the_printed_size(name: str) -> None:
    family = paper_tables.FAMILIES[name]
    for column in family.columns[1:3]:
        plan = step_plan.make_for(column.recipe().task())
        printed = float(column.parameters[:-1]) * _LETTERS[column.parameters[-1]]
        assert plan.parameters == pytest.approx(printed, rel=0.025), column.column
        partitions = column.column.rpartition("-")[2]
        assert plan.analysis.table.num_devices == int(partitions)
        memory = 12 * plan.parameters / family.unit
        assert memory == pytest.approx(column.parameter_memory, rel=0.01)


@pytest.mark.parametrize("name", paper_tables.FAMILIES)
def test_speeds_are_within_the_bound_and_fall_with_slower_links(name: str) -> None:
    assert tables.speed(tables.plan_of(name, 2, 2, 1)) == pytest.approx(1.0)
    assert 0.8 < tables.speed(tables.plan_of(name, 2, 8, 32)) / (32 * 8 / 39) <= 1.0
    by_link = [tables.speed(tables.plan_of(name, 3, 8, 32, link)) for link in tables.BANDWIDTHS]
    assert by_link == sorted(by_link, reverse=True)
    assert by_link[-1] < by_link[0]


def test_cells_wait_in_proportion_to_their_flops() -> None:
    plan = tables.plan_of("transformer", 2, 4, 4)
    waits = tables.waits(plan)
    assert sum(map(sum, waits)) == pytest.approx(4 * tables.STEP_S / 7)
    for (forward, back), cell in zip(waits, plan.cells, strict=True):
        assert forward / back == pytest.approx(cell.forward_s / cell.backward_s)
        assert forward / waits[0][0] == pytest.approx(cell.forward_s / plan.cells[0].forward_s)


def test_times_of_layers_replace_flops(tmp_path: Path) -> None:
    """A layer that takes as long as all others together has a cell of its own."""
    by_flops = tables.plan_of("transformer", 2, 2, 4)
    count = len(by_flops.analysis.layers)
    rows = [[1.0, 2.0, 3.0]] * count
    rows[-1] = [count, 2.0 * count, 3.0 * count, 3.0 * count]
    file = tmp_path / "times.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    by_times = tables.configured(f"transformer,2,4,{file}")
    assert [len(cell.layers) for cell in by_times.analysis.cells] == [count - 1, 1]
    assert by_times.cells[0].forward_s == pytest.approx(count - 1)
    assert by_times.cells[1].forward_s == pytest.approx(count)
    plain = tables.configured("transformer,2,4")
    assert [cell.layers for cell in plain.analysis.cells] == [
        cell.layers for cell in by_flops.analysis.cells
    ]


def test_table_2_divides_by_its_first_figure() -> None:
    found = {
        configuration: [{"speed": 2.0 * number, "share": 0.98, "other_load": 0.01 * number}]
        for number, configuration in enumerate(tables.configurations(), 1)
    }
    found["amoebanet,2,1"].append({"speed": 99.0, "share": 0.1, "other_load": 1.0})
    simulated = dict.fromkeys(found, 3.0) | {"amoebanet,8,32": 15.0}
    rows, measured = tables.table_2(found, simulated)
    assert measured["amoebanet", 2, 1] == measured["transformer", 2, 1] == 1.0
    assert measured["amoebanet", 8, 32] == 9.0
    head, *_, last = rows["amoebanet"]
    assert len(rows["amoebanet"]) == 10
    assert dict(zip(head, last, strict=True)) == {
        "M": "32",
        "K": "8",
        "paper": "3.48",
        "simulated": "5.00",
        "waiting cells": "9.00",
        "of simulated": "0.980",
        "spread": "0.980 to 0.980",
    }
    assert table_pictures.speeds(measured).startswith(_PNG)
    lines = {"paper": (1.0, 1.7, 2.7), "free links": (1.0, 1.8, 3.0)}
    assert table_pictures.links(dict.fromkeys(paper_tables.FAMILIES, lines)).startswith(_PNG)
    head = ["", "model", "", "", "12 B each, GB: paper", "ours", "activations: paper", "ours"]
    row = ["Naive-1", "3", "", "", "1.0", "1.1", "6.0", "7.0"]
    assert table_pictures.largest("Transformer", [head, row]).startswith(_PNG)


def test_wrong_flags_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flags, message in (
        (["--only=1,4"], "--only=4: the tables are 1, 2 and 3"),
        (["--only=1,3", "--profile"], "--profile is for Table 2, which --only leaves out"),
        ([f"--pictures={tmp_path}/file"], "is a file. Name a folder"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tables", *flags],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
