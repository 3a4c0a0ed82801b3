"""Distortions of training images, each a pure function of (image, key).

An image is distorted by the key of (seed, epoch, index), so it looks the same whenever that
position is drawn again, and other in each epoch. All is in-graph, on stateless operations.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import seeds
from lingvo_gpipe.tasks.image import auto_augment

# What each draw folds into its image's key.
_PAD, _FLIP, _WINDOW, _POLICY, _BRIGHTNESS, _SATURATION, _CUTOUT = range(7)
_WINDOW_TRIES = 100


def random_window(params: Any, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Cut a window of random area, aspect and place out of [h, w, C] pixels.

    Where none of the drawn windows fits into the image, the whole image is taken.
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


def distort(params: Any, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Distort a float32 [H, W, C] image in [0, 1]; what a field does not ask for is left out."""
    if params.pad:
        sides = [[params.pad, params.pad], [params.pad, params.pad], [0, 0]]
        wide = tf.pad(image, sides)
        image = tf.image.stateless_random_crop(wide, image.shape, seeds.fold(key, _PAD))
    if params.flip:
        image = tf.image.stateless_random_flip_left_right(image, seeds.fold(key, _FLIP))
    if params.policy != "none":
        own = seeds.fold(key, _POLICY)
        pixels = tf.image.convert_image_dtype(image, tf.uint8, saturate=True)
        if params.policy == "autoaugment_v0":
            pixels = auto_augment.auto_augment(pixels, own)
        else:
            pixels = auto_augment.rand_augment(
                pixels, own, params.policy_layers, params.policy_magnitude
            )
        image = tf.image.convert_image_dtype(pixels, tf.float32)
    if params.brightness:
        own = seeds.fold(key, _BRIGHTNESS)
        image = tf.image.stateless_random_brightness(image, params.brightness, own)
    if params.saturation:
        own = seeds.fold(key, _SATURATION)
        image = tf.image.stateless_random_saturation(image, *params.saturation, own)
    if params.brightness or params.saturation:
        image = tf.clip_by_value(image, 0.0, 1.0)
    return image


def cutout(image: tf.Tensor, side: int, key: tf.Tensor) -> tf.Tensor:
    """Set a square of `side` to 0; its centre may lie anywhere, so the edge may clip it.

    Source: DeVries and Taylor 2017, which do it after the image is normalised.
    """
    return auto_augment.erased(image, side, tf.zeros([], image.dtype), seeds.fold(key, _CUTOUT))
