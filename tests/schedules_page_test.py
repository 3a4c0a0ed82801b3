"""The tables, figures and pictures of schedules in the documents are those of the code."""

from __future__ import annotations

import re
import runpy

import pytest

from benchmarks import schedules as schedule_tables
from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import simulate
from tests.support.documents import NAMES, ROOT, read


def test_the_table_that_is_shown_as_refused_is_refused() -> None:
    shown = re.search(
        r"^    ScheduleError: (.+)\n((?:        .+\n)+)", read("docs/schedules.md"), re.M
    )
    assert shown is not None
    lines = [line.strip() for line in shown[0].strip().splitlines()]
    with pytest.raises(errors.ScheduleError) as caught:
        schedule.make("0F0,0F1,,,0B1,0B0\n1B0,1F0,1F1,1B1", 2, 2)
    assert [f"ScheduleError: {lines[0][15:]}", *lines[1:]] == [
        line.strip() for line in f"ScheduleError: {caught.value}".splitlines()
    ]


def test_tables_shown_are_legal() -> None:
    page = read("docs/schedules.md").split("\n## `")[0]
    found = re.findall(r"^    (0F0.*)\n    (,1F0.*)$", page, flags=re.MULTILINE)
    assert found
    for rows in found:
        assert schedule.make("\n".join(rows), 2, 2).num_cells == 2


def test_texts_of_schedules_are_their_tables() -> None:
    sections = read("docs/schedules.md").split("\n## `")[1:]
    assert [section.split("`", 1)[0] for section in sections] == list(schedule.SCHEDULES)
    for section in sections:
        name = section.split("`", 1)[0]
        rows = re.findall(r"^    (.*)$", section, flags=re.MULTILINE)
        assert "\n".join(rows) == schedule.make(name, 2, 3).to_text(), name


def test_each_schedule_has_its_picture() -> None:
    for section in read("docs/schedules.md").split("\n## `")[1:]:
        name = section.split("`", 1)[0]
        assert f"\n![{name}](figures/schedule_{name}.png)\n" in section, name


def test_figures_of_schedules_are_simulated() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (.*) \|$", read("docs/schedules.md"), flags=re.M)
    assert {name for name, _, _ in rows} == set(schedule.SCHEDULES) - {"optimal"}
    for name, V, figures in rows:
        found = []
        for K, M in ((4, 8), (8, 32)):
            table = schedule.make(name, K, M, int(V))
            for back in (1.0, 2.0):  # of I: with its recomputation, if there is one
                timeline = simulate.simulate(table, {"F": 1.0, "B": back + 1, "I": back, "W": 1.0})
                computed = (2 + back) * M * int(V)
                found.append(f"{timeline.makespan_s / computed:.3f}")
            found.append(f"{max(timeline.peak_live) / int(V):.1f}")
            found.append(f"{schedule_tables.row(name, K, M, int(V)).times_shortest:.3f}")
        assert figures == " | ".join(found), (name, V)


def test_figures_are_those_that_are_drawn() -> None:
    folder = ROOT / "docs" / "figures"
    drawn = runpy.run_path(str(folder / "draw.py"), run_name="figures")["timelines"]()
    others = {path.name for path in folder.glob("*.png")} - {f"{name}.png" for name in drawn}
    shown = "".join(map(read, NAMES))
    assert [name for name in others if f"figures/{name})" not in shown] == []  # screenshots
    assert {f"schedule_{name}" for name in schedule.SCHEDULES} <= set(drawn)
    assert set(drawn) <= {path.stem for path in folder.glob("*.png")}
    assert f"{drawn['1f1b'].bubble_share:.6f}" == f"{3 / 11:.6f}"  # cells are equal: (K-1)/(M+K-1)
