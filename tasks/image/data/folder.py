"""Images in folders: data_dir/split/class/file."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.input import check_split
from lingvo_gpipe.tasks.image.data import images

_MAX_FILE_BYTES = 2**28
_SPLITS = ("train", "training", "val", "valid", "validation", "test")  # usual names
_EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")


class ImageFolder(images.Images):
    """Image files in the layout of `tfds.ImageFolder`: data_dir/split/class/file.

    A label is the index of a class in the sorted class names of all splits. Hidden files are
    skipped; files with other extensions are skipped and counted in a warning. What is not a regular
    file, or has more than 256 MiB, counts as unreadable.
    """

    class Params(images.Images.Params):
        """Params of ImageFolder."""

    params: Params

    @functools.cached_property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data's classes: its folders."""
        return tuple(sorted({name for split in self._splits.values() for name in split}))

    def check_there(self, split: str | None = None) -> None:
        """Refuse a missing or empty folder, or one without the split; see `Input.check_there`."""
        with _readable():
            root = self._existing_root
            classes = {name: _folders(os.path.join(root, name)) for name in _folders(root)}
        if not any(classes.values()):
            raise _is_empty(root)
        check_split(self.where, split or self.params.train_split, classes)

    @property
    def where(self) -> str:
        """Name of the data in messages."""
        return f"image folder {self._root}"

    def num_examples(self, split: str) -> int:
        """Return the number of images of a split."""
        return len(self._files(split)[0])

    def name(self, split: str, index: int) -> str:
        """Return the path of a file."""
        return self._files(split)[0][index]

    def fault(self, split: str, index: int) -> str | None:
        """Return why a file is not opened; see `Images.fault`."""
        return self._faults(split).get(index)

    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image and label; see `Images.load`."""
        paths, labels = self._tensors(split)
        return tf.io.read_file(paths[index]), labels[index]

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _tensors(self, split: str) -> tuple[tf.Tensor, tf.Tensor]:
        # Created outside the graph that needs them first: it would keep a copy.
        with tf.init_scope(), tf.device("CPU:0"):
            paths, labels = self._files(split)
            faults = self._faults(split)
            # An empty path cannot be read: the example is missing, and `fault` says why.
            names = [b"" if n in faults else os.fsencode(path) for n, path in enumerate(paths)]
            return tf.constant(names), tf.constant(labels)

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _faults(self, split: str) -> dict[int, str]:
        """Return index → why its file is not opened."""
        faults = {}
        for index, path in enumerate(self._files(split)[0]):
            try:
                size = regular_files.size_of(path)
            except OSError as error:
                faults[index] = str(error.strerror)
                continue
            if size > _MAX_FILE_BYTES:
                faults[index] = f"it has more than {_MAX_FILE_BYTES:,} bytes"
        return faults

    @functools.cached_property
    def _splits(self) -> dict[str, dict[str, list[str]]]:
        """Split → class → paths, all sorted."""
        with _readable():
            return self._scan(self._existing_root)

    @property
    def _existing_root(self) -> str:
        root = self._root
        if not os.path.isdir(root):
            problem = "is not a folder" if os.path.exists(root) else "does not exist"
            raise errors.InputError(f"image folder {root} {problem}. Give another --data_dir")
        return root

    @property
    def _root(self) -> str:
        return os.path.expanduser(self.params.data_dir)

    def _scan(self, root: str) -> dict[str, dict[str, list[str]]]:
        splits = {}
        skipped = 0
        for split in _folders(root):
            classes = {}
            for name in _folders(os.path.join(root, split)):
                folder = os.path.join(root, split, name)
                files = [f for f in sorted(os.listdir(folder)) if not f.startswith(".")]
                kept = [f for f in files if f.lower().endswith(_EXTENSIONS)]
                skipped += len(files) - len(kept)
                if not kept:
                    raise errors.InputError(
                        f"class folder {folder} has no images ({', '.join(_EXTENSIONS)}). Fill it "
                        "or remove it"
                    )
                classes[name] = [os.path.join(folder, f) for f in kept]
            splits[split] = classes
        if not any(splits.values()):
            raise _is_empty(root)
        if skipped:
            logging.warning("%s: skipped %d files that are not images", root, skipped)
        return splits

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _files(self, split: str) -> tuple[list[str], list[int]]:
        """Return paths and labels of a split."""
        check_split(self.where, split, self._splits)
        label_of = {name: label for label, name in enumerate(self.data_names)}
        files = [(p, label_of[name]) for name, ps in self._splits[split].items() for p in ps]
        return [path for path, _ in files], [label for _, label in files]


def _is_empty(root: str) -> errors.InputError:
    there = f"image folder {root} has no images in its folders SPLIT/CLASS/"
    above, name = os.path.split(os.path.abspath(root))
    classes = [each for each in _folders(root) if _holds_images(os.path.join(root, each))]
    if classes and name in _SPLITS:
        return errors.InputError(f"{there}: it is a split itself. Use --data_dir={above}")
    if classes:
        return errors.InputError(
            f"{there}: its folder {classes[0]!r} holds images itself. Move such folders into "
            f"{os.path.join(root, 'train')}, and a part of the images of each into "
            f"{os.path.join(root, 'test', classes[0])} and so on"
        )
    if _holds_images(root):
        return errors.InputError(
            f"{there}: it holds images itself. Give the folder that holds the splits, such as "
            "train, which hold the classes, such as cat"
        )
    return errors.InputError(f"{there}, such as {os.path.join(root, 'train', 'cat', '1.png')}")


def _holds_images(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(_EXTENSIONS) for entry in entries)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn an error of reading a folder into one for the user."""
    try:
        yield
    except OSError as error:
        raise errors.InputError(
            f"{error.filename} cannot be read: {error.strerror}. Correct its permissions, or "
            "give another --data_dir"
        ) from error


def _folders(path: str) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(path)
        if entry.is_dir() and not entry.name.startswith(".")
    )
