"""Preparation into a folder of existing records: opened, refused, reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import records
from tests.tasks.mt import toy_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_text.write_folder(tmp_path_factory.mktemp("text"), {"de": 300, "sw": 40})


def test_the_same_params_open_what_is_there_and_others_refuse_it(
    folder: Path, tmp_path: Path
) -> None:
    params = toy_text.params(folder)
    params.instantiate().run(tmp_path / "out")
    before = (tmp_path / "out" / records.MANIFEST).stat().st_mtime_ns
    reported: list[str] = []
    params.instantiate().run(tmp_path / "out", report=reported.append)
    assert reported == [f"{tmp_path / 'out'} is prepared already"]
    assert (tmp_path / "out" / records.MANIFEST).stat().st_mtime_ns == before
    params.vocabulary.size = 331
    with pytest.raises(errors.InputError) as caught:
        params.instantiate().run(tmp_path / "out")
    first, *lines = str(caught.value).splitlines()
    assert "was prepared with other params. Use a new folder" in first
    assert lines == ["    vocabulary.size: 330 -> 331"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("years of work")
    with pytest.raises(errors.InputError, match="own is in use, but holds no records"):
        params.instantiate().run(tmp_path / "own")


def test_records_made_before_a_field_was_there_have_its_default(
    folder: Path, tmp_path: Path
) -> None:
    params = toy_text.params(folder)
    manifest = params.instantiate().run(tmp_path / "out").folder / records.MANIFEST
    reported = json.loads(manifest.read_text())
    new = ("seed: 0", "corpora[0].policy.max_ratio: None")
    kept = [line for line in reported["params"].splitlines() if line not in new]
    assert len(kept) == len(reported["params"].splitlines()) - len(new)
    manifest.write_text(json.dumps(reported | {"params": "\n".join(kept)}))
    params.instantiate().run(tmp_path / "out")
    params.seed = 1
    with pytest.raises(errors.InputError, match=r"preparation=None\n    seed: 0 -> 1$"):
        params.instantiate().run(tmp_path / "out")


def test_text_that_changed_behind_records_is_reported(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    params = toy_text.params(folder)
    params.instantiate().run(tmp_path / "out")

    def warned() -> list[str]:
        reported: list[str] = []
        params.instantiate().run(tmp_path / "out", report=reported.append)
        assert reported[0] == f"{tmp_path / 'out'} is prepared already"
        return reported[1:]

    def warning(change: str) -> list[str]:
        start = f"warning: {tmp_path / 'out'} was prepared from other text: {folder}"
        return [f"{start}/{change}. Prepare into another folder, or remove this one"]

    assert not warned()
    toy_text.write_folder(folder, {"sw": 5})
    assert warned() == warning("sw/en.test.txt was not there")
    shutil.rmtree(folder / "sw")
    path = folder / "de" / "de.test.txt"
    size = path.stat().st_size
    path.write_text("ba")
    assert warned() == warning(f"de/de.test.txt had {size} bytes, not 2")
    # Records that were made when sizes were not kept are not compared.
    manifest = tmp_path / "out" / records.MANIFEST
    kept = json.loads(manifest.read_text())
    del kept["files"]
    manifest.write_text(json.dumps(kept))
    assert not warned()


def test_records_that_are_there_need_no_text(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    params = toy_text.params(folder)
    params.instantiate().run(tmp_path / "out")
    shutil.rmtree(folder)
    reported: list[str] = []
    again = params.instantiate().run(tmp_path / "out", report=reported.append)
    assert again.pairs == ("de:en",)
    assert reported == [f"{tmp_path / 'out'} is prepared already"]
    with pytest.raises(errors.InputError, match="text does not exist"):
        params.instantiate().run(tmp_path / "other")


def test_torn_records_are_reported_before_they_are_used(folder: Path, tmp_path: Path) -> None:
    params = toy_text.params(folder)
    params.instantiate().run(tmp_path / "out")
    (tmp_path / "out" / "test.ids").write_bytes(b"")
    with pytest.raises(errors.InputError, match=r"test\.ids has 0 bytes.* Remove .*out and prep"):
        params.instantiate().run(tmp_path / "out")


def test_the_present_folder_may_be_the_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = toy_text.params(folder).instantiate().run(".")
    assert found.folder == tmp_path / "here"
    assert (tmp_path / "here" / records.MANIFEST).exists()
