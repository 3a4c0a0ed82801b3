"""Images and labels: what all inputs of encoded images share.

Fields: image: [B, H, W, C] float32; label: [B] int32. `preprocessing` says how a file becomes
an image.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Collection, Mapping
from typing import Literal

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, hyperparams, seeds
from lingvo_gpipe.input import Batch, Indexed, plain
from lingvo_gpipe.input.serving import Serving
from lingvo_gpipe.tasks.image.data.preprocessing import Preprocessing

_PARALLEL_CALLS = max(4, os.cpu_count() or 1)
_SAMPLES = 16
_CLASSES = "classes.txt"


class Images(Indexed):
    """Base of inputs of encoded images; subclasses define where the images are."""

    asset_names: tuple[str, ...] = (_CLASSES,)

    class Params(Indexed.Params):
        """Fields of Images."""

        height: int = hyperparams.required("H: height of the images that the network reads.")
        width: int = hyperparams.required("W: their width.")
        channels: int = hyperparams.field(
            3,
            "C: 3, or 1 for grey; files with the other number are converted; GIF and BMP need 3.",
        )
        data_dir: str = hyperparams.required("Folder of the data.")
        label_offset: int = hyperparams.field(
            0, "Added to labels; 1 leaves class 0 to a background class without images."
        )
        max_broken_share: float = hyperparams.field(
            0.01, "Share of a split's images that may be unreadable; more end the run."
        )

        resize: bool = hyperparams.field(
            False, "Resizes images of other sizes to H × W; otherwise they are an error."
        )
        antialias: bool = hyperparams.field(
            True, "Resizes with antialiasing; plain bilinear is faster."
        )
        mean: tuple[float, ...] = hyperparams.field(
            (),
            "Per channel, subtracted from pixels in [0, 1]. Empty: 0. All 0.5, std too: [-1, 1].",
        )
        std: tuple[float, ...] = hyperparams.field(
            (), "Per channel; pixels are divided by it after that. Empty: 1."
        )

        central: float = hyperparams.field(
            1.0, "Evaluation: share of height and width kept in a central crop; 0.875 for ImageNet."
        )

        random_crop: bool = hyperparams.field(
            False, "Training: a random window of the image, resized to H × W."
        )
        crop_area: tuple[float, float] = hyperparams.field(
            (0.1, 1.0), "Range of the window's share of the image."
        )
        crop_aspect: tuple[float, float] = hyperparams.field(
            (3 / 4, 4 / 3), "Range of the window's width divided by its height."
        )
        pad: int = hyperparams.field(
            0, "Training: zeros added at each edge before a random crop of H × W."
        )
        flip: bool = hyperparams.field(False, "Mirrors half of the training images.")
        policy: Literal["none", "autoaugment_v0", "randaugment"] = hyperparams.field(
            "none",
            "Training: AutoAugment's learned policy or RandAugment; shifts in pixels of ImageNet.",
        )
        policy_layers: int = hyperparams.field(2, "RandAugment's N: operations in a row.")
        policy_magnitude: float = hyperparams.field(10.0, "RandAugment's M: their magnitude.")
        brightness: float = hyperparams.field(
            0.0, "Training: largest random change of pixels in [0, 1], up or down."
        )
        saturation: tuple[float, ...] = hyperparams.field(
            (), "Training: range of a random factor on the saturation; empty: 1."
        )
        cutout: int = hyperparams.field(
            0, "Training: edge of a square set to 0 after mean and std, its centre anywhere."
        )

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._preprocessing = Preprocessing(params)
        self._recalled: tuple[str, ...] | None = None

    @property
    @abc.abstractmethod
    def data_names(self) -> tuple[str, ...]:
        """Names of the data's classes in the order of the data's labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels, the background class included."""
        if self._recalled is not None:
            return self._recalled
        return ("background",) * self.params.label_offset + self.data_names

    @abc.abstractmethod
    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image (string) and the data's label (int32), in-graph."""

    @abc.abstractmethod
    def name(self, split: str, index: int) -> str:
        """Return the name of an example's file or record."""

    def assets(self) -> dict[str, bytes]:
        """Return the names of the classes, in the order of their labels."""
        lines = "".join(f"{name}\n" for name in self.class_names)
        return {_CLASSES: lines.encode(errors="surrogateescape")}

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Take the names of the classes that a run keeps; see `Input.recall`."""
        self._recalled = tuple(assets[_CLASSES].decode(errors="surrogateescape").split("\n")[:-1])

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""
        shape = [self.params.height, self.params.width, self.params.channels]
        return {"image": tf.TensorSpec(shape), "label": tf.TensorSpec([], tf.int32)}

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`."""

        @tf.autograph.experimental.do_not_convert
        def example(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            content, label = self.load(split, row["index"])
            pixels = self._preprocessing.decoded(content)
            if seed is None:
                image = self._preprocessing.for_evaluation(pixels)
            else:
                key = seeds.fold(seeds.fold(seeds.base_seed(seed), row["epoch"]), row["index"])
                image = self._preprocessing.for_training(pixels, key)
            return {"image": image, "label": label + self.params.label_offset}

        return rows.unbatch().map(example, num_parallel_calls=_PARALLEL_CALLS).batch(batch_size)

    def find_unreadable(self, split: str, indices: Collection[int]) -> Collection[int]:
        """Return which of these images cannot be read, and name them; see `Indexed`.

        Raises:
            InputError: more than `max_broken_share` of the split's, or one has another size.
        """
        broken = set(self.unreadable(split))
        crops = self.params.random_crop and split == self.params.train_split
        needs_size = not (self.params.resize or crops)
        for index in (index for index in indices if index not in broken):
            try:
                content, _ = self.load(split, tf.constant(index, tf.int64))
                height, width, _ = self._preprocessing.decoded(content).shape
            except tf.errors.OpError as error:
                broken.add(index)
                reason = f"{self.name(split, index)}: {plain(error)}"
                logging.warning("broken image %s", reason)
                count = self.num_examples(split)
                if len(broken) > math.ceil(self.params.max_broken_share * count):
                    raise errors.InputError(
                        f"{self.where}, split {split!r}: at least {len(broken)} of {count} images "
                        f"cannot be read, more than input.max_broken_share="
                        f"{self.params.max_broken_share:g} allows, such as {reason}. Repair or "
                        "remove them, or allow more"
                    ) from error
                continue
            if needs_size and (height, width) != (self.params.height, self.params.width):
                raise errors.InputError(
                    f"{self.name(split, index)} is {height} x {width} pixels, not "
                    f"{self.params.height} x {self.params.width}. Set input.resize=True, or "
                    "input.height and input.width to the true size"
                )
        return broken

    def serving(self) -> Serving:
        """Return how an exported model is called: encoded images, evaluation's preprocessing."""
        spec = self.element_spec(training=False)["image"]

        def fields(request: Mapping[str, tf.Tensor]) -> Batch:
            def preprocessed(content: tf.Tensor) -> tf.Tensor:
                return self._preprocessing.for_evaluation(self._preprocessing.decoded(content))

            image = tf.TensorSpec(spec.shape[1:], spec.dtype)
            return {
                "image": tf.map_fn(preprocessed, request["image_bytes"], fn_output_signature=image)
            }

        return Serving({"image_bytes": tf.TensorSpec([None], tf.string)}, fields)

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return the first images of a mini-batch; see `Input.pictures`."""
        image = batch["image"][:_SAMPLES]
        if self.params.std:
            image *= tf.constant(self.params.std)
        if self.params.mean:
            image += tf.constant(self.params.mean)
        return {"samples": tf.image.convert_image_dtype(image, tf.uint8, saturate=True)}
