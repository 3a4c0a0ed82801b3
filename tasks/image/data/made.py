"""Made-up images, which take the whole way of real ones: encoded, decoded, cropped, distorted."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.input import made
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image.data import images

# An image for each class, up to this number of them.
_MOST_IMAGES = 32
_EDGE = 8
_CLASSES = 10
_LARGER = 1.25


class MadeImages(made.Made, images.Images):
    """Encoded images of coloured squares in place of files; those of a class are alike.

    Where images are resized or cropped, they are a quarter higher and wider than H × W.
    """

    asset_names = (*images.Images.asset_names, made.FILE)
    contents = "images of coloured squares"

    class Params(made.Made.Params, images.Images.Params):
        """Params of MadeImages."""

        data_dir = ""
        classes: int = hyperparams.required("Number of classes, without a background class.")
        examples: int = hyperparams.required("Examples to train on.")
        held_out: int = hyperparams.required("Examples of each other split.")

    params: Params

    @property
    def data_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(f"class {number}" for number in range(self.params.classes))

    @property
    def where(self) -> str:
        """Name of the data in messages."""
        return "the set of made images"

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split; each name is one."""
        is_training = split == self.params.train_split
        return self.params.examples if is_training else self.params.held_out

    def name(self, split: str, index: int) -> str:
        """Return the name of an example."""
        return f"made image {index} of split {split!r}"

    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image and label; see `Images.load`."""
        del split
        label = tf.cast(index % self.params.classes, tf.int32)
        return self._encoded[label % len(self._encoded)], label

    @functools.cached_property
    def _encoded(self) -> tf.Tensor:
        """The images, as PNG."""
        params = self.params
        larger = _LARGER if params.resize or params.random_crop else 1.0
        height, width = (
            max(params.min_side, int(n * larger)) for n in (params.height, params.width)
        )
        random = np.random.RandomState(0)
        count = min(params.classes, _MOST_IMAGES)
        edges = [count, -(-height // _EDGE), -(-width // _EDGE), params.channels]
        squares = random.randint(0, 256, edges).astype(np.uint8)
        pixels = squares.repeat(_EDGE, 1).repeat(_EDGE, 2)[:, :height, :width]
        # Created outside the graph that needs them first: it would keep a copy.
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.stack([tf.io.encode_png(image) for image in pixels])


def params_like(params: images.Images.Params, task_params: Task.Params) -> MadeImages.Params:
    """Return params of made images in place of others; see `Input.Params.made`."""
    classes = made.size_of(task_params, "classes")
    count = _CLASSES if classes is None else max(1, classes - params.label_offset)
    return made.like(
        MadeImages.Params, params, data_dir="", classes=count, **made.num_examples(params)
    )
