"""The number of pixels is read from the header of every format, and nothing larger is decoded."""

from __future__ import annotations

import functools
import io
import struct
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from PIL import Image

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.image.data import header
from tests.tasks.image.image_files import folder_input, pixels

MOST = 10**9
FORMATS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "JPEG": {},
    "progressive JPEG": {"progressive": True},
    "GIF": {},
    "BMP": {},
    "WEBP": {},
    "lossless WEBP": {"lossless": True},
    "extended WEBP": {"exif": b"Exif\0\0"},
}


def encoded(name: str, frames: int = 1) -> bytes:
    """Return images of 37 × 29 pixels in a format."""
    first, *others = [Image.fromarray(pixels(n, 29, 37)) for n in range(frames)]
    more = {"save_all": True, "append_images": others} if others else {}
    buffer = io.BytesIO()
    first.save(buffer, name.split()[-1], **FORMATS[name], **more)
    return buffer.getvalue()


@functools.cache
def counter(most: int) -> Any:
    """Return the function, traced once."""
    signature = [tf.TensorSpec([], tf.string)]
    return tf.function(lambda content: header.num_pixels(content, most), signature, autograph=False)


def counted(content: bytes, most: int = MOST) -> int:
    return int(counter(most)(tf.constant(content)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_header_states_what_is_decoded(name: str) -> None:
    content = encoded(name)
    shape = tf.io.decode_image(content, 3, expand_animations=False).shape
    assert counted(content) == shape[0] * shape[1] == 37 * 29


def test_all_frames_of_a_gif_are_counted_up_to_the_limit() -> None:
    content = encoded("GIF", frames=5)
    assert counted(content) == 5 * 37 * 29
    assert counted(content, 2000) == 2 * 37 * 29
    one = bytearray(encoded("GIF"))
    one[6:10] = struct.pack("<HH", 1, 1)  # the screen, which decoders ignore
    assert counted(bytes(one)) == 37 * 29


def test_rows_of_a_bitmap_may_begin_at_the_top() -> None:
    content = bytearray(encoded("BMP"))
    content[22:26] = struct.pack("<i", -29)
    assert counted(bytes(content)) == 37 * 29


@pytest.mark.parametrize("content", [b"", b"G", b"\x89P", b"BM", b"\xff\x0a" * 9, b"II*\0"])
def test_a_file_without_a_header_has_no_pixels(content: bytes) -> None:
    assert counted(content) < 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_beginning_of_a_file_is_read_without_end(name: str) -> None:
    content = encoded(name)
    for size in (*range(40), len(content) // 2):
        try:
            assert counted(content[:size]) <= 37 * 29
        except tf.errors.InvalidArgumentError:
            assert content.startswith(b"\xff\xd8")  # of a JPEG's header all is needed


def test_nothing_larger_than_the_limit_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_input(Path("unused"), max_pixels=37 * 29 - 1)
    content = tf.constant(encoded("PNG"))
    monkeypatch.setattr(tf.io, "decode_image", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"states 1073 pixels, more than inp"):
        source._preprocessing.decoded(content)
    with pytest.raises(errors.InputError, match=r"input.max_pixels=0 is not possible. Use 1 or"):
        folder_input(Path("unused"), max_pixels=0)
