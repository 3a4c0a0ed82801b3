"""A run on image files, some of them broken: its lines, its curves, its samples."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers, optim, pipelining, task, trainer
from lingvo_gpipe.run import loop
from tests.support import saved, tensorboard_files
from tests.tasks.image import image_files
from tests.tasks.image.image_files import folder_input


def task_of(folder: pathlib.Path, **more: Any) -> Any:
    given = {"flip": True, "pad": 1, "max_broken_share": 0.5, **more}
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[
                layers.Flatten.Params(name="flat", reads=("image",)),
                layers.Dense.Params(name="first", units=4, activation="relu"),
                layers.Softmax.Params(name="head"),
            ],
            num_partitions=2,
            num_micro_batches=2,
        ),
        input=folder_input(folder, **given).params,
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1),
            max_steps=6,
            save_interval_steps=3,
            log_interval_steps=1,
        ),
    )


@pytest.fixture(name="folder")
def make_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Nine images to train on, five to evaluate; two and one of them broken."""
    folder = image_files.write_folder(tmp_path / "images")
    for broken in ("train/cat/1.png", "train/dog/3.png", "test/emu/0.png"):
        content = (folder / broken).read_bytes()
        (folder / broken).write_bytes(content[: len(content) // 2])
    return folder


def test_broken_images_are_counted_and_reported(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lines: list[str] = []
    loop.run(task_of(folder), tmp_path / "whole", evaluate=True, report=lines.append)
    # 24 places of nine images have five or six of two broken ones.
    replaced = tensorboard_files.values(tmp_path / "whole" / "train", "replaced")
    assert len(replaced) == 6
    assert replaced == sorted(replaced)
    assert 4 <= replaced[-1] <= 6
    evaluations = [line for line in lines if line.startswith("eval step=")]
    assert len(evaluations) == 2
    assert all(line.endswith(" left_out=1") for line in evaluations)
    assert tensorboard_files.values(tmp_path / "whole" / "eval", "left_out") == [1.0, 1.0]


def test_samples_and_the_wait_for_the_input_are_on_tensorboard(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    loop.run(task_of(folder, mean=(0.5,) * 3), tmp_path / "run")
    curves = tensorboard_files.curves(tmp_path / "run" / "train")
    ((step, samples),) = curves["samples"]
    assert step == 0
    width, height, *encoded = samples.tolist()
    assert (int(width), int(height), len(encoded)) == (5, 6, 4)
    source = folder_input(folder, flip=True, pad=1, mean=(0.5,) * 3, max_broken_share=0.5)
    (expected,) = source.pictures(next(iter(source.batches(task_of(folder).model.seed)))).values()
    shown = [tf.io.decode_png(content).numpy() for content in encoded]
    np.testing.assert_array_equal(shown, expected)
    shares = [share for _, share in curves["input_wait_share"]]
    assert len(shares) == 6
    assert all(0.0 < share < 1.0 for share in shares)


def test_a_model_takes_its_number_of_classes_from_the_folder(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = loop.run(task_of(folder), tmp_path / "run")
    assert saved.values(done.checkpoint)["variables/head/kernel"].shape == (4, 3)


def test_a_model_of_the_folders_classes_is_described_and_planned(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "--model=image.folder.AmoebaNetSmall"
    assert trainer.run([model, "--mode=plan", f"--data_dir={folder}"]) == 0
    assert "classifier" in capsys.readouterr().out
    assert trainer.run([model, "--mode=describe", f"--data_dir={tmp_path / 'none'}"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        f"InputError: image folder {tmp_path / 'none'}: {tmp_path / 'none'} cannot be read: No "
        "such file or directory. Give another --data_dir"
    )
