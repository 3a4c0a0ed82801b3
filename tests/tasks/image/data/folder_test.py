"""Folders of image files yield the pixels and labels of `tfds.ImageFolder`."""

from __future__ import annotations

import itertools
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from tests.tasks.image import image_files
from tests.tasks.image.image_files import folder_input, pixels, values

SHARED = os.environ.get("LINGVO_GPIPE_SHARED", "")


@pytest.fixture(name="folder")
def make_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return image_files.write_folder(tmp_path)


def test_a_folder_returns_its_pixels_and_labels(folder: pathlib.Path) -> None:
    source = folder_input(folder)
    assert source.class_names == ("cat", "dog", "emu")
    found = [values(b) for b in source.evaluation("test", 2)]
    assert [len(b["label"]) for b in found] == [2, 2, 1]
    assert np.concatenate([b["label"] for b in found]).tolist() == [0, 0, 1, 2, 2]
    expected = np.stack([pixels(seed) for seed in range(9, 14)]) / np.float32(255)
    np.testing.assert_allclose(np.concatenate([b["image"] for b in found]), expected, rtol=1e-6)


def test_a_folder_is_read_from_any_position(folder: pathlib.Path) -> None:
    source = folder_input(folder, flip=True, pad=2)
    whole = [values(b) for b in itertools.islice(source.batches(7), 9)]
    later = [values(b) for b in itertools.islice(source.batches(7, 4), 5)]
    np.testing.assert_equal(later, whole[4:])
    spec = {k: tf.TensorSpec(v.shape, v.dtype) for k, v in whole[0].items()}
    assert spec == source.element_spec()


def test_labels_and_order_are_those_of_tfds(folder: pathlib.Path) -> None:
    import tensorflow_datasets as tfds

    theirs = tfds.ImageFolder(str(folder))
    assert theirs.info.features["label"].names == list(folder_input(folder).class_names)
    assert theirs.info.splits["train"].num_examples == folder_input(folder).num_examples("train")
    pairs = {
        (int(e["label"]), e["image"].tobytes())
        for e in tfds.as_numpy(theirs.as_dataset(split="test"))
    }
    own = [values(b) for b in folder_input(folder).evaluation("test", 1)]
    back = {(int(b["label"][0]), np.uint8(np.round(b["image"][0] * 255)).tobytes()) for b in own}
    assert back == pairs


def test_other_files_are_left_out_and_reported(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "test" / "dog" / "notes.txt").write_text("")
    (folder / "test" / "dog" / ".hidden.png").write_text("")
    (folder / ".git").mkdir()
    (folder / "README.md").write_text("")
    with caplog.at_level("WARNING"):
        assert folder_input(folder).num_examples("test") == 5
    assert "skipped 1 files that are not images" in caplog.text


def test_a_wrong_folder_is_named(folder: pathlib.Path) -> None:
    def refused(text: str, root: pathlib.Path, split: str = "train") -> None:
        with pytest.raises(errors.InputError, match=text) as caught:
            folder_input(root).num_examples(split)
        assert "\n" not in str(caught.value)

    refused("no cannot be read: No such file or directory. Give another --data_dir", folder / "no")
    refused("0.png cannot be read: Not a directory", folder / "train" / "cat" / "0.png")
    refused("has no split 'dev'; there are test, train", folder, "dev")
    refused(r"train has no images \(.png, .*\) in its folders. Lay it out as", folder / "train")
    (folder / "train" / "emu").mkdir()
    refused("has no images .* in train/emu. Lay it out as SPLIT/CLASS/FILE: ", folder)


def test_names_of_any_bytes_are_read(folder: pathlib.Path) -> None:
    (first, *_) = sorted((folder / "train").glob("*/*.png"))
    odd = os.path.join(os.fsencode(first.parent), b"\xff\xfe.png")
    os.rename(first, odd)
    source = folder_input(folder)
    count = sum(len(batch["label"]) for batch in source.evaluation("train"))
    assert count == source.num_examples("train")


def test_the_names_of_the_classes_are_kept_with_a_run(folder: pathlib.Path) -> None:
    source = folder_input(folder)
    (content,) = source.assets().values()
    assert content.decode().splitlines() == list(source.class_names)
    alone = folder_input(folder.with_name("gone"))
    alone.recall(source.assets())
    assert alone.class_names == source.class_names
    assert alone.assets() == source.assets()
