"""Records: damaged files and other vocabularies are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def test_ids_are_as_small_as_the_vocabulary_allows() -> None:
    assert records.ids_dtype(2**16).itemsize == 2
    assert records.ids_dtype(2**16 + 1).itemsize == 4
