"""Finding, downloading and preparing a dataset of TensorFlow Datasets."""

from __future__ import annotations

import os
import re
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import local


def builder_of(name: str, data_dir: str) -> Any:
    """Return the builder of a dataset.

    Args:
        name: such as `cifar10` or `wmt14_translate/de-en:1.0.0`.
        data_dir: folder of its datasets; `~` is that of the user.

    Raises:
        InputError: there is no such dataset, or what is prepared of it cannot be read.
    """
    import tensorflow_datasets as tfds  # takes seconds, and few inputs need it

    try:
        return tfds.builder(name, data_dir=os.path.expanduser(data_dir))
    except tfds.core.DatasetNotFoundError:
        # TFDS' own message lists its whole catalogue.
        names = tfds.list_builders(with_community_datasets=False)
        near = errors.suggestion(re.split("[/:]", name)[0], names)
        raise errors.InputError(f"TFDS has no dataset {name!r}; {near}") from None
    except Exception as error:  # also those of protobuf, for a file that is cut short
        raise errors.InputError(f"TFDS dataset {name!r}: {one_line(error)}") from error


def prepare(builder: Any, data_dir: str, *, download: bool) -> None:
    """Download and prepare a dataset, unless it is prepared.

    Args:
        builder: a `tfds.core.DatasetBuilder`.
        data_dir: folder of its datasets, for messages.
        download: whether it may be downloaded.

    Raises:
        InputError: it cannot or may not be prepared.
    """
    if builder.is_prepared():
        return
    where = f"TFDS dataset {builder.info.full_name!r} is not prepared in {data_dir}"
    if not download:
        raise errors.InputError(f"{where}. Allow its download, or give another folder")
    if local.is_private():
        raise errors.InputError(f"{where}, and {local.NO_NETWORK}")
    try:
        builder.download_and_prepare()
    except Exception as error:  # a builder may raise anything
        raise errors.InputError(
            f"{where}, and preparing it failed: {one_line(error)}. Prepare it elsewhere and give "
            "its folder"
        ) from error


def one_line(error: BaseException) -> str:
    """Return an error's text on one line; its kind, if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
