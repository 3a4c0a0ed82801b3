"""TFDS datasets are read record by record, with one line for whatever is wrong with them."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import local
from lingvo_gpipe.tasks.image import TFDS
from tests.tasks.image.image_files import pixels


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


def copy_of(dataset: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a copy of the dataset, and the first file of its test split."""
    copy = shutil.copytree(dataset, folder / "copy")
    return copy, next(copy.glob("tiny_shapes/1.0.0/*test*tfrecord*"))


def tfds_input(folder: pathlib.Path, name: str = "tiny_shapes", **more: Any) -> Any:
    more = {"batch_size": 4, "height": 6, "width": 5, "download": False, **more}
    return TFDS.Params(data_dir=str(folder), name=name, **more).instantiate()


def seeds_of(batches: Any, count: int | None = None) -> list[int]:
    """Identify the example of each image by its pixels."""
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

    refused(
        "TFDS has no dataset 'cifar11'; nearest 'cifar10_1', 'cifar10'",
        tfds_input(dataset, "cifar11"),
    )
    refused("TFDS has no dataset 'qqq/x:1.0.0'; there are", tfds_input(dataset, "qqq/x:1.0.0"))
    refused("'mnist/.*' is not prepared in .*Allow its download", tfds_input(tmp_path, "mnist"))
    refused("has no split 'dev'; there are test, train", tfds_input(dataset), "dev")
    refused("has no split 'dev'", tfds_input(dataset), "dev[:10%]")
    refused("split 'train\\+dev': .*Write it as", tfds_input(dataset), "train+dev")
    refused(r"split 'train\[:9o%\]': .*Write it as", tfds_input(dataset), "train[:9o%]")


@pytest.mark.parametrize("damage", ["empty", "missing", "length", "cut short"])
def test_a_shard_that_cannot_be_read_is_named(
    dataset: pathlib.Path, tmp_path: pathlib.Path, damage: str
) -> None:
    copy, file = copy_of(dataset, tmp_path)
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        left = {"length": b"\xff" * 8 + content[8:], "cut short": content[:-1]}
        file.write_bytes(left.get(damage, b""))
    with pytest.raises(errors.InputError, match=r"tfrecord.* cannot be read: .*Prepare it again"):
        tfds_input(copy).num_examples("test")


def test_a_broken_record_is_replaced_and_left_out(
    dataset: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy, file = copy_of(dataset, tmp_path)
    content = bytearray(file.read_bytes())
    place = content.index(b"\x89PNG")
    content[place : place + 4] = b"junk"
    file.write_bytes(content)
    whole = seeds_of(tfds_input(dataset).evaluation("test"))
    batches = tfds_input(copy).evaluation("test", 2)
    with caplog.at_level("WARNING"):
        assert seeds_of(batches) == whole[1:]
    assert batches.counts == {"left_out": 1}
    assert "broken image tiny_shapes test record 0: " in caplog.text
    source = tfds_input(copy, train_split="test", shuffle=False, batch_size=5)
    assert seeds_of(source.batches(0), 1) == [whole[1], *whole[1:]]


def test_an_image_without_a_label_is_reported(
    dataset: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy, file = copy_of(dataset, tmp_path)
    whole = seeds_of(tfds_input(dataset).evaluation("test"))
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(file))]
    first = tf.train.Example.FromString(records[0])
    first.features.feature["label"].int64_list.value[0] = -1
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in (first.SerializeToString(), *records[1:]):
            writer.write(record)
    with caplog.at_level("WARNING"):
        assert seeds_of(tfds_input(copy, max_broken_share=0.5).evaluation("test", 2)) == whole[1:]
    assert "test record 0: it has no label" in caplog.text


def test_files_to_be_downloaded_by_hand_are_reported(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.InputError) as caught:
        tfds_input(tmp_path, "imagenet2012", download=True).num_examples("train")
    text = str(caught.value)
    assert text.startswith("TFDS dataset 'imagenet2012/5.1.0' is not prepared in ")
    assert f"{tmp_path}/downloads/manual" in text
    assert "ILSVRC2012_img_train.tar" in text
    assert "\n" not in text


# --- The sets of the paper ------------------------------------------------------------------------


def test_nothing_is_downloaded_in_a_private_network(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(local.PRIVATE, "1")
    with pytest.raises(errors.InputError, match=r"is not prepared in .*, and with --workers=local"):
        tfds_input(tmp_path, "cifar10", download=True).num_examples("train")
