"""A command's model: from a recipe, a run's folder, or params as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors, recipes, registry
from lingvo_gpipe.hyperparams import register_package
from lingvo_gpipe.layers import keras_references
from lingvo_gpipe.run import checkpoints, loop
from tests.tiny_task import tiny_task


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of image.digits.MLP's name, with overrides of its own."""
    register_package("tests")
    folder = tmp_path_factory.mktemp("run")
    task = tiny_task(max_steps=1)
    task.name = "image.digits.MLP"
    loop.run(task, folder, report=lambda _: None)
    return folder


def find(**flags: Any) -> tuple[str, Any]:
    given = {"model": None, "params": None, "logdir": None, "checkpoint": None, "trains": False}
    name, recipe = recipes.find(registry.Registry(()), **{**given, **flags})
    return name, recipe.task()


@pytest.mark.parametrize("trains", [False, True])
def test_a_runs_folder_names_its_model(run: Path, trains: bool) -> None:
    name, task = find(logdir=str(run), trains=trains)
    assert name == "image.digits.MLP"
    assert task.train.max_steps == 1
    assert task.model.layers[0].units == 8


def test_a_checkpoint_names_its_model(run: Path) -> None:
    for place in (run / "checkpoints", run / "checkpoints" / "ckpt-1"):
        name, task = find(checkpoint=str(place))
        assert (name, task.train.max_steps) == ("image.digits.MLP", 1)


def test_a_model_beside_a_run_is_compared_with_it(run: Path) -> None:
    _, task = find(model="image.digits.MLP", logdir=str(run))
    assert task.train.max_steps == 1  # the run's, not the recipe's
    with pytest.raises(
        errors.ParamsError,
        match=r"holds a run of image\.digits\.MLP, not of image\.digits\.ConvNet",
    ):
        find(model="image.digits.ConvNet", logdir=str(run))
    for logdir in (None, str(run)):
        for checkpoint in (run / "checkpoints", run / "checkpoints" / "ckpt-1"):
            _, task = find(model="image.digits.MLP", logdir=logdir, checkpoint=str(checkpoint))
            assert task.train.max_steps == 1
    name, task = find(model="image.digits.ConvNet", checkpoint=str(run / "checkpoints"))
    assert name == "image.digits.ConvNet"  # of the recipe: they may share variables
    assert task.train.max_steps > 1
    # Training compares recipe and run itself.
    _, task = find(model="image.digits.MLP", logdir=str(run), trains=True)
    assert task.train.max_steps > 1


def test_params_as_text_are_a_model(run: Path, tmp_path: Path) -> None:
    text = (run / "checkpoints" / "ckpt-1.params.txt").read_text()
    path = tmp_path / "mine.txt"
    path.write_text(text.partition("\n")[2].replace("train.max_steps: 1", "train.max_steps: 7"))
    name, task = find(params=str(path))
    assert (name, task.train.max_steps) == ("image.digits.MLP", 7)
    _, task = find(params=str(run / "checkpoints" / "ckpt-1.params.txt"))
    assert task.train.max_steps == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"logdir": "{}/none"}, "--model=NAME is missing, and there is no checkpoint in .*/none"),
        ({"logdir": "{}/digits/best"}, "there is no checkpoint in .*/digits/best/checkpoints"),
        ({"params": "{}/none"}, "cannot be read: No such file or directory"),
        ({"params": "{}/digits"}, "cannot be read: Is a directory. Name a file with the text that"),
        ({"params": "{}", "model": "image.digits.MLP"}, "--params and --model both name a model"),
        ({"params": "{}/other.txt"}, "holds params of .*, not of a task"),
        ({"params": "{}/torn.txt"}, "torn.txt: line 1: "),
        ({"checkpoint": "{}/none/ckpt-3"}, "there is no checkpoint"),
    ],
)
def test_what_names_no_model_is_refused(flags: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(tiny_task().model.to_text())
    (tmp_path / "torn.txt").write_text("import os\n")
    for name in ("digits/checkpoints", "digits/best", "other/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "digits" / "checkpoints" / "ckpt-1.params.txt").touch()
    with pytest.raises(errors.UserError, match=text):
        find(**{flag: value.format(tmp_path) for flag, value in flags.items()})


def test_a_size_of_a_recipe_needs_the_recipe(run: Path) -> None:
    _, recipe = recipes.find(
        registry.Registry(()),
        model=None,
        params=None,
        logdir=str(run),
        checkpoint=None,
        trains=False,
    )
    with pytest.raises(errors.ParamsError, match="Give --model without the run's folder"):
        recipe.resized("num_cells", 3)


def test_training_ends_with_the_best_checkpoint(tmp_path: Path) -> None:
    lines: list[str] = []
    task = tiny_task(max_steps=8)
    task.eval.best = "accuracy"
    result = loop.run(task, tmp_path, evaluate=True, report=lines.append)
    (best,) = checkpoints.find(str(tmp_path / "best"))
    assert result.best is not None
    step = checkpoints.step_of(best)
    assert lines[-1] == f"best accuracy {result.best:.4f} at step {step}: {best}"


BLOCKS = """
import keras

@keras.saving.register_keras_serializable("blocks")
def squared(x):
    return x * x

@keras.saving.register_keras_serializable("blocks")
class Block(keras.layers.Layer):
    def __init__(self, activation, **more):
        super().__init__(**more)
        self.activation = keras.activations.get(activation)

    def call(self, x):
        return self.activation(x)

    def get_config(self):
        activation = keras.activations.serialize(self.activation)
        return {**super().get_config(), "activation": activation}
"""
RECIPE = """
import blocks_of_recipes_test as blocks
import keras

from lingvo_gpipe import keras_layers, registry
from tests.tiny_task import tiny_task

class Net(registry.Model):
    def task(self):
        inputs = keras.Input([4], name="point")
        model = keras.Model(inputs, blocks.Block(blocks.squared)(keras.layers.Dense(3)(inputs)))
        network = keras_layers.from_keras_model(model, keep_weights=False)
        task = tiny_task()
        head = task.model.layers[-1].set(reads=(network.outputs, "label"))
        task.model.set(layers=[*network.layers, head])
        task.name = "net.Net"
        return task
"""


def test_a_text_names_what_keras_has_registered_in_packages_that_its_recipe_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_package("tests")
    monkeypatch.setattr(keras_references, "_packages_of_recipes", set())
    package = tmp_path / "models_of_recipes_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text(RECIPE)
    (tmp_path / "blocks_of_recipes_test.py").write_text(BLOCKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    models = registry.Registry([package.name])
    _, recipe = recipes.find(
        models, model="net.Net", params=None, logdir=None, checkpoint=None, trains=True
    )
    text = recipe.task().to_text()
    assert "blocks_of_recipes_test.squared" in text
    path = tmp_path / "run.txt"
    path.write_text(text)
    _, of_text = recipes.find(
        models, model=None, params=str(path), logdir=None, checkpoint=None, trains=True
    )
    assert of_text.task().to_text() == text
