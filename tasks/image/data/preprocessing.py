"""From the pixels of one image file to what the network reads.

Training: a window or the whole image → H × W → padding, flip, policy, colour → mean and standard
deviation → cutout. Evaluation: central window → H × W → mean and standard deviation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.image.data import augment, header

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.image.data.images import Images


class Preprocessing:
    """The preprocessing that the Params of an input of images describe; in-graph."""

    def __init__(self, params: Images.Params) -> None:
        """Take the fields.

        Raises:
            InputError: a value is out of range, or fields contradict each other.
        """
        _check(params)
        self.params = params

    def decoded(self, content: tf.Tensor) -> tf.Tensor:
        """Return the pixels of a file, uint8 [h, w, C]; the operation fails on a broken image."""
        channels, most = self.params.channels, self.params.max_pixels
        count = header.num_pixels(content, most)

        def decode() -> tf.Tensor:
            return tf.io.decode_image(content, channels, expand_animations=False)

        pixels = tf.cond(
            (count >= 1) & (count <= most),
            decode,
            lambda: header.refuse(content, count, most, channels),
        )
        pixels.set_shape([None, None, self.params.channels])
        least = self.params.min_side
        message = f"height or width is under input.min_side={least}"
        check = tf.debugging.assert_greater_equal(tf.shape(pixels)[:2], least, message=message)
        # In a graph an assertion is an operation, in eager code it is None.
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(pixels)

    def for_training(self, pixels: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C], distorted as the key (int32 [2]) says."""
        if self.params.random_crop:
            image = self._resized(augment.random_window(self.params, pixels, key))
        else:
            image = self._resized(pixels) if self.params.resize else self._whole(pixels)
        image = self._normalised(augment.distort(self.params, image, key))
        if self.params.cutout:
            image = augment.cutout(image, self.params.cutout, key)
        return image

    def for_evaluation(self, pixels: tf.Tensor) -> tf.Tensor:
        """Return float32 [H, W, C], or [crops, H, W, C] of several crops."""
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

    def _margins(self, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the margin cut off at each edge and the size that is left, for height and width.

        Args:
            size: int32 [2], height and width of the image.
        """
        kept = whole = tf.cast(size, tf.float64)
        if self.params.keep_aspect:
            shape = tf.constant([self.params.height, self.params.width], tf.float64)
            kept = shape * tf.reduce_min(whole / shape)
        # Rounded as in `tf.image.central_crop`.
        margins = tf.cast(tf.floor((whole - kept * self.params.central) / 2.0), tf.int32)
        return margins, size - 2 * margins

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


def _check(params: Images.Params) -> None:
    """Refuse values out of range and fields that contradict each other."""
    for name in ("mean", "std"):
        values = params.get(name)
        if values and len(values) != params.channels:
            raise errors.InputError(
                f"input.{name} has {len(values)} numbers, but images have {params.channels} "
                "channels"
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
        ("max_pixels", params.max_pixels >= 1, "Use 1 or more"),
        ("brightness", params.brightness >= 0.0, "Use 0 or more"),
        ("label_offset", params.label_offset >= 0, "Use 0 or more"),
        (
            "saturation",
            not params.saturation
            or (_rises(params.saturation) and params.saturation[0] < params.saturation[1]),
            "Use two, rising",
        ),
        (
            "crop_area",
            _rises(params.crop_area) and params.crop_area[0] > 0.0 and params.crop_area[1] <= 1.0,
            "Use two above 0, up to 1",
        ),
        (
            "crop_aspect",
            _rises(params.crop_aspect) and params.crop_aspect[0] > 0.0,
            "Use two above 0, rising",
        ),
        ("std", all(value > 0.0 for value in params.std or ()), "Use numbers above 0"),
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
    for name, is_right, way_out in rules:
        if not is_right:
            raise errors.InputError(f"input.{name}={params.get(name)} is not possible. {way_out}")


def _rises(pair: tuple[float, ...]) -> bool:
    return len(pair) == 2 and 0.0 <= pair[0] <= pair[1] and pair[1] > 0.0
