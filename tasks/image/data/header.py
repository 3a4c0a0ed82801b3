"""The size of an image as its header states it, read before anything is decoded.

A decoder allocates what a header asks for: a PNG of 20,000 × 20,000 pixels took 1.6 GiB before it
was refused. In-graph, so that exported models check what they receive, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

_HEAD_BYTES = 32
_UNKNOWN, _GIF, _BMP, _WEBP = range(4)
_KIND_OF = {ord("G"): _GIF, ord("B"): _BMP, ord("R"): _WEBP}
_KIND_OF_FIRST_BYTE = [_KIND_OF.get(first, _UNKNOWN) for first in range(256)]

# Width and height of a PNG are two numbers of four bytes, the highest first.
_PNG_SIZE = np.zeros([_HEAD_BYTES, 2])
_PNG_SIZE[16:20, 0] = _PNG_SIZE[20:24, 1] = [2**24, 2**16, 2**8, 1]

# Marks of a GIF's blocks.
_GIF_IMAGE, _GIF_EXTENSION = 0x2C, 0x21


def num_pixels(content: tf.Tensor, most: int) -> tf.Tensor:
    """Return the number of pixels that decoding a file makes, from its header; float64.

    Of a GIF those of all its frames, because all are decoded to return the first; counted until
    there are more than `most`. Under 1: an unknown format, or a header that is cut off; where the
    header of a JPEG is damaged, the operation fails.

    Args:
        content: content of a file; a string without shape.
        most: largest number of interest.
    """
    head = tf.io.decode_raw(content[None], tf.uint8, fixed_length=_HEAD_BYTES)
    png = tf.reduce_prod(tf.matmul(tf.cast(head, tf.float64), tf.constant(_PNG_SIZE)))

    others = _all_but_png(most)
    return tf.cond(head[0, 0] == 0x89, lambda: png, lambda: others(content, head[0]))


@functools.cache
def _all_but_png(most: int) -> Callable[..., tf.Tensor]:
    """Return `num_pixels` of a content and its head, traced once for all datasets."""

    @_never_inlined
    def others(content: tf.Tensor, head: tf.Tensor) -> tf.Tensor:
        is_jpeg = (head[0] == 0xFF) & (head[1] == 0xD8)
        return tf.cond(is_jpeg, lambda: _jpeg_pixels(content), lambda: rest(content, head))

    @_never_inlined
    def rest(content: tf.Tensor, head: tf.Tensor) -> tf.Tensor:
        return _other_pixels(content, tf.cast(head, tf.int64), most)

    return others


def refuse(content: tf.Tensor, num_pixels: tf.Tensor, most: int, channels: int) -> tf.Tensor:
    """Fail in place of decoding, and name what the header states.

    Args:
        content: content of a file.
        num_pixels: what the function of this name returned.
        most: largest number that is decoded.
        channels: of the pixels that would be returned.
    """

    @_never_inlined
    def fail(content: tf.Tensor, num_pixels: tf.Tensor) -> tf.Tensor:
        unknown = tf.where(
            tf.strings.length(content) == 0,
            "Input is empty",
            "Unknown image file format. One of JPEG, PNG, GIF, BMP, WebP is required",
        )
        text = tf.where(
            num_pixels < 1,
            unknown,
            tf.strings.format(
                f"its header states {{}} pixels, more than input.max_pixels={most}",
                tf.cast(num_pixels, tf.int64),
            ),
        )
        with tf.control_dependencies([tf.raw_ops.Assert(condition=False, data=[text])]):
            return tf.zeros([1, 1, channels], tf.uint8)

    return fail(content, num_pixels)


def _never_inlined(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Return a TensorFlow function that stays one operation.

    In a branch that is not taken, every operation takes time, too: all formats inline took 50 µs
    more for each PNG of 32 × 32.
    """
    made: Callable[..., tf.Tensor] = tf.function(
        function, autograph=False, experimental_attributes={"_noinline": True}
    )
    return made


def _jpeg_pixels(content: tf.Tensor) -> tf.Tensor:
    return tf.reduce_prod(tf.cast(tf.io.extract_jpeg_shape(content)[:2], tf.float64))


def _other_pixels(content: tf.Tensor, head: tf.Tensor, most: int) -> tf.Tensor:
    """Return the pixels of a file that is neither PNG nor JPEG; see `num_pixels`."""
    kinds = {
        _UNKNOWN: lambda: tf.constant(-1, tf.int64),
        _GIF: lambda: _gif_pixels(content, most),
        _BMP: lambda: tf.abs(_signed(head[18:22]) * _signed(head[22:26])),
        _WEBP: lambda: _webp_pixels(head),
    }
    kind = tf.gather(tf.constant(_KIND_OF_FIRST_BYTE), head[0])
    return tf.cast(tf.switch_case(kind, kinds), tf.float64)


def _number(octets: tf.Tensor) -> tf.Tensor:
    """Return the number of some bytes, the lowest first."""
    return tf.reduce_sum(octets * tf.constant([256**n for n in range(octets.shape[0])], tf.int64))


def _signed(octets: tf.Tensor) -> tf.Tensor:
    """Return the number of four bytes, the lowest first; rows from the top have a negative one."""
    number = _number(octets)
    return tf.where(number < 2**31, number, number - 2**32)


def _webp_pixels(head: tf.Tensor) -> tf.Tensor:
    """Return the pixels of a WebP.

    Source: RFC 9649, sections 2.5 to 2.7 and 3.4.
    """
    lossy = (_number(head[26:28]) % 2**14) * (_number(head[28:30]) % 2**14)
    bits = _number(head[21:25])
    lossless = (1 + bits % 2**14) * (1 + bits // 2**14 % 2**14)
    extended = (1 + _number(head[24:27])) * (1 + _number(head[27:30]))
    fourth = head[15]
    flat = tf.where(fourth == ord("L"), lossless, lossy)
    return tf.where(fourth == ord("X"), extended, flat)


def _gif_pixels(content: tf.Tensor, most: int) -> tf.Tensor:
    """Return the pixels of all frames of a GIF, in one pass over its blocks.

    Source: GIF89a specification, sections 18 to 24.
    """
    octets = tf.pad(tf.cast(tf.io.decode_raw(content, tf.uint8), tf.int64), [[0, _HEAD_BYTES]])
    size = tf.size(octets, tf.int64) - _HEAD_BYTES

    def colours(packed: tf.Tensor) -> tf.Tensor:
        """Return the bytes of the table of colours that a packed byte announces."""
        sizes = tf.constant([6 * 2**n for n in range(8)], tf.int64)
        return tf.where(packed >= 128, tf.gather(sizes, packed % 8), 0)

    def goes_on(place: tf.Tensor, in_data: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        mark = octets[tf.minimum(place, size)]
        is_block = in_data | (mark == _GIF_IMAGE) | (mark == _GIF_EXTENSION)
        return (place < size) & is_block & (count <= most)

    def step(
        place: tf.Tensor, in_data: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        block = octets[place : place + 10]
        is_image = ~in_data & (block[0] == _GIF_IMAGE)
        pixels = (block[5] + 256 * block[6]) * (block[7] + 256 * block[8])
        # In data: a sub-block of that many bytes, the last one of none.
        ahead = tf.where(in_data, 1 + block[0], tf.where(is_image, 11 + colours(block[9]), 2))
        return place + ahead, ~in_data | (block[0] > 0), count + tf.where(is_image, pixels, 0)

    start = 13 + colours(octets[10])
    none = tf.constant(0, tf.int64)
    return tf.while_loop(goes_on, step, (start, tf.constant(False), none))[2]
