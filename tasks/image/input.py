"""Images and labels: handwritten digits, TFDS datasets, folders of image files.

Fields: image: [B, H, W, C] float32; label: [B] int32.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, hyperparams, seeds
from lingvo_gpipe import input as input_lib

_EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
_PARALLEL_CALLS = 4
_BUFFER_BYTES = 1 << 16


class SklearnDigits(input_lib.InMemory):
    """scikit-learn's 1,797 handwritten digits of 8 × 8 pixels in [0, 1]; no download.

    A fixed fifth of each class is the split `test`, the rest is `train`.
    """

    class Params(input_lib.InMemory.Params):
        """Params of SklearnDigits."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Tell the fields of one example."""
        return {"image": tf.TensorSpec([8, 8, 1]), "label": tf.TensorSpec([], tf.int32)}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        """Return split → field → array."""
        return _digits()


@functools.cache
def _digits() -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    # RandomState's numbers are the same in every version of numpy.
    random = np.random.RandomState(0)
    held_out = np.zeros(len(labels), bool)
    for label in range(10):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out[members[: round(len(members) / 5)]] = True
    return {
        split: {"image": images[chosen], "label": labels[chosen].astype(np.int32)}
        for split, chosen in (("train", ~held_out), ("test", held_out))
    }


class Images(input_lib.Indexed):
    """Base of inputs whose images are encoded one by one; subclasses define where they are."""

    class Params(input_lib.Indexed.Params):
        """Fields of Images."""

        height: int = hyperparams.required("H, of the images that the network sees.")
        width: int = hyperparams.required("W.")
        channels: int = hyperparams.field(3, "C: 3, or 1 for grey; files of the other are turned.")
        resize: bool = hyperparams.field(
            False, "Resizes images of other sizes, antialiased; else they are an error."
        )
        flip: bool = hyperparams.field(False, "Mirrors half of the training images.")
        pad: int = hyperparams.field(
            0, "Training images are padded by so many zeros a side, and H × W cut out anywhere."
        )
        mean: tuple[float, ...] = hyperparams.field(
            (), "Per channel, taken from pixels in [0, 1]; empty: 0."
        )
        std: tuple[float, ...] = hyperparams.field(
            (), "Per channel, by which they are divided after; empty: 1."
        )
        data_dir: str = hyperparams.required("Folder of the data.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if params.channels not in (1, 3):
            raise errors.InputError(f"input.channels={params.channels} is not possible. Use 1 or 3")
        for name in ("mean", "std"):
            given = getattr(params, name)
            if given and len(given) != params.channels:
                raise errors.InputError(
                    f"input.{name} has {len(given)} numbers, but images have {params.channels} "
                    "channels"
                )

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Tell the fields of one example, from params alone."""
        shape = [self.params.height, self.params.width, self.params.channels]
        return {"image": tf.TensorSpec(shape), "label": tf.TensorSpec([], tf.int32)}

    def encoded(self, rows: tf.data.Dataset, split: str) -> tf.data.Dataset:
        """Add to rows of one example their "bytes" (string), "label" (int32) and "name"."""
        raise NotImplementedError(f"{type(self).__name__} defines no encoded")

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`."""
        return (
            self.encoded(rows.unbatch(), split)
            .map(
                functools.partial(self._example, seed=seed),
                num_parallel_calls=_PARALLEL_CALLS,
                deterministic=True,
            )
            .batch(batch_size, drop_remainder=seed is not None)
        )

    def explain(self, split: str, indices: np.ndarray[Any, Any]) -> str | None:
        """Tell which of these examples cannot be read, and why; None: not known."""
        for index in indices:
            row = {"index": tf.constant([index], tf.int64), "epoch": tf.zeros([1], tf.int64)}
            rows = tf.data.Dataset.from_tensor_slices(row)
            for found in self.encoded(rows, split):
                try:
                    self._example(found, seed=None)
                except tf.errors.OpError as error:
                    name = found["name"].numpy().decode()
                    return f"{name}: {input_lib.plain(error)}"
        return None

    def _example(self, row: dict[str, tf.Tensor], seed: int | None) -> dict[str, tf.Tensor]:
        params = self.params
        pixels = tf.io.decode_image(row["bytes"], params.channels, expand_animations=False)
        pixels.set_shape([None, None, params.channels])
        image = tf.image.convert_image_dtype(pixels, tf.float32)
        size = [params.height, params.width]
        if params.resize:
            image = tf.image.resize(image, size, antialias=True)
        else:
            wanted = f"image is not of {size[0]} x {size[1]}; set input.resize, or its true size"
            tf.debugging.assert_equal(tf.shape(image)[:2], size, message=wanted, summarize=2)
            image = tf.ensure_shape(image, [*size, params.channels])
        if seed is not None and (params.flip or params.pad):
            key = seeds.fold(seeds.fold(seeds.base_seed(seed), row["epoch"]), row["index"])
            image = self._distort(image, key)
        if params.mean:
            image -= tf.constant(params.mean)
        if params.std:
            image /= tf.constant(params.std)
        return {"image": image, "label": row["label"]}

    def _distort(self, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        if self.params.pad:
            pad = self.params.pad
            wide = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]])
            image = tf.image.stateless_random_crop(wide, image.shape, seeds.fold(key, 0))
        if self.params.flip:
            image = tf.image.stateless_random_flip_left_right(image, seeds.fold(key, 1))
        return image


class ImageFolder(Images):
    """Image files in the layout of `tfds.ImageFolder`: data_dir/split/class/file.

    Labels are the places of the class names in the alphabet, over all splits. Hidden files are
    left out; files with other endings are left out and told.
    """

    class Params(Images.Params):
        """Params of ImageFolder."""

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels."""
        return tuple(sorted({name for split in self._splits.values() for name in split}))

    def num_examples(self, split: str) -> int:
        """Return the number of images of a split."""
        return len(self._files(split)[0])

    def encoded(self, rows: tf.data.Dataset, split: str) -> tf.data.Dataset:
        """Add "bytes", "label" and "name"; see `Images.encoded`."""
        with tf.device("CPU:0"):
            paths, labels = (tf.constant(column) for column in self._files(split))

        def load(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            path = paths[row["index"]]
            own = {"bytes": tf.io.read_file(path), "label": labels[row["index"]], "name": path}
            return {**row, **own}

        return rows.map(load, num_parallel_calls=_PARALLEL_CALLS, deterministic=True)

    @functools.cached_property
    def _splits(self) -> dict[str, dict[str, list[str]]]:
        """Split → class → paths, all sorted."""
        root = self.params.data_dir
        if not os.path.isdir(root):
            what = "is not a folder" if os.path.exists(root) else "does not exist"
            raise errors.InputError(f"image folder {root} {what}. Give another --data_dir")
        splits = {}
        skipped = 0
        for split in _folders(root):
            classes = {}
            for name in _folders(os.path.join(root, split)):
                folder = os.path.join(root, split, name)
                files = [f for f in sorted(os.listdir(folder)) if not f.startswith(".")]
                images = [f for f in files if f.lower().endswith(_EXTENSIONS)]
                skipped += len(files) - len(images)
                if not images:
                    raise errors.InputError(
                        f"class folder {folder} has no images ({', '.join(_EXTENSIONS)}). Fill it "
                        "or remove it"
                    )
                classes[name] = [os.path.join(folder, f) for f in images]
            splits[split] = classes
        if not any(splits.values()):
            raise errors.InputError(
                f"image folder {root} is empty: images lie in {root}/SPLIT/CLASS/, such as "
                f"{os.path.join(root, 'train', 'cat', '1.png')}"
            )
        if skipped:
            logging.warning("%s: left out %d files that are no images", root, skipped)
        return splits

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _files(self, split: str) -> tuple[list[str], list[int]]:
        """Return paths and labels of a split."""
        input_lib.check_split(f"image folder {self.params.data_dir}", split, self._splits)
        place = {name: label for label, name in enumerate(self.class_names)}
        pairs = [(p, place[name]) for name, own in self._splits[split].items() for p in own]
        return [path for path, _ in pairs], [label for _, label in pairs]


class TFDS(Images):
    """An image dataset of TensorFlow Datasets by its name, such as `cifar10` or `mnist:3.*.*`.

    Its records are found by their place in its files, so any example is read alone. It is
    downloaded and prepared when it is first used, unless it lies in `data_dir` already.
    """

    class Params(Images.Params):
        """Params of TFDS."""

        name: str = hyperparams.required("Name, as `tfds.builder` takes it.")
        data_dir = "~/tensorflow_datasets"
        download: bool = hyperparams.field(
            True, "Downloads and prepares the dataset if it is not in data_dir."
        )

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split; slices such as `train[:90%]` are splits."""
        return len(self._records(split)["offset"])

    def encoded(self, rows: tf.data.Dataset, split: str) -> tf.data.Dataset:
        """Add "bytes", "label" and "name"; see `Images.encoded`."""
        with tf.device("CPU:0"):
            found = {name: tf.constant(value) for name, value in self._records(split).items()}
        image, label = self._keys
        decoders = {image: self._tfds.decode.SkipDecoding()}
        features = self._builder.info.features

        def load(row: dict[str, tf.Tensor]) -> tf.data.Dataset:
            offset, length = found["offset"][row["index"]], found["length"][row["index"]]
            file = found["file"][row["index"]]
            # A file of which all but one record is header and footer.
            record = tf.data.FixedLengthRecordDataset(
                found["path"][file],
                record_bytes=length,
                header_bytes=offset,
                footer_bytes=found["bytes"][file] - offset - length,
                buffer_size=_BUFFER_BYTES,
            )
            return record.map(lambda content: {**row, "record": content})

        def parse(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            example = features.deserialize_example(row["record"], decoders=decoders)
            name = tf.strings.join(
                [self.params.name, split, tf.strings.as_string(row["index"])], separator=" "
            )
            own = {"bytes": example[image], "label": tf.cast(example[label], tf.int32)}
            return {"index": row["index"], "epoch": row["epoch"], **own, "name": name}

        return rows.flat_map(load).map(
            parse, num_parallel_calls=_PARALLEL_CALLS, deterministic=True
        )

    @functools.cached_property
    def _tfds(self) -> Any:
        import tensorflow_datasets  # takes seconds, and few inputs need it

        return tensorflow_datasets

    @functools.cached_property
    def _builder(self) -> Any:
        tfds, name = self._tfds, self.params.name
        try:
            builder = tfds.builder(name, data_dir=os.path.expanduser(self.params.data_dir))
        except tfds.core.DatasetNotFoundError:
            # TFDS' own message lists its whole catalogue.
            known = tfds.list_builders(with_community_datasets=False)
            near = errors.nearest(re.split("[/:]", name)[0], known)
            raise errors.InputError(
                f"TFDS has no dataset {name!r}; "
                + (f"nearest {', '.join(near)}" if near else f"it knows {len(known)} others")
            ) from None
        except (ValueError, AssertionError, RuntimeError) as error:
            raise errors.InputError(f"TFDS dataset {name!r}: {_first_line(error)}") from error
        self._prepare(builder)
        return builder

    def _prepare(self, builder: Any) -> None:
        if builder.is_prepared():
            return
        where = f"TFDS dataset {self.params.name!r} is not prepared in {self.params.data_dir}"
        if not self.params.download:
            raise errors.InputError(f"{where}. Set input.download=True, or another --data_dir")
        try:
            builder.download_and_prepare()
        except Exception as error:  # a builder may raise anything
            raise errors.InputError(
                f"{where}, and preparing it failed: {_first_line(error)}. Prepare it elsewhere "
                "and give its folder as --data_dir"
            ) from error

    @functools.cached_property
    def _keys(self) -> tuple[str, str]:
        """Return the names of its image and its label."""
        info = self._builder.info
        keys = list(info.supervised_keys or [])
        kinds = [type(info.features[key]).__name__ for key in keys if isinstance(key, str)]
        if kinds != ["Image", "ClassLabel"]:
            raise errors.InputError(
                f"TFDS dataset {self.params.name!r} gives {kinds or 'no supervised pair'}, not an "
                "image and a class label; write an input of your own for it"
            )
        return keys[0], keys[1]

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _records(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return where each record of a split is: file, offset and length; and the files."""
        info = self._builder.info
        input_lib.check_split(
            f"TFDS dataset {self.params.name!r}", re.split(r"[\[+]", split)[0], info.splits
        )
        if info.file_format.value != "tfrecord":
            raise errors.InputError(
                f"TFDS dataset {self.params.name!r} is prepared as {info.file_format.value}, which "
                "is not read here; prepare it as tfrecord"
            )
        instructions = info.splits[split].file_instructions
        paths = [str(instruction.filename) for instruction in instructions]
        spans = []
        for number, (path, instruction) in enumerate(zip(paths, instructions, strict=True)):
            own = _scan(path)[instruction.skip :][: instruction.take]
            spans.append(np.insert(own, 0, number, axis=1))
        table = np.concatenate(spans) if spans else np.zeros([0, 3], np.int64)
        if len(table) != info.splits[split].num_examples:
            raise errors.InputError(
                f"TFDS dataset {self.params.name!r}: split {split!r} has {len(table)} records, but "
                f"{info.splits[split].num_examples} are told; prepare it anew"
            )
        sizes = np.array([os.path.getsize(path) for path in paths], np.int64)
        columns = dict(zip(("file", "offset", "length"), table.T, strict=True))
        return {**columns, "path": np.array(paths), "bytes": sizes}


def _scan(path: str) -> np.ndarray[Any, Any]:
    """Return [N, 2] offset and length of the contents of a TFRecord file.

    A record is 8 bytes of length, 4 of checksum, the content, and 4 of checksum.
    """
    found = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = 0
        while place + 12 <= len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            found.append((place + 12, length))
            place += length + 16
    return np.array(found, np.int64).reshape(-1, 2)


def _folders(path: str) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(path)
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
