"""Distortions of training images: what is drawn, how far it goes, and that a key decides it."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import seeds
from lingvo_gpipe.tasks.image.data import preprocessing
from tests.tasks.image.image_files import folder_input, pixels


def preprocess(**more: Any) -> preprocessing.Preprocessing:
    params = folder_input(pathlib.Path("unread"), height=8, width=10, **more).params
    return preprocessing.Preprocessing(params)


def key(number: int) -> tf.Tensor:
    return seeds.fold(seeds.base_seed(5), number)


def distorted(given: Any, count: int, **more: Any) -> list[Any]:
    own = preprocess(**more)
    image = tf.constant(given / np.float32(255))
    distort = tf.function(lambda k: own.distort(image, k))
    return [distort(key(number)).numpy() for number in range(count)]


def test_a_window_has_the_area_and_the_aspect_that_were_requested() -> None:
    own = preprocess(crop_area=(0.2, 0.6), crop_aspect=(0.5, 1.5))
    # The value of each pixel encodes its position.
    rows, columns = np.meshgrid(np.arange(100), np.arange(120), indexing="ij")
    image = tf.constant(np.stack([rows, columns, rows], -1), tf.uint8)
    cut = tf.function(lambda k: own.random_window(image, k))
    shapes, starts = [], []
    for number in range(300):
        window = cut(key(number)).numpy()
        height, width = window.shape[:2]
        first = window[0, 0, :2]
        np.testing.assert_array_equal(
            window[-1, -1, :2], [first[0] + height - 1, first[1] + width - 1]
        )
        shapes.append((height, width))
        starts.append(tuple(first))
    heights, widths = np.transpose(shapes)
    areas, aspects = heights * widths / 12_000, widths / heights
    # A side may be a pixel off.
    assert 0.19 <= areas.min() <= 0.23
    assert 0.52 <= areas.max() <= 0.61
    assert 0.48 <= aspects.min() <= 0.55
    assert 1.4 <= aspects.max() <= 1.53
    assert len(set(starts)) > 250


def test_the_whole_image_is_taken_where_no_window_fits() -> None:
    own = preprocess(crop_area=(0.9, 1.0), crop_aspect=(0.9, 1.1))
    narrow = tf.zeros([4, 90, 3], tf.uint8)
    assert own.random_window(narrow, key(0)).shape == (4, 90, 3)
    assert own.random_window(tf.zeros([1, 1, 3], tf.uint8), key(0)).shape == (1, 1, 3)


def test_colour_goes_as_far_as_asked_and_stays_a_colour() -> None:
    given = np.full([8, 10, 3], 100, np.uint8)
    values = [found.mean() - 100 / 255 for found in distorted(given, 200, brightness=0.2)]
    assert -0.2 <= min(values) < -0.17
    assert 0.17 < max(values) <= 0.2
    given[..., 0] = 200
    spans = [np.ptp(found[0, 0]) for found in distorted(given, 200, saturation=(0.5, 1.5))]
    before = 100 / 255
    assert 0.5 * before <= min(spans) < 0.55 * before
    assert 1.45 * before < max(spans) <= 1.5 * before + 1e-5
    bright = distorted(np.full([8, 10, 3], 250, np.uint8), 50, brightness=0.5)
    assert max(found.max() for found in bright) == 1.0


@pytest.mark.parametrize(
    "more",
    [
        {"pad": 2, "flip": True},
        {"brightness": 0.1, "saturation": (0.5, 1.5)},
        pytest.param({"policy": "autoaugment_v0"}, marks=pytest.mark.reliability_full),
        {"policy": "randaugment", "policy_layers": 2, "policy_magnitude": 7.0},
    ],
)
def test_a_key_decides(more: dict[str, Any]) -> None:
    given = pixels(1, 8, 10)
    once = distorted(given, 40, **more)
    np.testing.assert_array_equal(once, distorted(given, 40, **more))
    assert len({found.tobytes() for found in once}) > 10
    assert all(found.shape == (8, 10, 3) for found in once)
    assert min(found.min() for found in once) >= 0.0
    assert max(found.max() for found in once) <= 1.0


def test_each_distortion_draws_its_own() -> None:
    """The draws of one distortion do not depend on those of others."""
    given = pixels(1, 8, 10)
    flipped = distorted(given, 40, flip=True)
    both = distorted(given, 40, flip=True, pad=2)
    padded = distorted(given, 40, pad=2)
    for alone, window, together in zip(flipped, padded, both, strict=True):
        is_flipped = not np.array_equal(alone, given / np.float32(255))
        np.testing.assert_array_equal(together, window[:, ::-1] if is_flipped else window)
