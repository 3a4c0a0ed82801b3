"""Images in folders: data_dir/split/class/file."""

from __future__ import annotations

import functools
import os

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.input import check_split
from lingvo_gpipe.tasks.image.data import images

_EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")


class ImageFolder(images.Images):
    """Image files in the layout of `tfds.ImageFolder`: data_dir/split/class/file.

    A label is the index of a class in the sorted class names of all splits. Hidden files are
    skipped; files with other extensions are skipped and counted in a warning.
    """

    class Params(images.Images.Params):
        """Params of ImageFolder."""

    params: Params

    @functools.cached_property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data's classes: its folders."""
        return tuple(sorted({name for split in self._splits.values() for name in split}))

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

    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image and label; see `Images.load`."""
        paths, labels = self._tensors(split)
        return tf.io.read_file(paths[index]), labels[index]

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _tensors(self, split: str) -> tuple[tf.Tensor, tf.Tensor]:
        # Created outside the graph that needs them first: it would keep a copy.
        with tf.init_scope(), tf.device("CPU:0"):
            paths, labels = self._files(split)
            return tf.constant([os.fsencode(path) for path in paths]), tf.constant(labels)

    @property
    def _root(self) -> str:
        return os.path.expanduser(self.params.data_dir)

    @functools.cached_property
    def _splits(self) -> dict[str, dict[str, list[str]]]:
        """Split → class → paths, all sorted.

        Raises:
            InputError: there is no such folder, or it holds no images.
        """
        splits: dict[str, dict[str, list[str]]] = {}
        skipped = 0
        try:
            for split in _folders(self._root):
                classes = splits.setdefault(split, {})
                for name in _folders(os.path.join(self._root, split)):
                    folder = os.path.join(self._root, split, name)
                    files = [f for f in sorted(os.listdir(folder)) if not f.startswith(".")]
                    shown = [f for f in files if f.lower().endswith(_EXTENSIONS)]
                    skipped += len(files) - len(shown)
                    classes[name] = [os.path.join(folder, f) for f in shown]
        except OSError as error:
            raise errors.InputError(
                f"{self.where}: {error.filename} cannot be read: {error.strerror}. Give another "
                "--data_dir"
            ) from error
        empty = [
            f"{split}/{name}"
            for split in splits
            for name in splits[split]
            if not splits[split][name]
        ]
        if empty or not any(splits.values()):
            raise errors.InputError(
                f"{self.where} has no images ({', '.join(_EXTENSIONS)}) in "
                f"{', '.join(empty) or 'its folders'}. Lay it out as SPLIT/CLASS/FILE: "
                f"{os.path.join(self._root, 'train', 'cat', '1.png')}"
            )
        if skipped:
            logging.warning("%s: skipped %d files that are not images", self._root, skipped)
        return splits

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _files(self, split: str) -> tuple[list[str], list[int]]:
        """Return paths and labels of a split."""
        check_split(self.where, split, self._splits)
        label_of = {name: label for label, name in enumerate(self.data_names)}
        files = [(p, label_of[name]) for name, ps in self._splits[split].items() for p in ps]
        return [path for path, _ in files], [label for _, label in files]


def _folders(path: str) -> list[str]:
    return sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
