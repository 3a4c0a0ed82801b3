"""What TensorBoard shows before the first update, and texts in its tables."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from lingvo_gpipe import network, optim
from lingvo_gpipe.plan import describe
from lingvo_gpipe.run import loop, tensorboard
from tests.tiny_task import one_layer_task, tiny_task

RISE = optim.RateRange.Params(lowest=1e-3, highest=1.0, steps=4)


def optimizer(rate: Any) -> Any:
    return optim.Optimizer.Params(name="SGD", learning_rate=rate)


@pytest.mark.parametrize(
    ("max_steps", "count"), [(0, 1), (1, 1), (5, 5), (200, 200), (12_345, 200)]
)
def test_planned_rates_are_those_of_the_updates(max_steps: int, count: int) -> None:
    made = optimizer(RISE).instantiate()
    points = tensorboard.planned_rates(made, max_steps)
    assert len(points) == count
    assert min(points) == 0
    assert max(points) == max(max_steps - 1, 0)
    for step in list(points)[:5]:
        assert points[step] == pytest.approx(float(made.rate(tf.constant(step, tf.int64))))


def test_a_rate_that_does_not_change_is_not_drawn() -> None:
    assert tensorboard.planned_rates(optimizer(0.1).instantiate(), 9) == {}


def test_a_table_has_the_rows_and_lines_of_the_description() -> None:
    params = tiny_task()
    fields = params.input.instantiate().element_spec()
    text = tensorboard.model_table(network.analyze(params.model, fields)).replace("&#46;", ".")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        *("| cell 0", "| first", "| cell 1", "| norm", "| drop", "| head"),
    ]
    assert {row.count("|") for row in rows} == {7}
    assert "parameters&#58; 83" in text
    assert "parameters: 83" in describe.describe(params)
    params.model.layers[0].trainable = False
    *_, note = tensorboard.model_table(network.analyze(params.model, fields)).splitlines()
    assert note == "- first&#58; frozen"  # a row of the table would make other columns narrow


def test_a_run_shows_them_once(tmp_path: Path) -> None:
    for max_steps in (1, 2):
        params = one_layer_task(max_steps=max_steps, optimizer=optimizer(RISE))
        loop.run(params, tmp_path)
    found = event_accumulator.EventAccumulator(str(tmp_path / "train"), {"tensors": 0})
    found.Reload()
    planned = [event.step for event in found.Tensors("learning_rate_planned")]
    assert planned == [0]
    assert len(found.Tensors("model")) == 2


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
@pytest.mark.parametrize(
    "text",
    [
        "a | b",
        "**bold** _x_ `code` ~~x~~",
        "<2de> <b>&amp;</b> <script>",
        "[x](http://a.b) ![i](j) http://a.b",
        "# 1. - + * \\| \\",
        "\u2581li 😀 ﬁ Ж",
    ],
)
def test_a_text_is_shown_as_it_is(text: str) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html  # it warns when it is imported

    shown = markdown_to_safe_html(tensorboard.markdown_table(["x", "y"], [[text, "last"]]))
    cells = [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", shown, re.S)]
    assert cells == [text, "last"]


def test_a_line_break_is_a_space() -> None:
    assert tensorboard.markdown_table(["x"], [["a\n b\u2028c"]]).endswith("| a b c |")
