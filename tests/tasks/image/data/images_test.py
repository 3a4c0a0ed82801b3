"""What every input of encoded images does: evaluation's windows, scaling, serving, class counts."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, optim, pipelining, task
from tests.tasks.image import image_files
from tests.tasks.image.image_files import drawn, folder_input, pixels, values


@pytest.fixture(name="folder")
def make_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return image_files.write_folder(tmp_path)


@pytest.fixture(name="one")
def make_one(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder whose `test` is one image of 40 × 60."""
    image_files.write(tmp_path / "test" / "cat" / "1.png", pixels(3, 40, 60))
    return tmp_path


def evaluated(folder: pathlib.Path, **more: Any) -> Any:
    (batch,) = drawn(folder_input(folder, resize=True, **more).evaluation("test"))
    return batch["image"]


def test_pixels_are_normalised_by_channel(folder: pathlib.Path) -> None:
    source = folder_input(folder, mean=(0.5, 0.25, 0.0), std=(2.0, 1.0, 0.5))
    plain = values(next(iter(folder_input(folder).evaluation("test"))))["image"]
    found = values(next(iter(source.evaluation("test"))))["image"]
    expected = (plain - np.array([0.5, 0.25, 0.0])) / np.array([2.0, 1.0, 0.5])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_sizes_and_channels_are_turned_where_asked(folder: pathlib.Path) -> None:
    grey = folder / "test" / "dog" / "grey.jpg"
    grey.write_bytes(tf.io.encode_jpeg(pixels(1, 9, 4, 1)).numpy())
    source = folder_input(folder, height=3, width=7, resize=True)
    assert values(next(iter(source.evaluation("test", 9))))["image"].shape == (6, 3, 7, 3)
    source = folder_input(folder, height=3, width=7, resize=True, channels=1)
    assert values(next(iter(source.evaluation("test", 9))))["image"].shape == (6, 3, 7, 1)


def test_distortion_is_only_in_training_and_by_seed_epoch_and_example(
    folder: pathlib.Path,
) -> None:
    more = {"batch_size": 9, "shuffle": False}
    plain = values(next(iter(folder_input(folder, **more).batches(1))))["image"]
    source = folder_input(folder, flip=True, pad=2, **more)
    epochs = [values(b)["image"] for b in itertools.islice(source.batches(1), 40)]
    other = values(next(iter(source.batches(2))))["image"]
    assert len({epoch.tobytes() for epoch in [*epochs, other]}) == 41
    np.testing.assert_equal(values(next(iter(source.evaluation("train", 9))))["image"], plain)

    flips = folder_input(folder, flip=True, **more)
    share = []
    for batch in itertools.islice(flips.batches(1), 40):
        for image, original in zip(values(batch)["image"], plain, strict=True):
            flipped = np.array_equal(image, original[:, ::-1])
            assert flipped or np.array_equal(image, original)
            share.append(flipped)
    assert 0.4 < np.mean(share) < 0.6
    # A crop is a window of the padded image, and every offset comes up.
    offsets = set()
    for batch in itertools.islice(folder_input(folder, pad=1, **more).batches(1), 20):
        for image, original in zip(values(batch)["image"], plain, strict=True):
            wide = np.pad(original, [(1, 1), (1, 1), (0, 0)])
            fits = [
                (y, x)
                for y in range(3)
                for x in range(3)
                if np.array_equal(image, wide[y : y + 6, x : x + 5])
            ]
            assert fits
            offsets.update(fits)
    assert len(offsets) == 9


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("central", [1.0, 0.875, 0.5])
def test_the_central_share_of_each_side_is_evaluated(
    one: pathlib.Path, central: float, antialias: bool
) -> None:
    window = tf.image.central_crop(pixels(3, 40, 60), central)
    expected = tf.image.resize(window, [16, 12], antialias=antialias) / 255
    found = evaluated(one, height=16, width=12, central=central, antialias=antialias)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


# --- Training -------------------------------------------------------------------------------------


def test_images_of_any_size_become_windows_of_one(folder: pathlib.Path) -> None:
    for number, (height, width) in enumerate([(2, 2), (31, 4), (5, 60), (70, 90)]):
        image_files.write(folder / "train" / "cat" / f"{number}.png", pixels(9, height, width))
    source = folder_input(folder, random_crop=True, batch_size=9, height=7, width=11)
    once, again = (drawn(source.batches(4), 3) for _ in range(2))
    np.testing.assert_equal(once, again)
    assert once[0]["image"].shape == (9, 7, 11, 3)
    np.testing.assert_equal(drawn(source.batches(4, 2), 1), once[2:])


def test_cutout_comes_after_mean_and_deviation(folder: pathlib.Path) -> None:
    source = folder_input(folder, cutout=4, mean=(0.5,) * 3, std=(0.5,) * 3, batch_size=9)
    for batch in drawn(source.batches(1), 2):
        assert batch["image"].min() < -0.9
        assert batch["image"].max() > 0.9
        holes = (batch["image"] == 0.0).all(-1).sum((1, 2))
        assert ((holes >= 4) & (holes <= 16)).all()
    assert not (drawn(source.evaluation("test"))[0]["image"] == 0.0).all(-1).any()


def test_labels_may_leave_a_background_class(folder: pathlib.Path) -> None:
    source = folder_input(folder, label_offset=1)
    assert source.class_names == ("background", "cat", "dog", "emu")
    labels = np.concatenate([b["label"] for b in drawn(source.evaluation("test"))])
    assert labels.tolist() == [1, 1, 2, 3, 3]
    assert set(drawn(source.batches(1), 1)[0]["label"]) <= {1, 2}


def test_pictures_are_what_was_read(folder: pathlib.Path) -> None:
    more = {"batch_size": 20, "shuffle": False, "mean": (0.5, 0.1, 0.2), "std": (0.5, 2.0, 0.1)}
    source = folder_input(folder, **more)
    (shown,) = source.pictures(next(iter(source.batches(1)))).values()
    assert shown.dtype == tf.uint8
    expected = [pixels(number % 9) for number in range(16)]
    assert np.abs(np.int64(shown) - np.stack(expected)).max() <= 1


# --- Serving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"central": 0.8, "resize": True}])
def test_files_are_served_in_evaluations_preprocessing(
    folder: pathlib.Path, more: dict[str, Any]
) -> None:
    source = folder_input(folder, mean=(0.3, 0.2, 0.1), flip=True, cutout=3, **more)
    serving = source.serving()
    served = tf.function(serving.fields, autograph=False).get_concrete_function(serving.signature)
    files = sorted((folder / "test").glob("*/*.png"))
    contents = tf.constant([file.read_bytes() for file in files])
    found = served({"image_bytes": contents})
    (expected,) = drawn(source.evaluation("test", 5))
    np.testing.assert_allclose(found["image"], expected["image"], atol=1e-6)
    assert served({"image_bytes": contents[:2]})["image"].shape[0] == 2


# --- Classes --------------------------------------------------------------------------------------


def task_of(folder: pathlib.Path, heads: list[Any], **more: Any) -> Any:
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=heads),
        input=folder_input(folder, **more).params,
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1), max_steps=1
        ),
    )


def test_the_number_of_classes_is_taken_from_the_data(folder: pathlib.Path) -> None:
    heads = [layers.Sequential.Params(name="a", layers=[layers.Softmax.Params(name="b")])]
    given = task_of(folder, heads)
    completed = task.complete(given)
    assert completed.model.layers[0].layers[0].classes == 3
    assert given.model.layers[0].layers[0] == heads[0].layers[0]
    assert task.complete(task_of(folder, heads, label_offset=1)).get(
        "model.layers[0].layers[0].classes"
    ) == 4  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "offset", "text"),
    [
        (3, 0, ""),
        (4, 1, ""),
        (
            5,
            0,
            "has 3 classes, but model.layers[0].classes=5. "
            "Try --params_override='model.layers[0].classes=3', or use other data",
        ),
        (4, 0, "has 3 classes, but model.layers[0].classes=4. Set input.label_offset=1 where "),
        (3, 1, "has 4 classes, but model.layers[0].classes=3. "),
    ],
)
def test_another_number_of_classes_is_refused(
    folder: pathlib.Path, classes: int, offset: int, text: str
) -> None:
    given = task_of(folder, [layers.Softmax.Params(classes=classes)], label_offset=offset)
    if not text:
        assert task.complete(given) == given
        return
    with pytest.raises(errors.InputError) as caught:
        task.complete(given)
    assert str(caught.value).startswith(f"image folder {folder} {text}")
    assert "\n" not in str(caught.value)


# --- Params ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"channels": 2}, "input.channels=2 is not possible. Use 1 or 3"),
        ({"channels": 1, "policy": "randaugment"}, "input.saturation and policy need 3"),
        (
            {"mean": (0.5,)},
            r"input.mean=\(0.5,\) is not possible. Use 3 numbers, one for each chan",
        ),
        ({"central": 0.0}, "input.central=0.0 is not possible. Use more than 0, at most 1"),
        ({"central": 0.5}, "input.central=0.5 is not possible. It needs input.resize=True"),
        ({"saturation": (1.5, 0.5)}, r"input.saturation=\(1.5, 0.5\) is not possible. Use two"),
        ({"crop_area": (0.5, 1.5)}, r"input.crop_area=\(0.5, 1.5\) is not possible. Use two above"),
        ({"crop_aspect": (0.0, 1.0)}, r"crop_aspect=\(0.0, 1.0\) is not possible. Use two above"),
        ({"std": (1.0, 0.0, 1.0)}, r"input.std=\(1.0, 0.0, 1.0\) is not possible. Use numbers"),
    ],
)
def test_wrong_params_are_refused(folder: pathlib.Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InputError, match=text):
        folder_input(folder, **more)
