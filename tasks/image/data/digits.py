"""scikit-learn's handwritten digits.

Fields: image: [B, 8, 8, 1] float32; label: [B] int32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.input import Batch, InMemory
from lingvo_gpipe.input.serving import Serving

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
    from sklearn import datasets  # takes a second, and few inputs need it

    pixels, labels = datasets.load_digits(return_X_y=True)
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
