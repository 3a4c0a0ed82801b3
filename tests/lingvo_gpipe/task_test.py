"""How params of a run are compared with those with which it was started."""

from __future__ import annotations

from lingvo_gpipe import task
from tests import sliced_task
from tests.tiny_task import tiny_task


def test_what_is_read_at_the_beginning_alone_may_change() -> None:
    params = tiny_task()
    params.train.start.without = ("head/*",)
    found = task.change(tiny_task().to_text(), params.to_text())
    assert found.lines == ("train.start.without: () -> ('head/*',)",)
    assert found.refused == ()


def test_cells_per_device_may_change() -> None:
    params = tiny_task()
    params.model.set(schedule="zb_v", cells_per_device=2)
    assert task.change(tiny_task().to_text(), params.to_text()).refused == ()


def test_how_a_layer_is_computed_may_change() -> None:
    params = tiny_task()
    params.model.layers[0].set(recompute=True, cost=3.0)
    assert task.change(tiny_task().to_text(), params.to_text()).refused == ()


def test_slices_of_layers_may_change() -> None:
    texts = []
    for slices in (1, 2):
        params = sliced_task.task_of(sliced_task.WHOLE)
        params.model.layers[0].slices = slices
        texts.append(params.to_text())
    assert task.change(texts[0], texts[1]).refused == ()
    assert task.change(texts[1], texts[0]).refused == ()
