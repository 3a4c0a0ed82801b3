"""From the file of one image to what the network reads, in-graph.

Training: a window or the whole image → H × W → padding, flip, policy, colour → mean and standard
deviation → cutout. Evaluation: central window → H × W → mean and standard deviation.

Each distortion of training is a pure function of (image, key). The key comes from (seed, epoch,
index): the same position always has the same distortion, and each epoch another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe import errors, seeds
from lingvo_gpipe.tasks.image.data import auto_augment

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.image.data.images import Images

# Folded into the image's key by each random draw.
_PAD, _FLIP, _WINDOW, _POLICY, _BRIGHTNESS, _SATURATION, _CUTOUT = range(7)
_WINDOW_TRIES = 100


class Preprocessing:
    """The preprocessing that the Params of an input of images describe."""

    def __init__(self, params: Images.Params) -> None:
        """Take the fields.

        Raises:
            InputError: a value is out of range, or fields contradict each other.
        """
        _check(params)
        self.params = params

    def decoded(self, content: tf.Tensor) -> tf.Tensor:
        """Return the pixels of a file, uint8 [h, w, C]; the operation fails on a broken image."""
        pixels = tf.io.decode_image(content, self.params.channels, expand_animations=False)
        return tf.ensure_shape(pixels, [None, None, self.params.channels])

    def for_training(self, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C], distorted as the key (int32 [2]) says."""
        if self.params.random_crop:
            image = self._resized(self.random_window(pixels, key))
        else:
            image = self._resized(pixels) if self.params.resize else self._whole(pixels)
        image = self._normalised(self.distort(image, key))
        if self.params.cutout:
            image = cutout(image, self.params.cutout, key)
        return image

    def for_evaluation(self, pixels: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C]."""
        if not self.params.resize:
            return self._normalised(self._whole(pixels))
        centre = tf.image.central_crop(pixels, self.params.central)
        return self._normalised(self._resized(centre))

    def random_window(self, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return a window of random area, aspect and position of an image [h, w, C].

        If no drawn window fits into the image, the whole image is returned.
        """
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.shape(pixels),
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seeds.fold(key, _WINDOW),
            min_object_covered=0.0,
            aspect_ratio_range=self.params.crop_aspect,
            area_range=self.params.crop_area,
            max_attempts=_WINDOW_TRIES,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.slice(pixels, begin, size)
        window.set_shape([None, None, pixels.shape[-1]])
        return window

    def distort(self, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return an image, float32 [H, W, C] in [0, 1], shifted, mirrored and coloured."""
        params = self.params
        if params.pad:
            paddings = [[params.pad, params.pad], [params.pad, params.pad], [0, 0]]
            wide = tf.pad(image, paddings)
            image = tf.image.stateless_random_crop(wide, image.shape, seeds.fold(key, _PAD))
        if params.flip:
            image = tf.image.stateless_random_flip_left_right(image, seeds.fold(key, _FLIP))
        if params.policy != "none":
            policy_key = seeds.fold(key, _POLICY)
            pixels = tf.image.convert_image_dtype(image, tf.uint8, saturate=True)
            if params.policy == "autoaugment_v0":
                pixels = auto_augment.auto_augment(pixels, policy_key)
            else:
                pixels = auto_augment.rand_augment(
                    pixels, policy_key, params.policy_layers, params.policy_magnitude
                )
            image = tf.image.convert_image_dtype(pixels, tf.float32)
        if params.brightness:
            image = tf.image.stateless_random_brightness(
                image, params.brightness, seeds.fold(key, _BRIGHTNESS)
            )
        if params.saturation:
            image = tf.image.stateless_random_saturation(
                image, *params.saturation, seeds.fold(key, _SATURATION)
            )
        if params.brightness or params.saturation:
            image = tf.clip_by_value(image, 0.0, 1.0)
        return image

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


def cutout(image: tf.Tensor, size: int, key: tf.Tensor) -> tf.Tensor:
    """Set a square of size × size pixels to 0; its centre is anywhere, so edges may clip it.

    Source: DeVries and Taylor 2017, who apply it after normalisation.
    """
    return auto_augment.erased(image, size, tf.zeros([], image.dtype), seeds.fold(key, _CUTOUT))


def _check(params: Images.Params) -> None:
    """Refuse values out of range and fields that contradict each other."""
    coloured = bool(params.saturation) or params.policy != "none"
    needs_resize = "It needs input.resize=True"
    per_channel = f"Use {params.channels} numbers, one for each channel"
    rules = (
        ("channels", params.channels in (1, 3), "Use 1 or 3"),
        ("channels", params.channels == 3 or not coloured, "input.saturation and policy need 3"),
        ("mean", len(params.mean) in (0, params.channels), per_channel),
        ("std", len(params.std) in (0, params.channels), per_channel),
        ("std", all(value > 0.0 for value in params.std), "Use numbers above 0"),
        (
            "saturation",
            not params.saturation
            or (len(params.saturation) == 2 and params.saturation[0] < params.saturation[1]),
            "Use two, rising",
        ),
        (
            "crop_area",
            0.0 < params.crop_area[0] <= params.crop_area[1] <= 1.0,
            "Use two above 0, up to 1, rising",
        ),
        (
            "crop_aspect",
            0.0 < params.crop_aspect[0] <= params.crop_aspect[1],
            "Use two above 0, rising",
        ),
        ("central", 0.0 < params.central <= 1.0, "Use more than 0, at most 1"),
        ("central", params.resize or params.central == 1.0, needs_resize),
    )
    for name, is_right, way_out in rules:
        if not is_right:
            raise errors.InputError(f"input.{name}={params.get(name)} is not possible. {way_out}")
