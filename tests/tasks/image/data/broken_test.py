"""Broken images: replaced by position in training, left out of evaluation, counted and named."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.input.reading import CutOut
from lingvo_gpipe.network.parts import ReplicaPart
from tests.tasks.image import image_files
from tests.tasks.image.image_files import drawn, folder_input, pixels

TRAIN = [f"cat/{n}.png" for n in range(5)] + [f"dog/{n}.png" for n in range(4)]


@pytest.fixture(name="folder")
def make_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return image_files.write_folder(tmp_path)


def spoil(folder: pathlib.Path, *indices: int, content: bytes = b"garbage") -> None:
    for index in indices:
        (folder / "train" / TRAIN[index]).write_bytes(content)


def which(images: Any) -> list[int]:
    """Identify each training image by its pixels."""
    known = {
        (pixels(seed) / np.float32(255)).astype(np.float32).tobytes(): seed for seed in range(9)
    }
    return [
        known[np.float32(np.round(image * 255) / np.float32(255)).tobytes()] for image in images
    ]


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoilt", "batch_size", "expected"),
    [
        ((3, 4, 5), 3, [0, 1, 2, 6, 6, 6, 6, 7, 8]),  # a whole mini-batch
        ((7, 8), 9, [0, 1, 2, 3, 4, 5, 6, 0, 0]),
    ],
)
def test_the_next_readable_image_takes_the_place(
    folder: pathlib.Path, spoilt: tuple[int, ...], batch_size: int, expected: list[int]
) -> None:
    spoil(folder, *spoilt)
    source = folder_input(folder, shuffle=False, batch_size=batch_size, max_broken_share=0.5)
    batches = source.batches(1)
    found = drawn(batches, 2 * 9 // batch_size)
    assert which(np.concatenate([b["image"] for b in found])) == 2 * expected
    labels = np.concatenate([b["label"] for b in found])
    assert labels.tolist() == [int(index >= 5) for index in 2 * expected]
    assert batches.counts == {"replaced": 2 * len(spoilt)}


def test_mini_batches_with_broken_images_are_a_function_of_seed_and_position(
    folder: pathlib.Path,
) -> None:
    spoil(folder, 1, 4, 5)
    more = {"flip": True, "pad": 1, "cutout": 2, "max_broken_share": 0.5}
    whole = drawn(folder_input(folder, **more).batches(7), 6)
    source = folder_input(folder, **more)
    np.testing.assert_equal(drawn(source.batches(7, 3), 3), whole[3:])
    # What is known to be broken by now changes nothing.
    np.testing.assert_equal(drawn(source.batches(7), 6), whole)


def test_parts_of_mini_batches_with_broken_images_are_those_of_the_whole(
    folder: pathlib.Path,
) -> None:
    """Each of two replicas has its own images replaced; an evaluation leaves the same ones out."""
    spoil(folder, 1, 4, 5)
    (folder / "test" / "cat" / "broken.png").write_bytes(b"garbage")
    more = {"flip": True, "pad": 1, "batch_size": 5, "max_broken_share": 0.5}
    whole = folder_input(folder, **more)
    training = whole.batches(7, 2)
    expected = drawn(training, 4)
    evaluated = list(whole.evaluation("test", 2))
    assert len(evaluated) > 1
    found, counts = [], []
    for replica in range(2):
        own = ReplicaPart(replica, 2, 4)
        source = folder_input(folder, **more)
        batches = source.part(own, 7, 2)
        found.append(drawn(batches, 4))
        counts.append(batches.counts["replaced"])
        left = CutOut(source.evaluation("test", 2), own)
        for one, other in zip(left, evaluated, strict=True):
            for name, value in own.cut(other).items():
                np.testing.assert_array_equal(one[name], value)
        assert left.counts == {"left_out": 1}
    joined = [{n: np.concatenate([a[n], b[n]]) for n in a} for a, b in zip(*found, strict=True)]
    np.testing.assert_equal(joined, expected)
    assert sum(counts) == training.counts["replaced"] > 0


def test_broken_images_are_named_once(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(folder, 0, 3, 4)
    source = folder_input(folder, shuffle=False, max_broken_share=1.0)
    with caplog.at_level("WARNING"):
        drawn(source.batches(1), 10)
    named = sorted(text.split(": ")[0] for text in caplog.messages)
    assert named == [f"broken image {folder}/train/{TRAIN[index]}" for index in (0, 3, 4)]


REASONS: tuple[tuple[Callable[[], bytes], str], ...] = (
    (lambda: b"", "Input is empty"),
    (lambda: b"garbage", "Unknown image file format. One of JPEG"),
    (lambda: b"\xff\xd8\xff", "jpeg::Uncompress failed"),
    (lambda: tf.io.encode_jpeg(pixels(0, 40, 40)).numpy()[:-200], "jpeg::Uncompress failed"),
)


def test_the_reason_is_reported(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for index, (content, _) in enumerate(REASONS):
        spoil(folder, index, content=content())
    batches = folder_input(folder, resize=True, shuffle=False, max_broken_share=0.5).batches(1)
    with caplog.at_level("WARNING"):
        assert all(len(batch["label"]) == 4 for batch in drawn(batches, 5))
    for index, (_, reason) in enumerate(REASONS):
        assert f"broken image {folder}/train/{TRAIN[index]}: {reason}" in caplog.text
    assert batches.counts["replaced"] == 4 + 4 + 2  # the third epoch has begun


@pytest.mark.parametrize(
    ("share", "spoilt", "number"), [(0.0, (2,), 1), (0.01, (2, 5), 2), (0.25, (1, 2, 3, 6), 4)]
)
def test_too_many_broken_images_end_a_run(
    folder: pathlib.Path, share: float, spoilt: tuple[int, ...], number: int
) -> None:
    # One less is tolerated.
    spoil(folder, *spoilt[:-1])
    drawn(folder_input(folder, max_broken_share=share).batches(1), 5)
    spoil(folder, *spoilt)
    with pytest.raises(errors.InputError) as caught:
        drawn(folder_input(folder, shuffle=False, max_broken_share=share).batches(1), 5)
    assert str(caught.value).startswith(
        f"image folder {folder}, split 'train': at least {number} of 9 images cannot be read, more "
        f"than input.max_broken_share={share:g} allows, such as {folder}/train/"
    )
    assert "\n" not in str(caught.value)


def test_a_split_without_a_readable_image_is_reported(folder: pathlib.Path) -> None:
    spoil(folder, *range(9))
    with pytest.raises(errors.InputError, match="none of the 9 examples can be read"):
        drawn(folder_input(folder, max_broken_share=1.0).batches(1), 1)


def test_an_image_of_another_size_is_no_broken_image(folder: pathlib.Path) -> None:
    image_files.write(folder / "train" / TRAIN[3], pixels(1, 9, 4))
    image_files.write(folder / "test" / "dog" / "odd.png", pixels(1, 9, 4))
    for batches, name in (
        (folder_input(folder).batches(1), "cat/3.png"),
        (folder_input(folder).evaluation("test", 3), "dog/odd.png"),
    ):
        with pytest.raises(
            errors.InputError, match=rf"{name} is 9 x 4 pixels, not 6 x 5. Set input.resize=True"
        ):
            drawn(batches, 5)
    drawn(folder_input(folder, random_crop=True).batches(1), 5)


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoilt", "batch_size"),
    [
        ((0, 1, 2, 3), 4),  # the whole first mini-batch
        ((5, 6, 7, 8), 4),
        ((2, 8), 1),
        ((2, 3), 9),
    ],
)
def test_an_evaluation_has_every_readable_image_once(
    folder: pathlib.Path, spoilt: tuple[int, ...], batch_size: int
) -> None:
    spoil(folder, *spoilt)
    batches = folder_input(folder, max_broken_share=0.5).evaluation("train", batch_size)
    found = drawn(batches)
    kept = [index for index in range(9) if index not in spoilt]
    assert which(np.concatenate([b["image"] for b in found])) == kept
    assert {len(b["label"]) for b in found[:-1]} <= {batch_size}
    assert batches.counts == {"left_out": len(spoilt)}
    assert set(found[0]) == {"image", "label"}
