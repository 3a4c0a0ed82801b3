"""Every recipe on a dataset of TFDS starts, trains two updates and evaluates.

The data are random, with the names, splits and features of the dataset. The size suits a CPU: two
cells, eight filters, images of 75 × 75 (at which the auxiliary head still fits), mini-batches of 4
in 2 micro-batches, float32. K, schedule, recomputation, augmentation, optimizer, rate, clipping,
averages and heads are those of the recipe. `make test` reads a mini-batch for each recipe and runs
one, `make reliability` runs the others.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import hyperparams, registry
from lingvo_gpipe import task as tasks
from lingvo_gpipe.run import loop
from lingvo_gpipe.tasks.image import TFDS
from tests.tasks.image import mock_tfds

REGISTRY = registry.Registry()
SIDE = 75
FIRST = "image.cifar10.ConvNet"
SMALLER = {"num_cells": 2, "filters": 8}


def of_tfds(name: str) -> bool:
    return isinstance(REGISTRY.model(name)().task().input, TFDS.Params)


NAMES = [name for name in REGISTRY.names("image.*") if of_tfds(name)]
RUNS = [
    pytest.param(name, marks=() if name == FIRST else pytest.mark.reliability_full)
    for name in NAMES
]
# `tfds_test` and `made_test` read each kind of set.
READ = [
    pytest.param(
        name,
        marks=() if "imagenet" in name or name == FIRST else pytest.mark.reliability_full,
    )
    for name in NAMES
]


def small(name: str) -> Any:
    recipe = REGISTRY.model(name)()
    for size, value in SMALLER.items():
        if hasattr(recipe, size):
            recipe = recipe.resized(size, value)
    task: Any = recipe.task()
    if task.input.resize:
        task.input.set(height=SIDE, width=SIDE)
    task.input.set(batch_size=4, download=False)
    task.model.set(num_micro_batches=min(2, task.model.num_micro_batches), dtype=None)
    task.train.max_steps = 2
    return task


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    for name in sorted({small(name).input.name for name in NAMES}):
        mock_tfds.prepare(name, folder, examples=6)
    return folder


@functools.cache
def read(text: str, split: str) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of the first mini-batch and the labels of a split.

    Recipes that differ in the network alone read the same: `text` is that of their input.
    """
    source = hyperparams.from_text(text).instantiate()
    trained = next(iter(source.batches(seed=0)))
    labels = [int(label) for batch in source.evaluation(split) for label in batch["label"]]
    return tuple(trained["image"].shape), labels


@pytest.mark.parametrize("name", READ)
def test_a_recipe_reads_its_dataset(name: str, data_dir: Path) -> None:
    task = small(name)
    task.input.data_dir = str(data_dir)
    completed = tasks.complete(task)
    assert completed == task  # the registered number of classes is the dataset's
    shape, labels = read(task.input.to_text(), task.eval.split)
    assert shape == (4, task.input.height, task.input.width, 3)
    assert len(labels) == 6
    assert set(labels) <= set(range(task.input.label_offset, task.model.layers[-1].classes))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_trains_and_evaluates(name: str, data_dir: Path, tmp_path: Path) -> None:
    task = small(name)
    task.input.data_dir = str(data_dir)
    result = loop.run(task, tmp_path, evaluate=True)
    assert result.step == 2
    assert 0.0 <= result.metrics["accuracy"] <= result.metrics.get("top5", 1.0) <= 1.0
    assert np.isfinite(result.metrics["loss"])
