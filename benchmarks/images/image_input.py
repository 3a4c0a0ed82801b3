"""How many images per second does the input produce, and what does each distortion cost?

`python -m benchmarks.images.image_input [ROUNDS]`: JPEG files made here (smooth noise: 36 × 36 for
32²; 375 × 500 for 224², ImageNet's average), read by `ImageFolder` in mini-batches of 64 (32²) and
32, after a warm-up, the policies in turn in each round; the median of the rounds, with the other
load on the machine. A second table: one file in a hundred broken.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

FILES = 512
# Side of the network's images: height and width of the files, mini-batch, mini-batches per round.
SIZES = {32: (36, 36, 64, 48), 224: (375, 500, 32, 8)}
CROP = {"random_crop": True, "antialias": False, "flip": True}
POLICIES: dict[str, dict[str, Any]] = {
    "decode and resize": {"antialias": False},
    "the same, antialiased": {},
    "random crop, flip": CROP,
    "and colour": CROP | {"brightness": 32 / 255, "saturation": (0.5, 1.5)},
    "and cutout": CROP | {"cutout": 16},
    "and AutoAugment v0": CROP | {"policy": "autoaugment_v0"},
    "and RandAugment (2, 10)": CROP | {"policy": "randaugment"},
}


def write_files(folder: pathlib.Path, height: int, width: int, broken: int) -> None:
    """Lay out `train/one/` with `FILES` files, of which `broken` are cut off."""
    import numpy as np
    import tensorflow as tf

    random = np.random.RandomState(0)
    (folder / "train" / "one").mkdir(parents=True)
    for number in range(FILES):
        coarse = random.randint(0, 256, [height // 12, width // 12, 3]).astype(np.float32)
        image = tf.image.resize(coarse, [height, width], "bicubic")
        image += random.normal(0, 6, [height, width, 3])
        pixels = tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)
        content = tf.io.encode_jpeg(pixels, quality=90).numpy()
        if number < broken:
            content = content[: len(content) // 2]
        (folder / "train" / "one" / f"{number}.jpg").write_bytes(content)


def source(folder: pathlib.Path, side: int, batch: int, more: dict[str, Any]) -> Iterator[Any]:
    """Return endless mini-batches."""
    from lingvo_gpipe.tasks.image import ImageFolder

    size: dict[str, Any] = {"height": side, "width": side, "resize": True}
    params = ImageFolder.Params(
        data_dir=str(folder), batch_size=batch, max_broken_share=0.1, **size, **more
    )
    return iter(params.instantiate().batches(seed=1))


def per_second(batches: Iterator[Any], size: int, count: int) -> float:
    """Return images per second over `count` mini-batches, those that were waiting left out."""
    for _ in range(3):
        next(batches)
    begun = time.perf_counter()
    for _ in range(count):
        next(batches)
    return size * count / (time.perf_counter() - begun)


def table(side: int, policies: dict[str, dict[str, Any]], broken: int, rounds: int) -> None:
    """Measure the policies of one size in turn, and print images per second."""
    from benchmarks.support import machine

    height, width, batch, count = SIZES[side]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_files(folder, height, width, broken)
        speeds: dict[str, list[float]] = {name: [] for name in policies}
        load = machine.Load()
        for _ in range(rounds):
            for name, more in policies.items():
                # A new input each time, so that only one reads ahead.
                speeds[name].append(per_second(source(folder, side, batch, more), batch, count))
        other = load.stop()
    broken_text = f", {broken} of {FILES} files broken" if broken else ""
    files = f"files of {height} x {width}{broken_text}"
    print(f"\n{side} x {side} from {files}; other load {other:.1f} cores")
    for name, values in speeds.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"    {name:<26} {statistics.median(values):>8,.0f} images/s ({spread})")


def main() -> None:
    """Print the tables."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    from absl import logging

    from benchmarks.support import machine

    logging.set_verbosity(logging.ERROR)
    print(machine.describe())
    for side in SIZES:
        table(side, POLICIES, 0, rounds)
    name = "random crop, flip"
    for side in SIZES:
        table(side, {name: POLICIES[name]}, FILES // 100, rounds)


if __name__ == "__main__":
    main()
