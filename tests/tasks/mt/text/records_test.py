"""Records: damaged files and other vocabularies are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import records, vocabulary
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining
from tests.tasks.mt import toy_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> records.Records:
    folder = tmp_path_factory.mktemp("text")
    params = toy_text.params(toy_text.write_folder(folder, {"de": 300}))
    return params.instantiate().run(tmp_path_factory.mktemp("records") / "de")


@pytest.fixture
def copy(made: records.Records, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


def test_kept_text_that_is_gone_or_cut_is_refused(copy: Path) -> None:
    path = copy / "text" / "test.de.en.target"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(errors.InputError, match=r"has no text of pair 'de:en' .*shorter"):
        records.Records(copy).text("test", "de:en")
    path.unlink()
    with pytest.raises(errors.InputError, match=r"has no text of pair 'de:en' .*No such file"):
        records.Records(copy).text("test", "de:en")


def test_records_refuse_another_vocabulary(made: records.Records, copy: Path) -> None:
    with pytest.raises(errors.InputError, match=r"were made with vocabulary \w{12}…, not with abc"):
        made.check_vocabulary("abc")
    vocabulary.train(toy_text.sentences(100, 8), VocabularyTraining(size=300), ["de", "en"]).save(
        copy / records.VOCABULARY
    )
    with pytest.raises(errors.InputError, match=r"vocabulary.model is not that of the records"):
        records.Records(copy)


@pytest.mark.parametrize("name", ["train.ids", "train.lengths"])
def test_torn_records_are_named(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-4])
    with pytest.raises(errors.InputError, match=rf"{name} has \d+ bytes, not {len(content)}"):
        records.Records(copy).split("train")
    (copy / name).unlink()
    with pytest.raises(errors.InputError, match=rf"{name} cannot be read: No such"):
        records.Records(copy).split("train")


def test_lengths_that_do_not_fit_the_ids_are_refused(copy: Path) -> None:
    lengths = np.fromfile(copy / "train.lengths", "<i4")
    lengths[5] += 1
    lengths.tofile(copy / "train.lengths")
    with pytest.raises(errors.InputError, match=r"train.lengths is damaged. Remove .* and prepare"):
        records.Records(copy).split("train")


def test_examples_are_plain_arrays_over_mapped_files(made: records.Records) -> None:
    split = made.split("train")
    arrays = (split.lengths, *split.example(7))
    assert {type(array) for array in arrays} == {np.ndarray}
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)


def test_folders_that_hold_no_records_are_refused(made: records.Records, tmp_path: Path) -> None:
    with pytest.raises(
        errors.InputError, match=r"no split 'dev'; there are test, train\. .*:dev=FILE"
    ):
        made.split("dev")
    with pytest.raises(errors.InputError, match=r"nothing holds no prepared text .*--output="):
        records.Records(tmp_path / "nothing")
    (tmp_path / "en.train.txt").touch()
    way = rf"--output={tmp_path}_records --translate_folder={tmp_path}$"
    with pytest.raises(errors.InputError, match=way):
        records.Records(tmp_path)


def spoilt(manifest: dict[str, Any], what: str) -> Any:
    """Return a manifest with one thing wrong."""
    match what:
        case "format":
            manifest["format"] = 99
        case "pairs":
            del manifest["pairs"]
        case "splits":
            manifest["splits"] = []
        case "hash":
            manifest["vocabulary"] = {}
        case "span":
            del manifest["splits"]["train"]["pairs"][0]["count"]
        case "list":
            return [manifest]
    return manifest


@pytest.mark.parametrize("what", ["format", "pairs", "splits", "hash", "span", "list", "torn"])
def test_a_damaged_manifest_is_refused(copy: Path, what: str) -> None:
    file = copy / records.MANIFEST
    text = json.dumps(spoilt(json.loads(file.read_text()), what))
    file.write_text(text[:50] if what == "torn" else text)
    with pytest.raises(errors.InputError, match=r"manifest.json is damaged: .*Remove") as caught:
        records.Records(copy)
    assert "\n" not in str(caught.value)


def test_ids_are_as_small_as_the_vocabulary_allows() -> None:
    assert records.ids_dtype(2**16).itemsize == 2
    assert records.ids_dtype(2**16 + 1).itemsize == 4
