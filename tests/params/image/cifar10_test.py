"""The same input code trains on a folder of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from lingvo_gpipe.params.image import cifar10
from lingvo_gpipe.run import loop


def test_a_folder_of_images_is_trained_on(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 2), ("test", 1)):
        for name in "abcdefghij":
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
                png = tf.io.encode_png(pixels)
                (folder / f"{number}.png").write_bytes(png.numpy())
    params = cifar10.ConvNetFolder().task()
    params.input.set(data_dir=str(tmp_path / "images"), batch_size=4)
    params.train.max_steps = 2
    # Small, because the test is about reading images, not about learning.
    params.model.layers = [params.model.layers[0], *params.model.layers[-6:]]
    result = loop.run(params, tmp_path / "run", evaluate=True)
    assert result.step == 2
    assert 0.0 <= result.metrics["accuracy"] <= 1.0
