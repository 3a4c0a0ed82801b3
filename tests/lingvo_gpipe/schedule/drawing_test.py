from __future__ import annotations

import io
import json

import numpy as np
import pytest
from matplotlib import colors, image

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import drawing, simulate
from lingvo_gpipe.schedule.table import Phase, Table

INTERLEAVED = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"
SPLIT = "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"


def run(text: str) -> simulate.Timeline:
    table = Table.from_text(text)
    return simulate.simulate(table, simulate.EQUAL_SLOTS)


def pixels(picture: bytes) -> np.ndarray:
    return image.imread(io.BytesIO(picture), format="png")[..., :3]


def share_of(colour: str, picture: np.ndarray) -> float:
    return float(np.mean(np.all(np.abs(picture - colors.to_rgb(colour)) < 0.02, axis=-1)))


def test_grid_of_a_table_is_its_own() -> None:
    table = schedule.make("gpipe", 3, 4)
    assert drawing.grid(table) == table.grid()


def test_grid_of_a_wide_table_leaves_its_middle_out() -> None:
    table = schedule.make("gpipe", 2, 12)
    assert drawing.grid(table, width=50).splitlines() == [
        "cell 0: F0 F1 F2 F3 F4 ... B7 B6 B5 B4 B3 B2 B1 B0",
        "cell 1: .  F0 F1 F2 F3 ... B6 B5 B4 B3 B2 B1 B0",
    ]


@pytest.mark.parametrize("width", [1, 10, 11, 12, 13, 30, 31, 32, 33, 34, 79, 500])
def test_grid_keeps_the_width_if_one_column_fits(width: int) -> None:
    lines = drawing.grid(schedule.make("1f1b", 3, 20), width=width).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= max(width, len("cell 0: ..."))
    assert all(line.startswith(f"cell {cell}: ") for cell, line in enumerate(lines))


@pytest.mark.parametrize(
    ("text", "colours"),
    [
        ("0F0,0B0\n1F0,1B0", {"#4C78A8", "#E08E45"}),
        ("0F0\n1F0", {"#4C78A8"}),
        (SPLIT, {"#4C78A8", "#D9B23D", "#72A776"}),
    ],
)
def test_picture_has_the_colours_of_the_phases_that_are_there(text: str, colours: set[str]) -> None:
    picture = pixels(drawing.draw(run(text)))
    every = {"#4C78A8", "#E08E45", "#D9B23D", "#72A776"}
    assert {colour for colour in every if share_of(colour, picture) > 0.01} == colours


def test_picture_shows_the_bubble_as_wide_as_it_is() -> None:
    def waiting(num_micro_batches: int) -> float:
        table = schedule.make("gpipe", 4, num_micro_batches)
        found = simulate.simulate(table, {"F": 1.0, "B": 2.0})
        picture = pixels(drawing.draw(found))
        drawn = share_of("#F1F1EE", picture)
        work = share_of("#4C78A8", picture) + share_of("#E08E45", picture)
        assert drawn / (drawn + work) == pytest.approx(found.bubble_share, abs=0.06)
        return drawn

    assert waiting(2) > waiting(4) > waiting(12)


@pytest.mark.parametrize(
    ("table", "seconds"),
    [
        (Table.from_text("0F0"), 1.0),
        (Table.from_text(INTERLEAVED), 1.0),
        (Table.from_text(SPLIT), 1.0),
        (schedule.make("1f1b", 50, 60), 1.0),
        (schedule.make("gpipe", 2, 2), 0.0),
    ],
    ids=["forwards", "several cells", "split", "large", "no time"],
)
def test_picture_of_any_table_is_a_png(table: Table, seconds: float) -> None:
    times: dict[Phase, float] = {"F": seconds, "B": seconds, "I": seconds, "W": seconds}
    assert pixels(drawing.draw(simulate.simulate(table, times))).shape[1] == 1440


@pytest.mark.parametrize(
    ("whole", "unit", "scale"),
    [
        (0.0121, None, (1e-3, "ms")),
        (3.0, None, (1.0, "s")),
        (4.2e8, "FLOPs", (1e6, "MFLOPs")),
        (0.5, "FLOPs", (1.0, "FLOPs")),
        (4.2e3, " of stated cost", (1e3, "k of stated cost")),
        (0.5, " of stated cost", (1.0, "of stated cost")),
    ],
)
def test_numbers_are_reported_in_their_unit(
    whole: float, unit: str | None, scale: tuple[float, str]
) -> None:
    assert drawing._scale(whole, unit) == scale
    found = simulate.simulate(schedule.make("gpipe", 1, 1), {"F": whole / 2, "B": whole / 2})
    assert drawing.draw(found, unit=unit) != drawing.draw(found, unit="eggs")


def test_trace_has_every_slot_of_each_timeline_in_microseconds() -> None:
    table = schedule.make("gpipe", 2, 1)
    found = simulate.simulate(table, {"F": [1.0, 2.0], "B": [2.0, 5.0]})
    other = simulate.simulate(table, {"F": 1.0, "B": 1.0})
    events = json.loads(drawing.chrome_trace({"first": found, "second": other}))["traceEvents"]
    names = {
        kind: [(e["pid"], e["args"]["name"]) for e in events if e["name"] == kind]
        for kind in ("process_name", "thread_name")
    }
    assert names["process_name"] == [(0, "first"), (1, "second")]
    assert names["thread_name"] == [(p, f"cell {k}") for p in (0, 1) for k in (0, 1)]
    order = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert order == [0, 1]
    spans = [
        {
            e["name"]: (e["tid"], e["ts"], e["dur"], e["cat"])
            for e in events
            if e["ph"] == "X" and e["pid"] == process
        }
        for process in (0, 1)
    ]
    assert spans[0] == {
        "0F0": (0, 0.0, 1e6, "forward"),
        "1F0": (1, 1e6, 2e6, "forward"),
        "1B0": (1, 3e6, 5e6, "backward"),
        "0B0": (0, 8e6, 2e6, "backward"),
    }
    assert spans[1]["0B0"] == (0, 3e6, 1e6, "backward")
