"""Image datasets of TensorFlow Datasets, read record by record."""

from __future__ import annotations

import functools
import mmap
import os
import re
import struct
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input import check_split
from lingvo_gpipe.tasks import tfds_preparing
from lingvo_gpipe.tasks.image.data import images
from lingvo_gpipe.tasks.tfds_preparing import one_line

_BUFFER_BYTES = 1 << 16


class TFDS(images.Images):
    """An image dataset of TensorFlow Datasets by its name, such as `cifar10` or `mnist:3.*.*`.

    Records are found by their offset in the files, so each example is read alone. The dataset is
    downloaded and prepared on first use, unless `data_dir` has it already.
    """

    class Params(images.Images.Params):
        """Params of TFDS."""

        name: str = hyperparams.required("Name for `tfds.builder`.")
        data_dir = "~/tensorflow_datasets"
        download: bool = hyperparams.field(
            True, "Downloads and prepares the dataset if it is not in data_dir."
        )

    params: Params

    @functools.cached_property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data's classes; TFDS knows them before any download."""
        return tuple(self._builder.info.features[self._keys[1]].names)

    @property
    def where(self) -> str:
        """Name of the data in messages."""
        return f"TFDS dataset {self.params.name!r}"

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split; slices such as `train[:90%]` are splits."""
        return len(self._records(split)["offset"])

    def name(self, split: str, index: int) -> str:
        """Return the name of a record: its number in the split, from 0."""
        return f"{self.params.name} {split} record {index}"

    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image and label; see `Images.load`."""
        records = self._tensors(split)
        image_key, label_key = self._keys
        offset, length = records["offset"][index], records["length"][index]
        file = records["file"][index]
        # The file is read as one record with a long header and footer. Inside a flat_map, an error
        # would be raised again for ever; as a single element it belongs to this example.
        record = tf.data.FixedLengthRecordDataset(
            records["path"][file],
            record_bytes=length,
            header_bytes=offset,
            footer_bytes=records["bytes"][file] - offset - length,
            buffer_size=_BUFFER_BYTES,
        ).get_single_element()
        example = self._builder.info.features.deserialize_example(
            record, decoders={image_key: self._tfds.decode.SkipDecoding()}
        )
        label = tf.cast(example[label_key], tf.int32)
        # Test sets of competitions have −1.
        tf.debugging.assert_non_negative(label, message="it has no label")
        return example[image_key], label

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _tensors(self, split: str) -> dict[str, tf.Tensor]:
        # Created outside the graph that needs them first: it would keep a copy.
        with tf.init_scope(), tf.device("CPU:0"):
            return {name: tf.constant(value) for name, value in self._records(split).items()}

    @functools.cached_property
    def _tfds(self) -> Any:
        import tensorflow_datasets  # takes seconds, and few inputs need it

        return tensorflow_datasets

    @functools.cached_property
    def _builder(self) -> Any:
        return tfds_preparing.builder_of(self.params.name, self.params.data_dir)

    @functools.cached_property
    def _keys(self) -> tuple[str, str]:
        """Return the names of the features of image and label."""
        info = self._builder.info
        keys = list(info.supervised_keys or [])
        kinds = [type(info.features[key]).__name__ for key in keys if isinstance(key, str)]
        if kinds != ["Image", "ClassLabel"]:
            raise errors.InputError(
                f"{self.where} has {kinds or 'no supervised keys'}, not an image and a class "
                "label. Write an input of your own for it"
            )
        return keys[0], keys[1]

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _records(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return file, offset and length of each record of a split, and the files."""
        params = self.params
        tfds_preparing.prepare(self._builder, params.data_dir, download=params.download)
        info = self._builder.info
        check_split(self.where, re.split(r"[\[+]", split)[0], info.splits)
        if info.file_format.value != "tfrecord":
            raise errors.InputError(
                f"{self.where} is prepared as {info.file_format.value}, which "
                "cannot be read here. Prepare it as tfrecord"
            )
        try:
            instructions = info.splits[split].file_instructions
        except (ValueError, AssertionError, KeyError) as error:
            raise errors.InputError(
                f"{self.where}: split {split!r}: {one_line(error)}. Write it as train[:90%]"
            ) from error
        paths = [str(instruction.filename) for instruction in instructions]
        spans = [np.zeros([0, 3], np.int64)]
        try:
            for number, (path, instruction) in enumerate(zip(paths, instructions, strict=True)):
                span = _scan(path)[instruction.skip :][: instruction.take]
                spans.append(np.insert(span, 0, number, axis=1))
            sizes = np.array([os.path.getsize(path) for path in paths], np.int64)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise errors.InputError(
                f"{self.where}: {path} cannot be read: {one_line(error)}. Prepare it again"
            ) from error
        columns = dict(zip(("file", "offset", "length"), np.concatenate(spans).T, strict=True))
        return {**columns, "path": np.array(paths), "bytes": sizes}


def _scan(path: str) -> np.ndarray[Any, Any]:
    """Return [N, 2] offset and length of the contents of a TFRecord file.

    A record is 8 bytes of length, 4 of checksum, the content, and 4 of checksum.
    """
    spans: list[tuple[int, int]] = []
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        place = 0
        while place + 12 <= len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            if place + length + 16 > len(content):
                raise ValueError(f"it ends within its record {len(spans)}")
            spans.append((place + 12, length))
            place += length + 16
    return np.array(spans, np.int64).reshape(-1, 2)
