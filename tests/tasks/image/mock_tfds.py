"""Tiny prepared TFDS datasets with the true names, splits and features, made without a network.

    mock_tfds.prepare("food101", folder, examples=8)   # then --data_dir=folder

`tfds.testing.mock_data` draws random examples of a dataset's features; they are written by the
dataset's own builder, so that what reads real files reads these.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

# Those that are not ("train", "test").
_SPLITS = {"food101": ("train", "validation"), "imagenet2012": ("train", "validation")}


def prepare(name: str, folder: str | pathlib.Path, examples: int = 8) -> None:
    """Write a dataset with `examples` random images in each split, labels included.

    Args:
        name: of the dataset in TFDS' catalogue.
        folder: what is given as `data_dir`.
        examples: in each split.
    """
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=str(folder), try_gcs=False)

    def drawn(split: str) -> Iterator[tuple[int, Any]]:
        found = tfds.as_numpy(builder.as_dataset(split=split))
        for number, example in enumerate(itertools.islice(found, examples)):
            yield number, _decoded(builder.info.features, example)

    splits = _SPLITS.get(name, ("train", "test"))
    with tfds.testing.mock_data(examples, policy=tfds.testing.MockPolicy.USE_CODE):
        content = {split: list(drawn(split)) for split in splits}
    generators = mock.patch.object(builder, "_split_generators", return_value=content)
    # What the true dataset would take.
    space = mock.patch.object(tfds.core.utils, "has_sufficient_disk_space", return_value=True)
    with generators, space:
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(download_config=config)


def _decoded(features: Any, example: dict[str, Any]) -> dict[str, Any]:
    """Return an example as builders give it: boxes are objects of their own there."""
    import tensorflow_datasets as tfds

    return {
        key: tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
        if isinstance(features[key], tfds.features.BBoxFeature)
        else value
        for key, value in example.items()
    }
