"""Images in folders: data_dir/split/class/file."""

from __future__ import annotations

import functools
import os

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.input import check_split
from lingvo_gpipe.tasks.image import images

_EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")


class ImageFolder(images.Images):
    """Image files in the layout of `tfds.ImageFolder`: data_dir/split/class/file.

    Labels are the places of the class names in the alphabet, over all splits. Hidden files are
    left out; files with other endings are left out and told.
    """

    class Params(images.Images.Params):
        """Params of ImageFolder."""

    @functools.cached_property
    def own_names(self) -> tuple[str, ...]:
        """Names of the data's classes: its folders."""
        return tuple(sorted({name for split in self._splits.values() for name in split}))

    @property
    def where(self) -> str:
        """What the data is called in messages."""
        return f"image folder {self._root}"

    def num_examples(self, split: str) -> int:
        """Return the number of images of a split."""
        return len(self._files(split)[0])

    def name(self, split: str, index: int) -> str:
        """Return the path of a file."""
        return self._files(split)[0][index]

    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's file and label; see `Images.load`."""
        paths, labels = self._tensors(split)
        return tf.io.read_file(paths[index]), labels[index]

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _tensors(self, split: str) -> tuple[tf.Tensor, tf.Tensor]:
        # Outside the graph that asks first, which would keep a copy of them.
        with tf.init_scope(), tf.device("CPU:0"):
            paths, labels = self._files(split)
            return tf.constant([os.fsencode(path) for path in paths]), tf.constant(labels)

    @functools.cached_property
    def _splits(self) -> dict[str, dict[str, list[str]]]:
        """Split → class → paths, all sorted."""
        root = self._root
        if not os.path.isdir(root):
            what = "is not a folder" if os.path.exists(root) else "does not exist"
            raise errors.InputError(f"image folder {root} {what}. Give another --data_dir")
        try:
            return self._found(root)
        except OSError as error:
            raise errors.InputError(
                f"{error.filename} cannot be read: {error.strerror}. Mend its permissions, or give "
                "another --data_dir"
            ) from error

    @property
    def _root(self) -> str:
        return os.path.expanduser(self.params.data_dir)

    def _found(self, root: str) -> dict[str, dict[str, list[str]]]:
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
        check_split(self.where, split, self._splits)
        place = {name: label for label, name in enumerate(self.own_names)}
        pairs = [(p, place[name]) for name, own in self._splits[split].items() for p in own]
        return [path for path, _ in pairs], [label for _, label in pairs]


def _folders(path: str) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(path)
        if entry.is_dir() and not entry.name.startswith(".")
    )
