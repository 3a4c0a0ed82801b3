"""The page of fields lists every exported layer and every field, as the classes declare them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lingvo_gpipe import layers
from tools import field_reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The page by class: `layers.Dense` → its text."""
    found = {}
    for group in field_reference.markdown(ROOT, {}).split("\n## ")[1:]:
        package, *texts = group.split("\n### ")
        found.update({f"{package.strip()}.{text.split(None, 1)[0]}": text for text in texts})
    return found


def test_every_exported_layer_has_a_section(sections: dict[str, str]) -> None:
    exported = [getattr(layers, name) for name in layers.__all__]
    wanted = {each.Params.class_name() for each in exported if hasattr(each, "Params")}
    assert len(wanted) > 40
    assert wanted <= sections.keys()
    others = {"task.Train", "optim.Optimizer", "hooks.CSVLog", "network.PipelineParams"}
    assert others | {"tasks.image.TFDS", "tasks.mt.Scoring", "pipelining.PipeliningLayer"} <= (
        sections.keys()
    )


def test_every_field_is_listed_with_its_help(sections: dict[str, str]) -> None:
    listed = field_reference.classes(ROOT)
    assert [kind.class_name() for kind in listed] == list(sections)
    for kind in listed:
        text = sections[kind.class_name()]
        rows = re.findall(
            r"^\| `(\w+)` \| (`.+?`) \| (required|`.*?`) \| (.*) \|$", text, re.MULTILINE
        )
        inherited = re.findall(r"`(\w+)`", text.rpartition(": ")[2]) if "\n\nAs `" in text else []
        assert sorted([row[0] for row in rows] + inherited) == sorted(kind.fields())
        assert all(help_text for *_, help_text in rows), kind


def test_a_row_has_type_default_and_help(sections: dict[str, str]) -> None:
    dense = sections["layers.Dense"]
    assert "\n`layers.Dense`: x: \\[..., D] floating → \\[..., units]" in dense
    assert "| `units` | `int` | required | Output features. |" in dense
    assert "| `activation` | `str` | `'linear'` | Name of a Keras activation. |" in dense
    assert "\nAs `layers.Layer`: `name`, `reads`, `writes`, " in dense
    assert "| `reads` | `tuple[str, ...]` | " in sections["layers.Layer"]
