"""Images and labels: what every input of encoded images has in common.

Fields: image: [B, H, W, C] float32 (evaluation with several crops: [B, crops, H, W, C]);
label: [B] int32.

Training: window or whole image → H × W → padding, flip, policy, colour → mean and deviation →
cutout. Evaluation: central window → H × W → mean and deviation.
"""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, seeds
from lingvo_gpipe.input import Batch, Indexed, Mend, Serving, plain
from lingvo_gpipe.tasks.image import augment, broken, classes

_PARALLEL_CALLS = max(4, os.cpu_count() or 1)
# Mini-batches that are read at once.
_PARALLEL_BATCHES = 2
_SAMPLES = 16
_CLASSES = "classes.txt"


class Images(Indexed):
    """Base of inputs whose images are encoded one by one; subclasses define where they are."""

    asset_names = (_CLASSES,)

    class Params(Indexed.Params):
        """Fields of Images."""

        height: int = hyperparams.required("H, of the images that the network sees.")
        width: int = hyperparams.required("W.")
        channels: int = hyperparams.field(
            3, "C: 3, or 1 for grey; files of the other are turned, but BMP needs 3."
        )
        data_dir: str = hyperparams.required("Folder of the data.")
        label_offset: int = hyperparams.field(
            0, "Is added to labels; 1 leaves class 0 to a background class without images."
        )
        max_broken_share: float = hyperparams.field(
            0.01, "Share of a split's images that may be unreadable before it ends a run."
        )
        min_side: int = hyperparams.field(
            2, "Images with a shorter side, place holders mostly, count as unreadable."
        )

        resize: bool = hyperparams.field(
            False, "Resizes images of other sizes to H × W; else they are an error."
        )
        antialias: bool = hyperparams.field(
            True, "Resizes with antialiasing; bilinear alone is faster."
        )
        mean: tuple[float, ...] = hyperparams.field(
            (), "Per channel, taken from pixels in [0, 1]; empty: 0. With std, 0.5 gives [-1, 1]."
        )
        std: tuple[float, ...] = hyperparams.field(
            (), "Per channel, by which they are divided after; empty: 1."
        )

        central: float = hyperparams.field(
            1.0, "Evaluation: share of each side that is kept, its centre; 0.875 for ImageNet."
        )
        keep_aspect: bool = hyperparams.field(
            False, "Evaluation: keeps the largest centre of H:W first, so that nothing is squeezed."
        )
        crops: Literal[1, 5, 10] = hyperparams.field(
            1, "Evaluation: windows per image; 5: its corners and centre, 10: mirrored as well."
        )

        random_crop: bool = hyperparams.field(
            False, "Training: a random window of the image, resized to H × W."
        )
        crop_area: tuple[float, float] = hyperparams.field(
            (0.1, 1.0), "Its share of the image, from and to."
        )
        crop_aspect: tuple[float, float] = hyperparams.field(
            (3 / 4, 4 / 3), "Its width by its height, from and to."
        )
        pad: int = hyperparams.field(
            0, "Training images are padded by so many zeros a side, and H × W cut out anywhere."
        )
        flip: bool = hyperparams.field(False, "Mirrors half of the training images.")
        policy: Literal["none", "autoaugment_v0", "randaugment"] = hyperparams.field(
            "none",
            "Learned or random distortions of training images, shifts in pixels of ImageNet.",
        )
        policy_layers: int = hyperparams.field(2, "N of RandAugment: operations in a row.")
        policy_magnitude: float = hyperparams.field(10.0, "M of RandAugment: their level.")
        brightness: float = hyperparams.field(
            0.0, "Training: added to pixels in [0, 1], at most so much, either way."
        )
        saturation: tuple[float, ...] = hyperparams.field(
            (), "Training: factor of the colours' saturation, from and to; empty: 1."
        )
        cutout: int = hyperparams.field(
            0, "Training: side of a square that is 0 after mean and std, its centre anywhere."
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        _check(params)
        self._broken: dict[str, broken.Broken] = {}
        self._recalled: tuple[str, ...] | None = None

    @property
    @abc.abstractmethod
    def own_names(self) -> tuple[str, ...]:
        """Names of the data's classes in the order of its labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels that are given."""
        if self._recalled is not None:
            return self._recalled
        return ("background",) * self.params.label_offset + self.own_names

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """What the data is called in messages."""

    @abc.abstractmethod
    def load(self, split: str, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an example's file (string) and the data's label (int32), in-graph."""

    @abc.abstractmethod
    def name(self, split: str, index: int) -> str:
        """Return what the file or record of an example is called."""

    def assets(self) -> dict[str, bytes]:
        """Return the names of the classes, which labels are places among."""
        lines = "".join(f"{name}\n" for name in self.class_names)
        return {_CLASSES: lines.encode(errors="surrogateescape")}

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Take the names of the classes that a run keeps; see `Input.recall`."""
        self._recalled = tuple(assets[_CLASSES].decode(errors="surrogateescape").split("\n")[:-1])

    def complete(self, task_params: Any) -> None:
        """Fill in or check the model's number of classes; see `Input.complete`."""
        offset = self.params.label_offset
        classes.complete(task_params, len(self.class_names), self.where, offset)

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Tell the fields of one example, from params alone."""
        shape = [self.params.height, self.params.width, self.params.channels]
        return {"image": tf.TensorSpec(shape), "label": tf.TensorSpec([], tf.int32)}

    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Tell the fields of one mini-batch, from params alone; in evaluation the last is less."""
        spec = super().element_spec(training)
        if not training and self.params.crops > 1:
            size, *sides = spec["image"].shape
            spec["image"] = tf.TensorSpec([size, self.params.crops, *sides])
        return spec

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches of what can be read, with what `broken` needs to see to the rest.

        In evaluation an unreadable example is skipped; in training its place stays open. (So
        nothing readable becomes slower: a dataset for each example costs 40 % at 32 × 32.)
        """

        def example(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            content, label = self.load(split, row["index"])
            return self._example(row, self._decoded(content), label, seed)

        def readable(rows: tf.data.Dataset) -> tf.data.Dataset:
            found = rows.map(example, num_parallel_calls=_PARALLEL_CALLS, deterministic=True)
            return found.ignore_errors()

        if seed is None:
            return readable(rows.unbatch()).batch(batch_size)

        def read_batch(row: dict[str, tf.Tensor]) -> tf.data.Dataset:
            places = {**row, "place": tf.range(batch_size, dtype=tf.int64)}
            found = readable(tf.data.Dataset.from_tensor_slices(places)).batch(batch_size)
            # A mini-batch without a readable example is one as well.
            none = tf.data.Dataset.from_tensors(0).map(lambda _: self._empty())
            return found.concatenate(none).take(1).map(lambda batch: {**batch, **row})

        return rows.interleave(
            read_batch,
            cycle_length=_PARALLEL_BATCHES,
            num_parallel_calls=_PARALLEL_BATCHES,
            deterministic=True,
        )

    def mend(self, split: str, seed: int | None) -> Mend:
        """Return what sees to broken images; see `broken`."""
        see_to = broken.left_out if seed is None else broken.replaced
        count = self.num_examples(split)
        if split not in self._broken:
            where = f"{self.where}, split {split!r}"
            name = functools.partial(self.name, split)
            self._broken[split] = broken.Broken(where, count, self.params.max_broken_share, name)

        def mended(batches: Iterator[Batch], counts: dict[str, int]) -> Iterator[Batch]:
            return see_to(batches, counts, self._broken[split], self._careful(split, seed), count)

        return mended

    @functools.cache  # noqa: B019 (an input lives as long as its run)
    def _careful(self, split: str, seed: int | None) -> broken.Careful:
        """Return what reads one example, or tells why it cannot be read."""
        numbers = dict.fromkeys(("index", "epoch", "place"), tf.TensorSpec([], tf.int64))
        image = tf.TensorSpec([None, None, self.params.channels], tf.uint8)
        label = tf.TensorSpec([], tf.int32)

        @tf.function(autograph=False, input_signature=[numbers["index"]])
        def find(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            content, label = self.load(split, index)
            return self._decoded(content), label

        @tf.function(autograph=False, input_signature=[numbers, image, label])
        def finish(
            row: dict[str, tf.Tensor], pixels: tf.Tensor, label: tf.Tensor
        ) -> dict[str, tf.Tensor]:
            return self._example(row, pixels, label, seed)

        def careful(index: int, epoch: int) -> dict[str, tf.Tensor] | str:
            with tf.device("CPU:0"):
                given = {"index": index, "epoch": epoch, "place": 0}
                row = {name: tf.constant(value, tf.int64) for name, value in given.items()}
                try:
                    pixels, label = find(row["index"])
                except tf.errors.OpError as error:
                    return plain(error)
                if not (self.params.resize or (self.params.random_crop and seed is not None)):
                    self._check_size(split, index, pixels.shape)
                example = finish(row, pixels, label)
            return {name: example[name] for name in self.example_spec()}

        return careful

    def _check_size(self, split: str, index: int, shape: tf.TensorShape) -> None:
        height, width = self.params.height, self.params.width
        if tuple(shape[:2]) != (height, width):
            raise errors.InputError(
                f"{self.name(split, index)} is {shape[0]} x {shape[1]} pixels, not {height} x "
                f"{width}. Set input.resize=True, or input.height and input.width to the true size"
            )

    def serving(self) -> Serving:
        """Return how images are served: files as strings, in evaluation's preprocessing."""
        spec = self.element_spec(training=False)["image"]

        def fields(given: Mapping[str, tf.Tensor]) -> Batch:
            def one(content: tf.Tensor) -> tf.Tensor:
                return self._evaluated(self._decoded(content))

            shown = tf.TensorSpec(spec.shape[1:], spec.dtype)
            return {"image": tf.map_fn(one, given["image_bytes"], fn_output_signature=shown)}

        return Serving({"image_bytes": tf.TensorSpec([None], tf.string)}, fields)

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return the first images of a mini-batch; see `Input.pictures`."""
        image = batch["image"][:_SAMPLES]
        if self.params.std:
            image *= tf.constant(self.params.std)
        if self.params.mean:
            image += tf.constant(self.params.mean)
        return {"samples": tf.image.convert_image_dtype(image, tf.uint8, saturate=True)}

    def _empty(self) -> dict[str, tf.Tensor]:
        """Return a mini-batch of training without an example."""
        specs = {**self.example_spec(), "place": tf.TensorSpec([], tf.int64)}
        return {name: tf.zeros([0, *spec.shape], spec.dtype) for name, spec in specs.items()}

    def _example(
        self, row: dict[str, tf.Tensor], pixels: tf.Tensor, label: tf.Tensor, seed: int | None
    ) -> dict[str, tf.Tensor]:
        """Make an example of an image; "place" or "index" tell which one it is."""
        if seed is None:
            image, own = self._evaluated(pixels), {"index": row["index"]}
        else:
            key = seeds.fold(seeds.fold(seeds.base_seed(seed), row["epoch"]), row["index"])
            image, own = self._trained(pixels, key), {"place": row["place"]}
        return {"image": image, "label": label + self.params.label_offset, **own}

    def _decoded(self, content: tf.Tensor) -> tf.Tensor:
        """Return uint8 [h, w, C]; fails where the image is broken."""
        pixels = tf.io.decode_image(content, self.params.channels, expand_animations=False)
        pixels.set_shape([None, None, self.params.channels])
        side = self.params.min_side
        told = f"a side is under input.min_side={side}"
        check = tf.debugging.assert_greater_equal(tf.shape(pixels)[:2], side, message=told)
        # An assertion is an operation in a graph, and nothing in eager code.
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(pixels)

    def _trained(self, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C], distorted."""
        if self.params.random_crop:
            image = self._resized(augment.random_window(self.params, pixels, key))
        else:
            image = self._resized(pixels) if self.params.resize else self._whole(pixels)
        image = self._normalised(augment.distort(self.params, image, key))
        if self.params.cutout:
            image = augment.cutout(image, self.params.cutout, key)
        return image

    def _evaluated(self, pixels: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C], or [crops, H, W, C] of several."""
        if not self.params.resize:
            return self._normalised(self._whole(pixels))
        margins, sizes = self._margins(tf.shape(pixels)[:2])
        places = [(1, 1)]
        if self.params.crops > 1:
            places = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
        windows = []
        for row, column in places:
            begin = tf.stack([row * margins[0], column * margins[1], 0])
            window = tf.slice(pixels, begin, tf.stack([sizes[0], sizes[1], -1]))
            windows.append(self._normalised(self._resized(window)))
        if self.params.crops == 1:
            return windows[0]
        if self.params.crops == 10:
            windows += [tf.reverse(window, [1]) for window in windows]
        return tf.stack(windows)

    def _margins(self, sides: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return how much is left out at either side [2], and what is kept of each side [2]."""
        kept = given = tf.cast(sides, tf.float64)
        if self.params.keep_aspect:
            shape = tf.constant([self.params.height, self.params.width], tf.float64)
            kept = shape * tf.reduce_min(given / shape)
        # As `tf.image.central_crop` rounds.
        margins = tf.cast(tf.floor((given - kept * self.params.central) / 2.0), tf.int32)
        return margins, sides - 2 * margins

    def _resized(self, pixels: tf.Tensor) -> tf.Tensor:
        size = [self.params.height, self.params.width]
        image = tf.image.resize(pixels, size, antialias=self.params.antialias) / 255.0
        return tf.ensure_shape(image, [*size, self.params.channels])

    def _whole(self, pixels: tf.Tensor) -> tf.Tensor:
        shape = [self.params.height, self.params.width, self.params.channels]
        return tf.image.convert_image_dtype(tf.ensure_shape(pixels, shape), tf.float32)

    def _normalised(self, image: tf.Tensor) -> tf.Tensor:
        if self.params.mean:
            image -= tf.constant(self.params.mean)
        if self.params.std:
            image /= tf.constant(self.params.std)
        return image


def _check(params: Any) -> None:
    """Refuse numbers and fields that do not go together."""
    for name in ("mean", "std"):
        given = getattr(params, name)
        if given and len(given) != params.channels:
            raise errors.InputError(
                f"input.{name} has {len(given)} numbers, but images have {params.channels} channels"
            )
    coloured = bool(params.saturation) or params.policy != "none"
    is_whole = params.central == 1.0 and not params.keep_aspect
    needs_resize = "It needs input.resize=True"
    rules = (
        ("channels", params.channels in (1, 3), "Use 1 or 3"),
        (
            "channels",
            params.channels == 3 or not coloured,
            "input.saturation and input.policy need 3",
        ),
        ("max_broken_share", 0.0 <= params.max_broken_share <= 1.0, "Use 0 to 1"),
        ("brightness", params.brightness >= 0.0, "Use 0 or more"),
        ("label_offset", params.label_offset >= 0, "Use 0 or more"),
        (
            "saturation",
            not params.saturation
            or (_rises(params.saturation) and params.saturation[0] < params.saturation[1]),
            "Use two, rising",
        ),
        ("crop_area", _rises(params.crop_area) and params.crop_area[1] <= 1.0, "Use two up to 1"),
        ("crop_aspect", _rises(params.crop_aspect), "Use two, rising"),
        ("pad", params.pad >= 0, "Use 0 or more"),
        ("cutout", params.cutout >= 0, "Use 0 or more"),
        ("central", 0.0 < params.central <= 1.0, "Use more than 0, at most 1"),
        ("central", params.resize or params.central == 1.0, needs_resize),
        ("keep_aspect", params.resize or not params.keep_aspect, needs_resize),
        ("crops", params.resize or params.crops == 1, needs_resize),
        (
            "crops",
            params.crops == 1 or not is_whole,
            "Whole images have no corners: set input.central, such as 0.875",
        ),
    )
    for name, is_right, way in rules:
        if not is_right:
            found = getattr(params, name)
            raise errors.InputError(f"input.{name}={found} is not possible. {way}")


def _rises(pair: tuple[float, ...]) -> bool:
    return len(pair) == 2 and 0.0 <= pair[0] <= pair[1] and pair[1] > 0.0
