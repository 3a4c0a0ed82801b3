"""What holds for every registered model, from its params alone."""

from __future__ import annotations

import pytest

from lingvo_gpipe import describe, hyperparams, registry, task

REGISTRY = registry.Registry()
NAMES = REGISTRY.names()


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


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_described_without_data_or_device(name: str) -> None:
    params = REGISTRY.model(name)().task()
    told = describe.describe(params).splitlines()
    (parameters,) = [line for line in told if line.startswith("parameters: ")]
    assert int(parameters.removeprefix("parameters: ")) > 0
    assert sum(line.startswith("cell ") for line in told) == params.model.num_partitions
