"""The notebooks run, print the outputs that they keep, and link to what exists."""

from __future__ import annotations

import json
import linecache
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[Any]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def kept(cell: Any) -> str:
    """Return what a cell printed when it was saved; pictures are left out."""
    printed = [output for output in cell["outputs"] if output["output_type"] == "stream"]
    assert all(output["name"] == "stdout" for output in printed)
    return "".join(line for output in printed for line in output["text"])


def compare(printed: str, kept: str) -> None:
    """Compare texts; losses and accuracies differ a little between machines."""
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", printed) == number.sub("#", kept)
    wanted = [float(found) for found in number.findall(kept)]
    assert [float(found) for found in number.findall(printed)] == pytest.approx(wanted, 0.25, 0.05)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_print_what_they_keep(
    notebook: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    variables: dict[str, Any] = {}
    found = cells(notebook, "code")
    assert any(map(kept, found))
    for number, cell in enumerate(found):
        source, name = "".join(cell["source"]), f"{notebook.name}, cell {number}"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), variables)  # noqa: S102 (a notebook of this project)
        compare(capsys.readouterr().out, kept(cell))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_link_to_what_exists(notebook: Path) -> None:
    assert notebook.stat().st_size < 20_000
    text = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (notebook.parent / target).exists(), target
    counts = [cell["execution_count"] for cell in cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1))  # kept from one run, in order


def test_there_is_one_of_each_kind() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["fine_tuning", "first_pipeline", "translation"]
