"""Images and labels: what all inputs of encoded images share.

Fields: image: [B, H, W, C] float32 (evaluation with several crops: [B, crops, H, W, C]);
label: [B] int32. `preprocessing` says how an image becomes one of them.
"""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, seeds
from lingvo_gpipe.input import Batch, Indexed, Input, Repair, as_written, plain
from lingvo_gpipe.input.serving import Serving
from lingvo_gpipe.tasks.image.data import broken, classes
from lingvo_gpipe.tasks.image.data.preprocessing import Preprocessing

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_PARALLEL_CALLS = max(4, os.cpu_count() or 1)
# Mini-batches that are read at the same time.
_PARALLEL_BATCHES = 2
_SAMPLES = 16
_CENTRE = 4  # among several crops
_CLASSES = "classes.txt"


class Images(Indexed):
    """Base of inputs of encoded images; subclasses define where the images are."""

    asset_names: tuple[str, ...] = (_CLASSES,)
    training_fields = (
        *Indexed.training_fields,
        *("random_crop", "crop_area", "crop_aspect", "pad", "flip", "brightness", "saturation"),
        *("policy", "policy_layers", "policy_magnitude", "cutout"),
    )

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
        min_side: int = hyperparams.field(
            2, "Images of less height or width, mostly placeholders, count as unreadable."
        )
        max_pixels: int = hyperparams.field(
            2**26,
            "Images whose header states more, all frames of a GIF together, count as unreadable.",
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
        keep_aspect: bool = hyperparams.field(
            False,
            "Evaluation: crops the largest centre of aspect H:W first.",
        )
        crops: Literal[1, 5, 10] = hyperparams.field(
            1,
            "Evaluation: crops per image; 5: corners and centre, 10: these and mirrored.",
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

        def made(self, task_params: Task.Params) -> Input.Params:
            """Return params of made-up images; see `Input.Params`."""
            from lingvo_gpipe.tasks.image.data import made

            return made.params_like(self, task_params)

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._preprocessing = Preprocessing(params)
        self._broken: dict[str, broken.Broken] = {}
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

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """Name of the data in messages."""

    @abc.abstractmethod
    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's encoded image (string) and the data's label (int32), in-graph."""

    @abc.abstractmethod
    def name(self, split: str, index: int) -> str:
        """Return the name of an example's file or record."""

    def fault(self, split: str, index: int) -> str | None:
        """Return why an example is not even opened; None: it is."""
        del split, index
        return None

    def assets(self) -> dict[str, bytes]:
        """Return the names of the classes, in the order of their labels."""
        lines = "".join(f"{name}\n" for name in self.class_names)
        return {_CLASSES: lines.encode(errors="surrogateescape")}

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Take the names of the classes that a run keeps; see `Input.recall`."""
        self._recalled = tuple(assets[_CLASSES].decode(errors="surrogateescape").split("\n")[:-1])

    def complete(self, task_params: Task.Params) -> None:
        """Fill in or check the model's number of classes; see `Input.complete`."""
        offset = self.params.label_offset
        classes.complete(task_params, len(self.class_names), self.where, offset)

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""
        shape = [self.params.height, self.params.width, self.params.channels]
        return {"image": tf.TensorSpec(shape), "label": tf.TensorSpec([], tf.int32)}

    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Return the fields of a mini-batch, from params; evaluation's last may be smaller."""
        spec = super().element_spec(training)
        if not training and self.params.crops > 1:
            size, *shape = spec["image"].shape
            spec["image"] = tf.TensorSpec([size, self.params.crops, *shape])
        return spec

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches of the readable examples, with the fields that `broken` needs.

        In evaluation an unreadable example is skipped; in training its place stays open. (A dataset
        for each example would be simpler, but costs 40 % at 32 × 32.)
        """

        @as_written
        def example(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            content, label = self.load(split, row["index"])
            return self._example(row, self._preprocessing.decoded(content), label, seed)

        def readable(rows: tf.data.Dataset) -> tf.data.Dataset:
            examples = rows.map(example, num_parallel_calls=_PARALLEL_CALLS, deterministic=True)
            return examples.ignore_errors()

        if seed is None:
            return readable(rows.unbatch()).batch(batch_size)

        @as_written
        def read_batch(row: dict[str, tf.Tensor]) -> tf.data.Dataset:
            places = {**row, "place": tf.range(batch_size, dtype=tf.int64)}
            examples = readable(tf.data.Dataset.from_tensor_slices(places)).batch(batch_size)
            # Without a readable example, there is still a mini-batch: an empty one.
            empty = tf.data.Dataset.from_tensors(0).map(lambda _: self._empty())
            return examples.concatenate(empty).take(1).map(lambda batch: {**batch, **row})

        return rows.interleave(
            read_batch,
            cycle_length=_PARALLEL_BATCHES,
            num_parallel_calls=_PARALLEL_BATCHES,
            deterministic=True,
        )

    def repair(self, split: str, seed: int | None) -> Repair:
        """Return the function that repairs mini-batches with broken images; see `broken`."""
        repair = broken.left_out if seed is None else broken.replaced
        count = self.num_examples(split)
        if split not in self._broken:
            where = f"{self.where}, split {split!r}"
            name = functools.partial(self.name, split)
            self._broken[split] = broken.Broken(where, count, self.params.max_broken_share, name)

        def mended(batches: Iterator[Batch], counts: dict[str, int]) -> Iterator[Batch]:
            return repair(batches, counts, self._broken[split], self._reader(split, seed), count)

        return mended

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _reader(self, split: str, seed: int | None) -> broken.ReadOne:
        """Return a function that reads one example, or returns why it cannot be read."""
        row_spec = dict.fromkeys(("index", "epoch", "place"), tf.TensorSpec([], tf.int64))
        image = tf.TensorSpec([None, None, self.params.channels], tf.uint8)
        label = tf.TensorSpec([], tf.int32)

        @tf.function(autograph=False, input_signature=[row_spec["index"]])
        def find(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            content, label = self.load(split, index)
            return self._preprocessing.decoded(content), label

        @tf.function(autograph=False, input_signature=[row_spec, image, label])
        def finish(
            row: dict[str, tf.Tensor], pixels: tf.Tensor, label: tf.Tensor
        ) -> dict[str, tf.Tensor]:
            return self._example(row, pixels, label, seed)

        def read_one(index: int, epoch: int) -> dict[str, tf.Tensor] | str:
            with tf.device("CPU:0"):
                numbers = {"index": index, "epoch": epoch, "place": 0}
                row = {name: tf.constant(value, tf.int64) for name, value in numbers.items()}
                if (fault := self.fault(split, index)) is not None:
                    return fault
                try:
                    pixels, label = find(row["index"])
                except tf.errors.OpError as error:
                    return plain(error)
                if not (self.params.resize or (self.params.random_crop and seed is not None)):
                    self._check_size(split, index, pixels.shape)
                example = finish(row, pixels, label)
            return {name: example[name] for name in self.example_spec()}

        return read_one

    def _check_size(self, split: str, index: int, shape: tf.TensorShape) -> None:
        height, width = self.params.height, self.params.width
        if tuple(shape[:2]) != (height, width):
            raise errors.InputError(
                f"{self.name(split, index)} is {shape[0]} x {shape[1]} pixels, not {height} x "
                f"{width}. Set input.resize=True, or input.height and input.width to the true size"
            )

    def serving(self) -> Serving:
        """Return how an exported model is called: encoded images, evaluation's preprocessing."""
        spec = self.element_spec(training=False)["image"]

        def fields(request: Mapping[str, tf.Tensor]) -> Batch:
            def one(content: tf.Tensor) -> tf.Tensor:
                return self._preprocessing.for_evaluation(self._preprocessing.decoded(content))

            image = tf.TensorSpec(spec.shape[1:], spec.dtype)
            return {"image": tf.map_fn(one, request["image_bytes"], fn_output_signature=image)}

        return Serving({"image_bytes": tf.TensorSpec([None], tf.string)}, fields)

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return the first images of a mini-batch; see `Input.pictures`."""
        image = batch["image"][:_SAMPLES]
        if image.shape.rank == 5:
            image = image[:, _CENTRE]
        if self.params.std:
            image *= tf.constant(self.params.std)
        if self.params.mean:
            image += tf.constant(self.params.mean)
        return {"samples": tf.image.convert_image_dtype(image, tf.uint8, saturate=True)}

    def _empty(self) -> dict[str, tf.Tensor]:
        """Return a mini-batch of training without examples."""
        specs = {**self.example_spec(), "place": tf.TensorSpec([], tf.int64)}
        return {name: tf.zeros([0, *spec.shape], spec.dtype) for name, spec in specs.items()}

    def _example(
        self, row: dict[str, tf.Tensor], pixels: tf.Tensor, label: tf.Tensor, seed: int | None
    ) -> dict[str, tf.Tensor]:
        """Return an example; its "index" (evaluation) or "place" (training) identifies it."""
        if seed is None:
            image = self._preprocessing.for_evaluation(pixels)
            identity = {"index": row["index"]}
        else:
            key = seeds.fold(seeds.fold(seeds.base_seed(seed), row["epoch"]), row["index"])
            image = self._preprocessing.for_training(pixels, key)
            identity = {"place": row["place"]}
        return {"image": image, "label": label + self.params.label_offset, **identity}
