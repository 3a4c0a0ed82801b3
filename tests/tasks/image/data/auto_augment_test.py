"""Every operation against plain NumPy, the table against a second copy, the draws by counting."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import seeds
from lingvo_gpipe.tasks.image.data import auto_augment

# The table once more, as it is abbreviated elsewhere.
V0 = (
    "E.8,1+Y.8,4 | C.4,9+E.6,3 | C.4,1+R.6,8 | S.8,3+E.4,7 | S.4,2+S.6,2 | C.2,0+E.8,8 | "
    "E.4,8+SA.8,3 | X.2,9+R.6,8 | C.6,1+E1,2 | I.4,9+R.6,0 | E1,9+Y.6,3 | C.4,7+E.6,0 | "
    "P.4,6+AC.4,7 | S.6,8+C.6,9 | S.2,4+R.8,9 | R1,7+TY.8,9 | X0,0+S.8,4 | Y.8,0+C.6,4 | "
    "C1,0+R.6,2 | E.8,4+E0,8 | E1,4+AC.6,2 | Y.4,7+SA.6,7 | P.8,2+S.6,10 | S.6,8+E.6,1 | "
    "C.8,6+R.4,5"
)
SHORT = {
    "AutoContrast": "AC", "Color": "C", "Equalize": "E", "Invert": "I", "Posterize": "P",
    "Rotate": "R", "ShearX": "X", "ShearY": "Y", "Solarize": "S", "SolarizeAdd": "SA",
    "TranslateY": "TY",
}  # fmt: skip


def image(seed: int = 0, height: int = 11, width: int = 14) -> Any:
    random = np.random.RandomState(seed)
    # Channels of different, narrow ranges, so that stretching and equalising do something.
    low, high = np.array([20, 90, 60]), np.array([120, 200, 255])
    return random.randint(low, high, [height, width, 3]).astype(np.uint8)


def apply(name: str, given: Any, level: float) -> Any:
    operation = auto_augment.OPERATIONS[name]
    return operation(tf.constant(given), tf.constant(level, tf.float64)).numpy()


def key(number: int) -> tf.Tensor:
    return seeds.fold(seeds.base_seed(3), number)


def marks_of(augment: Callable[[Any, Any], Any], count: int) -> collections.Counter[int]:
    """Count what `augment` makes of a black pixel with the first `count` keys, in one graph."""

    @tf.function
    def draw() -> tf.Tensor:
        black = tf.zeros([1, 1, 3], tf.uint8)
        numbers = tf.range(count)
        return tf.map_fn(
            lambda n: augment(black, key(n))[0, 0, 0], numbers, fn_output_signature=tf.uint8
        )

    return collections.Counter(draw().numpy().tolist())


def test_the_table_is_the_published_one() -> None:
    told = " | ".join(
        "+".join(f"{SHORT[n]}{f'{p:g}'.removeprefix('0') or 0},{level}" for n, p, level in pair)
        for pair in auto_augment.POLICY_V0
    )
    assert told == V0


# --- Operations -----------------------------------------------------------------------------------


def blend(one: Any, other: Any, level: float) -> Any:
    factor = 1.8 * level + 0.1
    return np.clip(one + factor * (np.float64(other) - one), 0, 255)


def grey(given: Any) -> Any:
    return np.float64(tf.image.rgb_to_grayscale(given))


def smoothed(given: Any) -> Any:
    result: Any = given.astype(np.float64)
    weights = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    for y in range(1, given.shape[0] - 1):
        for x in range(1, given.shape[1] - 1):
            around = given[y - 1 : y + 2, x - 1 : x + 2]
            result[y, x] = np.floor((weights[..., None] * around).sum((0, 1)))
    return result


def stretched(given: Any) -> Any:
    low, high = np.float64(given.min((0, 1))), given.max((0, 1))
    return (given - low) * 255 / (high - low)


def posterized(given: Any, level: float) -> Any:
    step = 2 ** min(7, 8 - math.floor(4 * level))
    return given // step * step


def solarized_add(given: Any, level: float) -> Any:
    added = np.minimum(np.int64(given) + math.floor(110 * level), 255)
    return np.where(given < 128, added, given)


BY_HAND: dict[str, Callable[[Any, float], Any]] = {
    "AutoContrast": lambda given, _: stretched(given),
    "Brightness": lambda given, level: blend(np.zeros(given.shape), given, level),
    "Color": lambda given, level: blend(grey(given), given, level),
    "Contrast": lambda given, level: blend(np.floor(grey(given).mean() + 0.5), given, level),
    "Invert": lambda given, _: 255 - given,
    "Posterize": posterized,
    "Sharpness": lambda given, level: blend(smoothed(given), given, level),
    "Solarize": lambda given, level: np.where(
        np.int64(given) < math.floor(256 * level), given, 255 - given
    ),
    "SolarizeAdd": solarized_add,
}


@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_an_operation_is_what_it_is_by_hand(name: str, level: float) -> None:
    given = image()
    found, expected = apply(name, given, level), BY_HAND[name](given, level)
    # float32 may round the other way where float64 lies at a whole number.
    assert np.abs(np.int64(found) - np.floor(expected + 1e-3)).max() <= 1
    assert np.mean(found == np.floor(expected + 1e-3)) > 0.97


def test_beyond_eight_bits_all_are_kept() -> None:
    given = image()
    np.testing.assert_array_equal(apply("Posterize", given, 2.4), given)


def taken(given: Any, where: Callable[[int, int], tuple[float, float]]) -> Any:
    """Take pixel (x, y) from `where`, the nearest; grey outside."""
    height, width = given.shape[:2]
    result = np.full_like(given, 128)
    for y in range(height):
        for x in range(width):
            column, row = (round(place) for place in where(x, y))
            if 0 <= column < width and 0 <= row < height:
                result[y, x] = given[row, column]
    return result


def rotated(given: Any, level: float) -> Any:
    angle = math.radians(30 * level)
    middle_y, middle_x = ((side - 1) / 2 for side in given.shape[:2])

    def where(x: int, y: int) -> tuple[float, float]:
        right, down = x - middle_x, y - middle_y
        return (
            middle_x + math.cos(angle) * right - math.sin(angle) * down,
            middle_y + math.sin(angle) * right + math.cos(angle) * down,
        )

    return taken(given, where)


@pytest.mark.parametrize("level", [-0.83, -0.31, 0.0, 0.57, 1.0])
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("Rotate", rotated),
        ("ShearX", lambda g, level: taken(g, lambda x, y: (x + 0.3 * level * y, y))),
        ("ShearY", lambda g, level: taken(g, lambda x, y: (x, y + 0.3 * level * x))),
        ("TranslateX", lambda g, level: taken(g, lambda x, y: (x + 9 * level, y))),
        ("TranslateY", lambda g, level: taken(g, lambda x, y: (x, y + 9 * level))),
    ],
)
def test_a_projection_is_what_it_is_by_hand(
    name: str, level: float, by_hand: Callable[[Any, float], Any]
) -> None:
    given = image()
    found = apply(name, given, 9 * level if name.startswith("Translate") else level)
    # The nearest of two pixels equally far may be either.
    assert np.mean((found == by_hand(given, level)).all(-1)) > 0.95
    assert level == 0.0 or (found == 128).all(-1).any()


def test_equalizing_spreads_each_channel() -> None:
    given = image(height=40, width=40)
    found = apply("Equalize", given, 0.4)
    for channel in range(3):
        before, after = given[..., channel], found[..., channel]
        counts = np.bincount(before.ravel(), minlength=256)
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        table = (np.cumsum(counts) + step // 2) // step
        table = np.clip(np.concatenate([[0], table[:-1]]), 0, 255)
        np.testing.assert_array_equal(after, table[before])
    flat = np.full([4, 4, 3], 77, np.uint8)
    np.testing.assert_array_equal(apply("Equalize", flat, 0.0), flat)
    np.testing.assert_array_equal(apply("AutoContrast", flat, 0.0), flat)


# --- Draws ----------------------------------------------------------------------------------------


def test_erasing_clips_a_square_at_the_edge() -> None:
    centres: collections.Counter[tuple[int, ...]] = collections.Counter()
    erased = tf.function(lambda k: auto_augment.erased(tf.ones([5, 7, 3]), 3, 0.0, k))
    for number in range(400):
        found = erased(key(number)).numpy()
        assert (found == found[..., :1]).all()
        holes = found[..., 0] == 0
        spans = [holes.any(axis).nonzero()[0].tolist() for axis in (1, 0)]
        assert holes.sum() == len(spans[0]) * len(spans[1])
        centre = tuple(span[0] + 1 if span[0] else span[-1] - 1 for span in spans)
        for span, place, side in zip(spans, centre, (5, 7), strict=True):
            assert span == [n for n in range(place - 1, place + 2) if 0 <= n < side]
        centres[centre] += 1
    # Uniform over 35 places; chi-square with 34 degrees stays below 70 in 99.98 %.
    assert len(centres) == 35
    assert sum((count - 400 / 35) ** 2 / (400 / 35) for count in centres.values()) < 70


@pytest.fixture(name="learned", scope="module")
def make_learned() -> Any:
    return tf.function(auto_augment.auto_augment)


def test_a_pair_is_drawn_by_the_key_alone(learned: Any) -> None:
    given = tf.constant(image(height=24, width=24))
    once = [learned(given, key(number)).numpy() for number in range(30)]
    again = [learned(given, key(number)).numpy() for number in range(30)]
    np.testing.assert_array_equal(once, again)
    assert all(found.shape == given.shape for found in once)
    assert len({found.tobytes() for found in once}) > 10


def test_pairs_and_probabilities_are_drawn_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operations that only leave their mark show which were called, how often and how strongly."""
    names = sorted(SHORT)

    def mark(name: str) -> Callable[[Any, Any], Any]:
        # Two digits: the operations of the pair, in order. Both directions have one mark.
        return lambda given, _: given * 16 + tf.cast(names.index(name) + 1, tf.uint8)

    monkeypatch.setattr(auto_augment, "OPERATIONS", {name: mark(name) for name in names})
    count = 6000
    marks = marks_of(auto_augment.auto_augment, count)
    expected: dict[int, float] = collections.defaultdict(float)
    for (one, p, _), (other, q, _) in auto_augment.POLICY_V0:
        first, second = names.index(one) + 1, names.index(other) + 1
        for chance, shown in (
            (p * q, first * 16 + second),
            (p * (1 - q), first),
            ((1 - p) * q, second),
            ((1 - p) * (1 - q), 0),
        ):
            expected[shown] += count / 25 * chance
    assert set(marks) <= {shown for shown, often in expected.items() if often > 0}
    found = sum(
        (marks[shown] - often) ** 2 / often for shown, often in expected.items() if often > 5
    )
    # About 50 degrees of freedom: 99.9 % of fair draws stay below 87.
    assert found < 87
