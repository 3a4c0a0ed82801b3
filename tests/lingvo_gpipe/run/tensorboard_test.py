"""Texts in the tables of TensorBoard."""

from __future__ import annotations

import html
import re

import pytest

from lingvo_gpipe.run import tensorboard


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
