"""The paper's models, by their registered names, have the paper's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from lingvo_gpipe import errors, network, registry
from lingvo_gpipe.plan import describe

# Parameters used by inference, for 1,001 classes: those of the reference's own graph (except
# D (18, 128), which follows from the closed form), and K.
MODELS = {
    "image.imagenet.AmoebaNetB18x512": (557_286_057, 4),
    "image.imagenet.AmoebaNetD18x208": (81_140_766, 1),
    "image.imagenet.AmoebaNetD18x416": (317_548_353, 1),
    "image.imagenet.AmoebaNetD18x544": (540_204_945, 2),
    "image.imagenet.AmoebaNetD36x544": (1_053_302_481, 4),
    "image.imagenet.AmoebaNetD72x512": (1_842_618_441, 8),
    "image.imagenet.AmoebaNetD18x256": (121_915_113, 4),
    "image.imagenet.AmoebaNetD18x128": (31_557_433, 4),
    "image.imagenet.AmoebaNetD6x256": (46_099_177, 4),
}
# For the paper's fine-tuning sets only the classifier differs: 16 · 512 features to each class.
FINE_TUNED = {
    "Cifar10": 10,
    "Cifar100": 100,
    "Cars196": 196,
    "OxfordPets": 37,
    "Food101": 101,
    "Aircraft": 100,
    "Birdsnap": 500,
}
REGISTRY = registry.Registry()


def analysis(task: Any) -> network.Analysis:
    return network.analyze(task.model, describe.fields_of(task))


@pytest.fixture(scope="module")
def whole_variables() -> Any:
    """Return the variables of the network that fine-tuning begins from."""
    return analysis(REGISTRY.model("image.imagenet.AmoebaNetB18x512")().task()).variables


def test_every_model_on_imagenet_is_listed_here() -> None:
    assert REGISTRY.names("image.imagenet.*") == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_its_published_size(name: str) -> None:
    found = analysis(REGISTRY.model(name)().task())
    parameters, partitions = MODELS[name]
    assert describe.counts(found).parameters == parameters
    assert len(found.cells) == partitions
    cells = int(name.rpartition("AmoebaNet")[2][1:].split("x")[0])
    assert len(found.layers) == cells + 6


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuning_begins_all_but_the_heads_from_the_same_network(
    name: str, whole_variables: Any
) -> None:
    task = REGISTRY.model(f"image.fine_tuning.{name}")().task()
    found = analysis(task)
    classes = FINE_TUNED[name]
    parameters = MODELS["image.imagenet.AmoebaNetB18x512"][0] - 8193 * 1001
    assert describe.counts(found).parameters == parameters + 8193 * classes
    other = {
        path
        for path, spec in found.variables.items()
        if path not in whole_variables or spec.shape != whole_variables[path].shape
    }
    assert other == {
        "classifier/softmax/kernel",
        "classifier/softmax/bias",
        "normal_11/auxiliary/softmax/kernel",
        "normal_11/auxiliary/softmax/bias",
    }
    assert task.train.start.without == ("classifier/*", "*/auxiliary/*")


def test_a_family_grows_by_its_cells_its_filters_and_its_images() -> None:
    recipe = REGISTRY.model("image.imagenet.AmoebaNetD18x256")()
    other = recipe.resized("filters", 64).resized("num_cells", 6).resized("image_size", 96)
    found = analysis(other.task())
    assert len(found.layers) == 12
    assert found.fields["image"].shape == (128, 96, 96, 3)
    assert describe.counts(found).parameters < 4_000_000
    with pytest.raises(errors.ParamsError, match="has no size 'num_layers'; nearest 'num_cells'"):
        recipe.resized("num_layers", 4)
