"""Records: damaged files and other vocabularies are refused by name."""

from __future__ import annotations

import copy as copies
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import records, vocabulary_training
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining
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
    found = records.Records(copy)
    path = found.folder / "text" / "test.de.en.target"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(errors.InputError, match=r"target has 19 lines, not 20 as the manifest"):
        found.text("test", "de:en")
    path.unlink()
    with pytest.raises(errors.InputError, match=r"target cannot be read: No such file"):
        found.text("test", "de:en")


def test_records_refuse_another_vocabulary(made: records.Records, tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"were made with vocabulary \w{12}…, not with abc"):
        made.check_vocabulary("abc")
    copy = Path(shutil.copytree(made.folder, tmp_path / "copy"))
    vocabulary_training.train(
        toy_text.sentences(100, 8), VocabularyTraining(size=300), ["de", "en"]
    ).save(copy / records.VOCABULARY)
    with pytest.raises(errors.InputError, match="were made with vocabulary"):
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
    with pytest.raises(
        errors.InputError, match=r"train.ids holds \d+ ids .* Remove .* and prepare it"
    ):
        records.Records(copy).split("train")


def test_examples_are_plain_arrays_over_mapped_files(made: records.Records) -> None:
    split = made.split("train")
    arrays = (split.lengths, *split.example(7))
    assert {type(array) for array in arrays} == {np.ndarray}
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)


def test_torn_manifests_are_named(copy: Path, tmp_path: Path) -> None:
    path = copy / records.MANIFEST
    manifest = json.loads(path.read_text())
    with pytest.raises(
        errors.InputError, match=r"no split 'dev'; there are test, train\. .*:dev=FILE"
    ):
        records.Records(copy).split("dev")
    path.write_text(path.read_text()[:50])
    with pytest.raises(errors.InputError, match=r"manifest.json is damaged"):
        records.Records(copy)
    path.write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(errors.InputError, match="is not of format 1"):
        records.Records(copy)
    with pytest.raises(errors.InputError, match=r"nothing holds no prepared text .*--output="):
        records.Records(tmp_path / "nothing")
    (tmp_path / "en.train.txt").touch()
    way = rf"--output={tmp_path}_records --translate_folder={tmp_path}$"
    with pytest.raises(errors.InputError, match=way):
        records.Records(tmp_path)


def _without(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a nested value with another value at a path; ...: nothing there."""
    value = copies.copy(value)
    if len(path) > 1:
        value[path[0]] = _without(value[path[0]], path[1:], new)
    elif new is ...:
        del value[path[0]]
    else:
        value[path[0]] = new
    return value


@pytest.mark.parametrize(
    ("path", "new", "text"),
    [
        (("pairs",), ..., "is damaged: 'pairs' is not a list"),
        (("splits",), [], "is damaged: 'splits' is not a dict"),
        (("target_tokens",), "no", "is damaged: 'target_tokens' is not a bool"),
        (("vocabulary", "size"), ..., "is damaged: 'vocabulary' has no hash and size"),
        (("vocabulary", "size"), 7, r"was written for a vocabulary of 7 ids, but \S+ has \d+\."),
        (("splits", "train", "examples"), -1, "split 'train' has no examples, ids_bytes"),
        (("splits", "train", "ids_bytes"), "1", "split 'train' has no examples, ids_bytes"),
        (("splits", "train", "pairs", 0, "count"), ..., "pairs of split 'train' are incomplete"),
        (("splits", "train", "pairs", 0, "pair"), "de:fr", "has the pair 'de:fr', which is not"),
        (("splits", "train", "pairs", 0, "first"), 3, "of pair '.*' in split 'train' do not fit"),
        (("splits", "train", "examples"), 3, r"pairs of split 'train' have \d+ of 3 examples"),
    ],
    ids=str,
)
def test_metadata_that_contradict_the_files_are_refused(
    copy: Path, path: tuple[Any, ...], new: Any, text: str
) -> None:
    file = copy / records.MANIFEST
    file.write_text(json.dumps(_without(json.loads(file.read_text()), path, new)))
    with pytest.raises(errors.InputError, match=text) as caught:
        records.Records(copy)
    assert "\n" not in str(caught.value)


def test_ids_that_the_vocabulary_does_not_have_are_refused(copy: Path) -> None:
    size = len(records.Records(copy).vocabulary)
    ids = np.fromfile(copy / "test.ids", "<u2")
    ids[-1] = size
    ids.tofile(copy / "test.ids")
    records.Records(copy).split("train")
    with pytest.raises(
        errors.InputError, match=rf"test.ids holds the id {size}, but .* ids 0 to {size - 1}\."
    ):
        records.Records(copy).check_files()
    lengths = np.fromfile(copy / "train.lengths", "<i4")
    lengths[:2] += [lengths[1] + 1, -lengths[1] - 1]
    lengths.tofile(copy / "train.lengths")
    with pytest.raises(errors.InputError, match=r"train.lengths holds a negative length\."):
        records.Records(copy).split("train")


def test_ids_are_as_small_as_the_vocabulary_allows() -> None:
    assert records.ids_dtype(2**16).itemsize == 2
    assert records.ids_dtype(2**16 + 1).itemsize == 4
