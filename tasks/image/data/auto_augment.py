"""AutoAugment's policy v0 and RandAugment, in-graph on stateless operations.

An operation takes uint8 [H, W, 3] and a level in [0, 1] and returns the same shape. Pixels that
rotations, shears and translations bring in from outside the image are grey.

Sources: Cubuk et al. 2018, AutoAugment; Cubuk et al. 2019, RandAugment; tables and arguments as in
tensorflow/tpu's efficientnet/autoaugment.py. Unlike it, Contrast blends with the image's mean grey,
as the papers' operation does; there it uses a sum instead of the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import seeds

_GREY = 128
# Pixels at level 1, whatever the image's size.
_AUTO_TRANSLATE = 250.0
_RAND_TRANSLATE = 100.0

# One of these pairs per image; (operation, its probability, its level of 0 to 10).
POLICY_V0: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)


def auto_augment(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Distort a uint8 [H, W, 3] image by one pair of policy v0."""
    names = sorted({name for pair in POLICY_V0 for name, _, _ in pair})
    table = [[[names.index(n), p, level / 10] for n, p, level in pair] for pair in POLICY_V0]
    chosen = tf.constant(table, tf.float64)[_uniform_int(key, 0, len(POLICY_V0))]
    for place in range(2):
        operation_key = seeds.fold(key, 1 + place)
        which, probability, level = tf.unstack(chosen[place])
        drawn = tf.random.stateless_uniform([], seeds.fold(operation_key, 0), dtype=tf.float64)
        # The last branch leaves the image as it is.
        branch = tf.where(drawn < probability, tf.cast(which, tf.int32), len(names))
        image = _apply(names, branch, image, level, operation_key, _AUTO_TRANSLATE)
    return image


def rand_augment(image: tf.Tensor, key: tf.Tensor, layers: int, magnitude: float) -> tf.Tensor:
    """Distort a uint8 [H, W, 3] image by operations drawn uniformly.

    Args:
        image: to be distorted.
        key: int32 [2].
        layers: N, operations in a row.
        magnitude: M, level of each; 10 is AutoAugment's highest.
    """
    names = sorted([*OPERATIONS, "Cutout"])
    level = tf.constant(magnitude / 10, tf.float64)
    for layer in range(layers):
        operation_key = seeds.fold(key, layer)
        branch = _uniform_int(operation_key, 0, len(names))
        image = _apply(names, branch, image, level, operation_key, _RAND_TRANSLATE)
    return image


def erased(image: tf.Tensor, side: int | tf.Tensor, fill: Any, key: tf.Tensor) -> tf.Tensor:
    """Fill a square around a uniform centre of an [H, W, C] image; its edge may clip it.

    Args:
        image: image of any dtype.
        side: side of the square.
        fill: scalar of the image's dtype.
        key: int32 [2].
    """
    inside = tf.constant(True)
    for axis in range(2):
        length = tf.shape(image)[axis]
        centre = tf.random.stateless_uniform([], seeds.fold(key, axis), 0, length, tf.int32)
        begin = centre - side // 2
        places = tf.range(length)
        span = (places >= begin) & (places < begin + side)
        inside &= span[:, tf.newaxis, tf.newaxis] if axis == 0 else span[:, tf.newaxis]
    return tf.where(inside, fill, image)


def _apply(
    names: Sequence[str],
    branch: tf.Tensor,
    image: tf.Tensor,
    level: tf.Tensor,
    key: tf.Tensor,
    translate: float,
) -> tf.Tensor:
    """Apply the operation of number `branch`; one past the last leaves the image as it is."""
    sign = tf.cast(2 * _uniform_int(key, 1, 2) - 1, tf.float64)

    def called(name: str) -> tf.Tensor:
        if name == "Cutout":
            side = 2 * _floor(40.0 * level)
            return erased(image, side, tf.constant(_GREY, tf.uint8), seeds.fold(key, 2))
        scaled = level * translate if name.startswith("Translate") else level
        return OPERATIONS[name](image, sign * scaled if name in _SIGNED else scaled)

    calls: list[Callable[[], tf.Tensor]] = [functools.partial(called, name) for name in names]
    result = tf.switch_case(branch, [*calls, lambda: image])
    return tf.ensure_shape(result, image.shape)


def _uniform_int(key: tf.Tensor, number: int, count: int) -> tf.Tensor:
    return tf.random.stateless_uniform([], seeds.fold(key, number), 0, count, tf.int32)


def _floor(number: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.floor(number), tf.int32)


# --- Operations -----------------------------------------------------------------------------------


def _blend(one: tf.Tensor, other: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Go from `one` towards `other` and, past 1, beyond it."""
    factor = tf.cast(1.8 * level + 0.1, tf.float32)
    one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
    return tf.cast(tf.clip_by_value(one + factor * (other - one), 0.0, 255.0), tf.uint8)


def _auto_contrast(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    del level
    wide = tf.cast(image, tf.float32)
    low, high = (reduce(wide, [0, 1]) for reduce in (tf.reduce_min, tf.reduce_max))
    stretched = tf.math.divide_no_nan((wide - low) * 255.0, high - low)
    return tf.where(high > low, tf.cast(tf.clip_by_value(stretched, 0.0, 255.0), tf.uint8), image)


def _brightness(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    return _blend(tf.zeros_like(image), image, level)


def _color(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    return _blend(tf.image.rgb_to_grayscale(image), image, level)


def _contrast(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    grey = tf.reduce_mean(tf.cast(tf.image.rgb_to_grayscale(image), tf.float32))
    return _blend(tf.floor(grey + 0.5), image, level)


def _equalize(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Spread each channel's values so that their counts add up evenly."""
    del level

    def equalized(channel: tf.Tensor) -> tf.Tensor:
        values = tf.cast(channel, tf.int32)
        counts = tf.math.bincount(tf.reshape(values, [-1]), minlength=256, maxlength=256)
        step = (tf.reduce_sum(counts) - counts[tf.reduce_max(values)]) // 255
        before = tf.cumsum(counts, exclusive=True)
        # What lies below a value decides; the lowest stays 0.
        table = tf.clip_by_value((before + step // 2) // tf.maximum(step, 1), 0, 255)
        table = tf.where(tf.range(256) == 0, 0, table)
        return tf.where(step == 0, channel, tf.cast(tf.gather(table, values), tf.uint8))

    return tf.stack([equalized(channel) for channel in tf.unstack(image, axis=-1)], -1)


def _invert(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    del level
    return 255 - image


def _posterize(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Keep the ⌊4 · level⌋ highest bits, one to eight."""
    shift = tf.cast(tf.clip_by_value(8 - _floor(4.0 * level), 0, 7), tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def _sharpness(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Blend with a smoothed image, whose edge is the image's own."""
    kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13.0
    kernel = tf.tile(kernel[:, :, tf.newaxis, tf.newaxis], [1, 1, 3, 1])
    wide = tf.cast(image, tf.float32)[tf.newaxis]
    smooth = tf.nn.depthwise_conv2d(wide, kernel, [1, 1, 1, 1], "SAME")[0]
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    rows, columns = tf.range(height)[:, tf.newaxis], tf.range(width)
    inner = (rows > 0) & (rows < height - 1) & (columns > 0) & (columns < width - 1)
    smooth = tf.cast(tf.clip_by_value(smooth, 0.0, 255.0), tf.uint8)
    return _blend(tf.where(inner[..., tf.newaxis], smooth, image), image, level)


def _solarize(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Invert what is at or above ⌊256 · level⌋."""
    return tf.where(tf.cast(image, tf.int32) < _floor(256.0 * level), image, 255 - image)


def _solarize_add(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Add ⌊110 · level⌋ to what is below 128."""
    added = tf.minimum(tf.cast(image, tf.int32) + _floor(110.0 * level), 255)
    return tf.where(image < 128, tf.cast(added, tf.uint8), image)


def _rotate(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Rotate by 30 · level degrees about the centre."""
    angle = level * (30.0 * 3.141592653589793 / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    height, width = (tf.cast(tf.shape(image)[axis] - 1, tf.float64) for axis in range(2))
    right = (width - (cos * width - sin * height)) / 2.0
    down = (height - (sin * width + cos * height)) / 2.0
    return _projected(image, [cos, -sin, right, sin, cos, down])


def _shear_x(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    return _projected(image, [1.0, 0.3 * level, 0.0, 0.0, 1.0, 0.0])


def _shear_y(image: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    return _projected(image, [1.0, 0.0, 0.0, 0.3 * level, 1.0, 0.0])


def _translate_x(image: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    return _projected(image, [1.0, 0.0, pixels, 0.0, 1.0, 0.0])


def _translate_y(image: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    return _projected(image, [1.0, 0.0, 0.0, 0.0, 1.0, pixels])


def _projected(image: tf.Tensor, rows: Sequence[Any]) -> tf.Tensor:
    """Take pixel (x, y) from (a x + b y + c, d x + e y + f), rows being [a, b, c, d, e, f]."""
    transform = tf.stack([tf.cast(number, tf.float32) for number in [*rows, 0.0, 0.0]])
    projected = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[tf.newaxis],
        transforms=transform[tf.newaxis],
        output_shape=tf.shape(image)[:2],
        fill_value=float(_GREY),
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )
    return projected[0]


# All but Cutout, which draws.
OPERATIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "AutoContrast": _auto_contrast,
    "Brightness": _brightness,
    "Color": _color,
    "Contrast": _contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Posterize": _posterize,
    "Rotate": _rotate,
    "Sharpness": _sharpness,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
}
# Either direction is as likely.
_SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
