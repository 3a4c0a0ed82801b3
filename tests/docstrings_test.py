"""Every example in a docstring of the package runs and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_with_examples() -> list[str]:
    found = []
    for folder, _, files in os.walk(ROOT / "lingvo_gpipe", followlinks=True):
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py" and ">>> " in path.read_text():
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append(".".join(parts).removesuffix(".__init__"))
    return sorted(found)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
