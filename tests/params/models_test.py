"""Properties of every registered model that follow from its params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe.plan import describe
from tests.tasks.image import image_files

REGISTRY = registry.Registry()
NAMES = REGISTRY.names()
# Their number of classes is the data's.
OF_DATA = ["image.folder.AmoebaNetSmall"]


def test_every_file_below_params_can_be_imported() -> None:
    assert REGISTRY.broken == {}
    assert {"image.digits.ConvNet", "image.digits.MLP", "image.cifar10.ConvNet"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_complete_and_its_text_leads_back_to_it(name: str) -> None:
    params = REGISTRY.model(name)().task()
    task.check(params)
    unset = [path for path, value, _ in params.iter_paths() if value is hyperparams.REQUIRED]
    assert unset == []
    again = hyperparams.from_text(params.to_text())
    assert again == params
    assert again.to_text() == params.to_text()


# The first recipe of each file; tests of the files count the parameters and cells of the others.
FIRST = {name.rpartition(".")[0]: name for name in reversed(NAMES) if name not in OF_DATA}


@pytest.mark.parametrize("name", FIRST.values())
def test_a_model_is_described_without_data_or_device(name: str) -> None:
    params = REGISTRY.model(name)().task()
    told = describe.describe(params).splitlines()
    (parameters,) = [line for line in told if line.startswith("parameters: ")]
    assert int(parameters.removeprefix("parameters: ")) > 0
    assert sum(line.startswith("cell ") for line in told) == params.model.num_partitions


@pytest.mark.parametrize("name", OF_DATA)
def test_a_model_takes_as_many_classes_as_its_folder_has(name: str, tmp_path: Path) -> None:
    params: Any = REGISTRY.model(name)().task()
    params.input.data_dir = str(image_files.write_folder(tmp_path))
    completed = task.complete(params)
    found = {
        value for path, value, _ in completed.iter_paths() if path.rpartition(".")[2] == "classes"
    }
    assert found == {3}
    assert "parameters: " in describe.describe(completed)
