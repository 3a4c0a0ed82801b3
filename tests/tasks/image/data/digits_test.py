"""The handwritten digits: a fixed split, true specs, fields of tasks and of served models."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lingvo_gpipe.tasks.image import SklearnDigits
from tests.tasks.image.image_files import values


def test_digits_hold_a_fixed_fifth_of_each_class_out() -> None:
    source = SklearnDigits.Params(batch_size=100).instantiate()
    assert (source.num_examples("train"), source.num_examples("test")) == (1438, 359)
    images: dict[str, list[bytes]] = {}
    for split in ("train", "test"):
        batches = [values(b) for b in source.evaluation(split)]
        labels = np.concatenate([b["label"] for b in batches])
        counts = np.bincount(labels, minlength=10)
        assert counts.min() >= (139 if split == "train" else 34)
        assert counts.max() <= (147 if split == "train" else 37)
        whole = np.concatenate([b["image"] for b in batches])
        assert (whole.min(), whole.max()) == (0.0, 1.0)
        images[split] = [image.tobytes() for image in whole]
    assert not set(images["train"]) & set(images["test"])
    # The split itself, by a sum that any other split would change.
    first = values(next(iter(source.evaluation("test"))))
    assert (int(first["label"][:20].sum()), round(float(first["image"].sum()), 1)) == (83, 1970.8)


def test_digits_declare_their_spec() -> None:
    source = SklearnDigits.Params(batch_size=3).instantiate()
    batch = next(iter(source.batches(1)))
    assert {k: tf.TensorSpec.from_tensor(v) for k, v in batch.items()} == source.element_spec()


def test_digits_are_shown_and_served_as_they_are() -> None:
    source = SklearnDigits.Params(batch_size=30).instantiate()
    batch = next(iter(source.batches(1)))
    (shown,) = source.pictures(batch).values()
    np.testing.assert_array_equal(
        np.round(shown.numpy() / 255 * 16), np.round(batch["image"][:16] * 16)
    )
    assert source.class_names == tuple("0123456789")
    serving = source.serving()
    assert serving.signature["image"].shape.as_list() == [None, 8, 8, 1]
    np.testing.assert_array_equal(
        serving.fields({"image": batch["image"]})["image"], batch["image"]
    )
