"""Digits, folders of images and TFDS datasets give the same pixels by the same rules."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.image import input as image_input

SHARED = os.environ.get("LINGVO_GPIPE_SHARED", "")


def pixels(seed: int, height: int = 6, width: int = 5, channels: int = 3) -> Any:
    return np.random.RandomState(seed).randint(0, 256, [height, width, channels]).astype(np.uint8)


@pytest.fixture(name="folder")
def make_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Lay out train/{cat,dog} and test/{cat,dog,emu} with images of known pixels."""
    seed = 0
    for split, counts in {"train": (5, 4), "test": (2, 1, 2)}.items():
        for name, count in zip(("cat", "dog", "emu"), counts, strict=False):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                content = tf.io.encode_png(pixels(seed)).numpy()
                (tmp_path / split / name / f"{number}.png").write_bytes(content)
                seed += 1
    return tmp_path


def folder_input(folder: pathlib.Path, **more: Any) -> image_input.ImageFolder:
    more = {"batch_size": 4, "height": 6, "width": 5, **more}
    made: image_input.ImageFolder = image_input.ImageFolder.Params(
        data_dir=str(folder), **more
    ).instantiate()
    return made


def values(batch: dict[str, tf.Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in batch.items()}


# --- Digits ---------------------------------------------------------------------------------------


def test_digits_hold_a_fixed_fifth_of_each_class_out() -> None:
    source = image_input.SklearnDigits.Params(batch_size=100).instantiate()
    assert (source.num_examples("train"), source.num_examples("test")) == (1438, 359)
    images: dict[str, list[bytes]] = {}
    for split in ("train", "test"):
        batches = [values(b) for b in source.evaluation(split)]
        labels = np.concatenate([b["label"] for b in batches])
        counts = np.bincount(labels, minlength=10)
        assert counts.min() >= (139 if split == "train" else 34)
        assert counts.max() <= (147 if split == "train" else 37)
        whole = np.concatenate([b["image"] for b in batches])
        assert (whole.min(), whole.max()) == (0.0, 1.0)
        images[split] = [image.tobytes() for image in whole]
    assert not set(images["train"]) & set(images["test"])
    # The split itself, by a sum that any other would change.
    first = values(next(iter(source.evaluation("test"))))
    assert (int(first["label"][:20].sum()), round(float(first["image"].sum()), 1)) == (83, 1970.8)


def test_digits_tell_their_spec() -> None:
    source = image_input.SklearnDigits.Params(batch_size=3).instantiate()
    batch = next(iter(source.batches(1)))
    assert {k: tf.TensorSpec.from_tensor(v) for k, v in batch.items()} == source.element_spec()


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_gives_its_pixels_and_labels(folder: pathlib.Path) -> None:
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


def test_distortion_is_of_training_alone_and_by_seed_epoch_and_example(
    folder: pathlib.Path,
) -> None:
    more = {"batch_size": 9, "shuffle": False}
    plain = values(next(iter(folder_input(folder, **more).batches(1))))["image"]
    source = folder_input(folder, flip=True, pad=2, **more)
    epochs = [values(b)["image"] for b in itertools.islice(source.batches(1), 40)]
    other = values(next(iter(source.batches(2))))["image"]
    assert len({epoch.tobytes() for epoch in [*epochs, other]}) == 41
    np.testing.assert_equal(values(next(iter(source.evaluation("train", 9))))["image"], plain)

    flips = folder_input(folder, flip=True, **more)
    share = []
    for batch in itertools.islice(flips.batches(1), 40):
        for image, original in zip(values(batch)["image"], plain, strict=True):
            flipped = np.array_equal(image, original[:, ::-1])
            assert flipped or np.array_equal(image, original)
            share.append(flipped)
    assert 0.4 < np.mean(share) < 0.6
    # A crop is a window of the padded image, and every offset comes up.
    offsets = set()
    for batch in itertools.islice(folder_input(folder, pad=1, **more).batches(1), 20):
        for image, original in zip(values(batch)["image"], plain, strict=True):
            wide = np.pad(original, [(1, 1), (1, 1), (0, 0)])
            fits = [
                (y, x)
                for y in range(3)
                for x in range(3)
                if np.array_equal(image, wide[y : y + 6, x : x + 5])
            ]
            assert fits
            offsets.update(fits)
    assert len(offsets) == 9


def test_pixels_are_normalised_by_channel(folder: pathlib.Path) -> None:
    source = folder_input(folder, mean=(0.5, 0.25, 0.0), std=(2.0, 1.0, 0.5))
    plain = values(next(iter(folder_input(folder).evaluation("test"))))["image"]
    found = values(next(iter(source.evaluation("test"))))["image"]
    expected = (plain - np.array([0.5, 0.25, 0.0])) / np.array([2.0, 1.0, 0.5])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_sizes_and_channels_are_turned_where_asked(folder: pathlib.Path) -> None:
    grey = folder / "test" / "dog" / "grey.jpg"
    grey.write_bytes(tf.io.encode_jpeg(pixels(1, 9, 4, 1)).numpy())
    source = folder_input(folder, height=3, width=7, resize=True)
    assert values(next(iter(source.evaluation("test", 9))))["image"].shape == (6, 3, 7, 3)
    source = folder_input(folder, height=3, width=7, resize=True, channels=1)
    assert values(next(iter(source.evaluation("test", 9))))["image"].shape == (6, 3, 7, 1)


def test_an_image_of_another_size_is_named(folder: pathlib.Path) -> None:
    odd = folder / "test" / "dog" / "odd.png"
    odd.write_bytes(tf.io.encode_png(pixels(1, 9, 4)).numpy())
    with pytest.raises(
        errors.InputError, match=r"dog/odd.png is 9 x 4 pixels, not 6 x 5. Set input.resize"
    ):
        list(folder_input(folder).evaluation("test", 3))


def test_a_file_that_is_no_image_is_named(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "train" / "dog" / "2.png").write_bytes(b"garbage")
    with caplog.at_level("WARNING"):
        drawn = list(itertools.islice(folder_input(folder).batches(0), 9))
    assert all(len(batch["label"]) == 4 for batch in drawn)
    assert "train/dog/2.png: " in caplog.text


def test_other_files_are_left_out_and_told(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "test" / "dog" / "notes.txt").write_text("")
    (folder / "test" / "dog" / ".hidden.png").write_text("")
    (folder / ".git").mkdir()
    (folder / "README.md").write_text("")
    with caplog.at_level("WARNING"):
        assert folder_input(folder).num_examples("test") == 5
    assert "left out 1 files that are no images" in caplog.text


def test_a_wrong_folder_is_named(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def refused(text: str, root: pathlib.Path, split: str = "train") -> None:
        with pytest.raises(errors.InputError, match=text):
            folder_input(root).num_examples(split)

    refused("no does not exist. Give another --data_dir", tmp_path / "no")
    refused("README is not a folder", make_file(tmp_path / "README"))
    refused("has no split 'dev'; there are test, train", folder, "dev")
    (tmp_path / "bare").mkdir()
    refused("bare is empty: images lie in .*bare/SPLIT/CLASS/", tmp_path / "bare")
    (tmp_path / "bare" / "train").mkdir()
    refused("bare is empty", tmp_path / "bare")
    (folder / "train" / "emu").mkdir()
    (tmp_path / "bare" / "train").rmdir()
    refused(r"class folder .*train/emu has no images \(.png", folder)


def make_file(path: pathlib.Path) -> pathlib.Path:
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"channels": 2}, "input.channels=2 is not possible. Use 1 or 3"),
        ({"mean": (0.5,)}, "input.mean has 1 numbers, but images have 3 channels"),
    ],
)
def test_wrong_params_are_refused(folder: pathlib.Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InputError, match=text):
        folder_input(folder, **more)


def test_params_go_to_text_and_back() -> None:
    params = image_input.TFDS.Params(batch_size=3, name="cifar10", height=3, width=3, mean=(0.5,))
    assert hyperparams.from_text(params.to_text()) == params


@pytest.mark.skipif(not SHARED, reason="LINGVO_GPIPE_SHARED names no folder of shared data")
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


# --- TFDS -----------------------------------------------------------------------------------------


@pytest.fixture(name="dataset", scope="module")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prepare a dataset of 23 images in several files, without a network."""
    import tensorflow_datasets as tfds

    class TinyShapes(tfds.core.GeneratorBasedBuilder):
        """Images of known pixels."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(6, 5, 3)),
                    "label": tfds.features.ClassLabel(num_classes=4),
                    "seed": np.int64,
                }
            )
            return self.dataset_info_from_configs(
                features=features, supervised_keys=("image", "label")
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            del dl_manager
            return {
                "train": self._generate_examples(0, 23),
                "test": self._generate_examples(50, 55),
            }

        def _generate_examples(self, first: int, last: int) -> Any:
            for seed in range(first, last):
                yield seed, {"image": pixels(seed), "label": seed % 4, "seed": seed}

    folder = tmp_path_factory.mktemp("tfds")
    builder = TinyShapes(data_dir=str(folder))
    config = tfds.download.DownloadConfig(num_shards=3)
    builder.download_and_prepare(download_config=config)
    return folder


def tfds_input(folder: pathlib.Path, name: str = "tiny_shapes", **more: Any) -> Any:
    more = {"batch_size": 4, "height": 6, "width": 5, "download": False, **more}
    return image_input.TFDS.Params(data_dir=str(folder), name=name, **more).instantiate()


def seeds_of(batches: Any, count: int | None = None) -> list[int]:
    """Tell by its pixels which example each image is."""
    known = {
        (pixels(seed) / np.float32(255)).tobytes(): seed for seed in (*range(23), *range(50, 55))
    }
    found = []
    for batch in itertools.islice(batches, count):
        for image, label in zip(batch["image"].numpy(), batch["label"].numpy(), strict=True):
            back = (np.round(image * 255).astype(np.uint8) / np.float32(255)).tobytes()
            found.append(known[back])
            assert label == known[back] % 4
    return found


def test_tfds_examples_are_each_read_alone(dataset: pathlib.Path) -> None:
    assert len(list(dataset.glob("tiny_shapes/1.0.0/*train*tfrecord*"))) == 3
    source = tfds_input(dataset)
    assert (source.num_examples("train"), source.num_examples("test")) == (23, 5)
    assert sorted(seeds_of(source.evaluation("train", 5))) == list(range(23))
    assert sorted(seeds_of(source.evaluation("test"))) == list(range(50, 55))
    drawn = seeds_of(source.batches(1), 23)
    assert [sorted(drawn[n : n + 23]) for n in (0, 23, 46, 69)] == [list(range(23))] * 4
    assert seeds_of(source.batches(1, 11), 12) == drawn[44:]


def test_a_tfds_split_may_be_a_slice(dataset: pathlib.Path) -> None:
    source = tfds_input(dataset)
    parts = [seeds_of(source.evaluation(split)) for split in ("train[:70%]", "train[70%:]")]
    assert [len(part) for part in parts] == [16, 7]
    assert parts[0] + parts[1] == seeds_of(source.evaluation("train"))


def test_a_wrong_tfds_dataset_is_named_in_one_line(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def refused(text: str, source: Any, split: str = "train") -> None:
        with pytest.raises(errors.InputError, match=text) as caught:
            source.num_examples(split)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300

    refused("TFDS has no dataset 'cifar11'; nearest cifar10", tfds_input(dataset, "cifar11"))
    refused("TFDS has no dataset 'qqq/x:1.0.0'; it knows", tfds_input(dataset, "qqq/x:1.0.0"))
    refused("'mnist' is not prepared in .*Set input.download=True", tfds_input(tmp_path, "mnist"))
    refused("has no split 'dev'; there are test, train", tfds_input(dataset), "dev")
    refused("has no split 'dev'", tfds_input(dataset), "dev[:10%]")


def test_a_tfds_dataset_with_a_record_less_is_refused(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    import shutil

    copy = shutil.copytree(dataset, tmp_path / "copy")
    (file, *_) = copy.glob("tiny_shapes/1.0.0/*test*tfrecord*")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little") + 16
    file.write_bytes(content[length:])
    with pytest.raises(errors.InputError, match="has 4 records, but 5 are told; prepare it anew"):
        tfds_input(copy).num_examples("test")
