"""Distortions of training images, each a pure function of (image, key).

The key comes from (seed, epoch, index): the same position always has the same distortion, and each
epoch another one. Everything is in-graph, with stateless operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe import seeds
from lingvo_gpipe.tasks.image.data import auto_augment

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.image.data.images import Images

# Folded into the image's key by each random draw.
_PAD, _FLIP, _WINDOW, _POLICY, _BRIGHTNESS, _SATURATION, _CUTOUT = range(7)
_WINDOW_TRIES = 100


def random_window(params: Images.Params, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Return a window of random area, aspect and position of an image [h, w, C].

    If no drawn window fits into the image, the whole image is returned.
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(pixels),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seeds.fold(key, _WINDOW),
        min_object_covered=0.0,
        aspect_ratio_range=params.crop_aspect,
        area_range=params.crop_area,
        max_attempts=_WINDOW_TRIES,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.slice(pixels, begin, size)
    window.set_shape([None, None, pixels.shape[-1]])
    return window


def distort(params: Images.Params, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Return an image, float32 [H, W, C] in [0, 1], distorted as the fields of `params` say."""
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


def cutout(image: tf.Tensor, size: int, key: tf.Tensor) -> tf.Tensor:
    """Set a square of size × size pixels to 0; its centre is anywhere, so edges may clip it.

    Source: DeVries and Taylor 2017, who apply it after normalisation.
    """
    return auto_augment.erased(image, size, tf.zeros([], image.dtype), seeds.fold(key, _CUTOUT))
