"""How params of a run are compared with those with which it was started."""

from __future__ import annotations

import pytest

from lingvo_gpipe import hyperparams, task
from tests.tiny_task import tiny_task


@pytest.fixture(autouse=True)
def _readable() -> None:
    hyperparams.register_package("tests")


def without(text: str, path: str) -> str:
    """Return a text as it was written before the field `path` existed."""
    lines = text.splitlines(keepends=True)
    left = [line for line in lines if not line.startswith(f"{path}: ")]
    assert len(left) == len(lines) - 1
    return "".join(left)


def test_what_is_read_at_the_beginning_alone_may_change() -> None:
    params = tiny_task()
    params.train.start.set(without=("head/*",), averages=False)
    found = task.change(tiny_task().to_text(), params.to_text())
    assert found.lines == (
        "train.start.without: () -> ('head/*',)",
        "train.start.averages: True -> False",
    )
    assert found.refused == ()


def test_cells_per_device_may_change() -> None:
    params = tiny_task()
    params.model.set(schedule="zb_v", cells_per_device=2)
    assert task.change(tiny_task().to_text(), params.to_text()).refused == ()


def test_a_field_that_came_later_had_its_default() -> None:
    params = tiny_task()
    old = without(params.to_text(), "input.shuffle")
    assert task.change(old, params.to_text()).lines == ()
    params.input.shuffle = False
    assert task.change(old, params.to_text()).refused == ("input.shuffle: True -> False",)


def test_a_text_that_cannot_be_read_is_compared_line_by_line() -> None:
    new = tiny_task().to_text()
    old = without(new, "input.shuffle").replace("tiny_task.Points", "tiny_task.Gone")
    assert task.change(old, new).refused == (
        "input.class: tests.tiny_task.Gone -> tests.tiny_task.Points",
        "+ input.shuffle: True",
    )
