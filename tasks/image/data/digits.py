"""scikit-learn's handwritten digits.

Fields: image: [B, 8, 8, 1] float32; label: [B] int32.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.input import Batch, InMemory
from lingvo_gpipe.input.serving import Serving
from lingvo_gpipe.tasks.image.data import classes

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_SAMPLES = 16


class SklearnDigits(InMemory):
    """scikit-learn's 1,797 handwritten digits of 8 × 8 pixels in [0, 1]; no download.

    A fixed fifth of each class is the split `test`, the rest is `train`.
    """

    class Params(InMemory.Params):
        """Params of SklearnDigits."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example."""
        return {"image": tf.TensorSpec([8, 8, 1]), "label": tf.TensorSpec([], tf.int32)}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels."""
        return tuple("0123456789")

    def complete(self, task_params: Task.Params) -> None:
        """Fill in or check the model's number of classes; see `Input.complete`."""
        classes.complete(task_params, len(self.class_names), "the set of digits")

    def serving(self) -> Serving:
        """Return how an exported model is called: pixels in [0, 1]."""
        image = self.example_spec()["image"]
        signature = {"image": tf.TensorSpec([None, *image.shape], image.dtype)}
        return Serving(signature, dict)

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return the first images of a mini-batch; see `Input.pictures`."""
        shown = tf.image.convert_image_dtype(batch["image"][:_SAMPLES], tf.uint8, saturate=True)
        return {"samples": shown}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        """Return split → field → array."""
        return _digits()


@functools.cache
def _digits() -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
    *pixels, labels = _columns()
    images = (np.stack(pixels, 1) / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
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


def _columns() -> np.ndarray[Any, Any]:
    """Return scikit-learn's table [65, 1797]: 64 pixels and the label of each example.

    Its file is read without importing scikit-learn, which takes a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is not None:
        file = Path(*(package.submodule_search_locations or ())) / "datasets/data/digits.csv.gz"
        if file.exists():
            with gzip.open(file, "rt") as lines:
                return np.loadtxt(lines, delimiter=",", unpack=True)
    import sklearn.datasets

    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).T
