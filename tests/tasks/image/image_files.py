"""Small image files of known pixels, and inputs that read them."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.tasks.image import ImageFolder


def pixels(seed: int, height: int = 6, width: int = 5, channels: int = 3) -> Any:
    """Return uint8 [height, width, channels] that differs for every seed."""
    return np.random.RandomState(seed).randint(0, 256, [height, width, channels]).astype(np.uint8)


def write(path: pathlib.Path, image: Any) -> pathlib.Path:
    """Write an image as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(image).numpy())
    return path


def write_folder(root: pathlib.Path) -> pathlib.Path:
    """Lay out train/{cat,dog} with 5 and 4 images, and test/{cat,dog,emu} with 2, 1 and 2."""
    seed = 0
    for split, counts in {"train": (5, 4), "test": (2, 1, 2)}.items():
        for name, count in zip(("cat", "dog", "emu"), counts, strict=False):
            for number in range(count):
                write(root / split / name / f"{number}.png", pixels(seed))
                seed += 1
    return root


def folder_input(folder: pathlib.Path, **more: Any) -> ImageFolder:
    """Return the input of such a folder."""
    more = {"batch_size": 4, "height": 6, "width": 5, **more}
    made: ImageFolder = ImageFolder.Params(data_dir=str(folder), **more).instantiate()
    return made


def values(batch: dict[str, tf.Tensor]) -> dict[str, Any]:
    """Return a mini-batch as arrays."""
    return {name: value.numpy() for name, value in batch.items()}


def drawn(batches: Any, count: int | None = None) -> list[dict[str, Any]]:
    """Return the first mini-batches as arrays; None: all."""
    return [values(batch) for batch in itertools.islice(batches, count)]
