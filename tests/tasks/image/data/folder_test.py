"""Folders of image files yield the pixels and labels of `tfds.ImageFolder`."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import re
import subprocess
import sys

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


def test_a_wrong_folder_is_named(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def refused(text: str, root: pathlib.Path, split: str = "train") -> None:
        for look in ("num_examples", "check_there"):
            with pytest.raises(errors.InputError, match=text):
                getattr(folder_input(root), look)(split)

    folder_input(folder).check_there()
    folder_input(folder).check_there("test")
    refused("no does not exist. Give another --data_dir", tmp_path / "no")
    refused("README is not a folder", make_file(tmp_path / "README"))
    refused("has no split 'dev'; there are test, train", folder, "dev")
    (tmp_path / "bare").mkdir()
    refused("bare has no images in its folders SPLIT/CLASS/, such as ", tmp_path / "bare")
    (tmp_path / "bare" / "train").mkdir()
    refused("bare has no images in", tmp_path / "bare")
    absolute = re.escape(str(folder.resolve()))
    refused(
        rf"train has no images in .*: it is a split itself. Use --data_dir={absolute}$",
        folder / "train",
    )
    refused("holds images itself. Give the folder that holds the splits", folder / "train" / "cat")
    (folder / "train").rename(tmp_path / "unsplit")
    refused(
        "unsplit has no images .*: its folder 'cat' holds images itself. Move such folders into "
        ".*unsplit/train, and a part of the images of each into .*unsplit/test/cat and so on$",
        tmp_path / "unsplit",
    )
    (tmp_path / "unsplit").rename(folder / "train")
    (folder / "train" / "emu").mkdir()
    (tmp_path / "bare" / "train").rmdir()
    folder_input(folder).check_there()  # a look at the classes' folders alone
    with pytest.raises(errors.InputError, match=r"class folder .*train/emu has no images \(.png"):
        folder_input(folder).num_examples("train")


def test_what_may_not_be_read_is_named(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", listed)
    with pytest.raises(errors.InputError, match=r"/test/[^/]+ cannot be read: Permission denied\."):
        folder_input(folder).num_examples("train")


def test_only_regular_files_of_a_limited_size_are_opened(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [values(b)["image"] for b in folder_input(folder).evaluation("test", 1)]
    for number, name in enumerate(("0", "1")):
        (folder / "test" / "cat" / f"{name}.png").unlink()
        target = (folder / "pipe", pathlib.Path("/dev/zero"))[number]
        (folder / "test" / "cat" / f"{name}.png").symlink_to(target)
    os.mkfifo(folder / "pipe")
    (folder / "test" / "dog" / "0.png").unlink()
    (folder / "test" / "dog" / "0.png").mkdir()
    with (folder / "test" / "emu" / "0.png").open("wb") as file:  # a hole of 8 GiB
        file.truncate(2**33)
    batches = folder_input(folder, max_broken_share=0.8).evaluation("test")
    (batch,) = [values(b) for b in batches]
    np.testing.assert_array_equal(batch["image"], whole[4])
    assert batches.counts == {"left_out": 4}
    for name, reason in {
        "cat/0": "it is a pipe, not a regular file",
        "cat/1": "it is a device, not a regular file",
        "dog/0": "Is a directory",
        "emu/0": "it has more than 268,435,456 bytes",
    }.items():
        assert f"broken image {folder}/test/{name}.png: {reason}" in caplog.messages


def test_names_of_any_bytes_are_read(folder: pathlib.Path) -> None:
    (first, *_) = sorted((folder / "train").glob("*/*.png"))
    odd = os.path.join(os.fsencode(first.parent), b"\xff\xfe.png")
    os.rename(first, odd)
    source = folder_input(folder)
    count = sum(len(batch["label"]) for batch in source.evaluation("train"))
    assert count == source.num_examples("train")


def test_the_home_folder_may_be_written_short(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    short = folder_input(pathlib.Path("~") / folder.name)
    assert short.num_examples("train") == folder_input(folder).num_examples("train")


def test_the_names_of_the_classes_are_kept_with_a_run(folder: pathlib.Path) -> None:
    source = folder_input(folder)
    (content,) = source.assets().values()
    assert content.decode().splitlines() == list(source.class_names)
    alone = folder_input(folder.with_name("gone"))
    alone.recall(source.assets())
    assert alone.class_names == source.class_names
    assert alone.assets() == source.assets()


def make_file(path: pathlib.Path) -> pathlib.Path:
    path.write_text("")
    return path


@pytest.mark.skipif(
    not SHARED,
    reason="needs CIFAR-10 images, from the folder that LINGVO_GPIPE_SHARED names; it is not set",
)
def test_the_cifar10_folder_is_read(tmp_path: pathlib.Path) -> None:
    unpack = pathlib.Path(SHARED, "data", "unpack.py")
    subprocess.run([sys.executable, unpack, "images", "cifar10", tmp_path], check=True)
    source = folder_input(tmp_path, height=32, width=32, batch_size=100, flip=True, pad=4)
    assert len(source.class_names) == 10
    labels = np.concatenate([b["label"] for b in source.evaluation("test", 100)])
    assert np.bincount(labels).tolist() == [len(labels) // 10] * 10
    drawn = [values(b) for b in itertools.islice(source.batches(1), 5)]
    assert drawn[0]["image"].shape == (100, 32, 32, 3)
    assert all(len(set(b["label"].tolist())) == 10 for b in drawn)
