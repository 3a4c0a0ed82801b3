"""Names in texts: public names of lingvo_gpipe's classes, earlier names, names of users."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import types
from collections.abc import Iterator

import pytest
import tensorflow as tf

import lingvo_gpipe
from lingvo_gpipe import errors, hyperparams, layers, task
from lingvo_gpipe.hyperparams.params import undefined_methods
from lingvo_gpipe.hyperparams.references import names, old_names
from tests.lingvo_gpipe.hyperparams import cases

# Every class that a text could name at the time when classes were named by their modules.
BEFORE = {
    "input": "Indexed InMemory Input",
    "layers.activation": "Activation",
    "layers.attention": "MultiHeadAttention TransformerLayer",
    "layers.base": "Layer",
    "layers.composition": "Parallel Residual Sequential",
    "layers.convolution": "Conv2D DepthwiseConv2D SeparableConv2D",
    "layers.dense": "Dense",
    "layers.dropout": "Dropout",
    "layers.embedding": "Embedding PositionalEncoding",
    "layers.heads": "AuxiliaryLoss MeanSquaredError SequenceSoftmax Softmax",
    "layers.joining": "Add Concat Identity Rename",
    "layers.keras_adapter": "KerasLayer",
    "layers.metric": "KerasMetric",
    "layers.normalization": "BatchNorm GroupNorm LayerNorm",
    "layers.pooling": "AvgPool2D GlobalPool2D MaxPool2D",
    "layers.shaping": "Flatten Reshape",
    "network": "PipelineParams",
    "optimizer": "KerasRule KerasSchedule Optimizer Rule Schedule",
    "pipelining": "PipeliningLayer",
    "task": "Eval Start Task Train",
    "tasks.image.amoebanet": "AmoebaCell AuxiliaryHead Classifier CropSoftmax Stem",
    "tasks.image.digits": "SklearnDigits",
    "tasks.image.folder": "ImageFolder",
    "tasks.image.images": "Images",
    "tasks.image.operations": "DropPath FactorizedReduction Fit Operation WholeConv2D",
    "tasks.image.optimizers": "RMSProp",
    "tasks.image.schedules": "WarmupStaircase",
    "tasks.image.tfds": "TFDS",
    "tasks.lm.input": "Tokens",
    "tasks.mt.adafactor": "Adafactor",
    "tasks.mt.bilingual": "Bilingual",
    "tasks.mt.catalogues": "Django",
    "tasks.mt.corpus": "Aligned Corpus Files Policy TSV TranslateFolder",
    "tasks.mt.decoding": "Decode",
    "tasks.mt.input": "Translation",
    "tasks.mt.layers": (
        "Block DecoderLayer EncoderLayer Mixture TokenEmbedding TransparentEncoderLayer "
        "TranslationSoftmax"
    ),
    "tasks.mt.preparation": "Preparation",
    "tasks.mt.schedules": "InverseSquareRoot",
    "tasks.mt.scores": "Scoring",
    "tasks.mt.search": "Search",
    "tasks.mt.task": "TranslationTask",
    "tasks.mt.tfds_corpus": "TFDS",
    "tasks.mt.vocabulary": "Training",
    "update": "Average LossScale Updater WeightDecay",
}
WRITTEN_BEFORE = [
    f"lingvo_gpipe.{module}.{name}" for module, line in BEFORE.items() for name in line.split()
]

OLD_TEXT = """\
class: lingvo_gpipe.layers.composition.Sequential
name: 'net'
layers.class: list
layers[0].class: lingvo_gpipe.layers.dense.Dense
layers[0].name: 'lingvo_gpipe.layers.dense.Dense'
layers[0].units: 2
"""


def classes_of_the_project() -> Iterator[type]:
    for found in pkgutil.walk_packages(lingvo_gpipe.__path__, "lingvo_gpipe."):
        module = importlib.import_module(found.name)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value


def nameable_in_texts() -> list[type]:
    """Return the project's classes that the tree of a task can contain."""
    classes = list(classes_of_the_project())
    made = [
        each
        for each in classes
        if not undefined_methods(each) and issubclass(each, hyperparams.Configurable)
    ]
    sections = [
        each
        for each in classes
        if issubclass(each, hyperparams.Params)
        and each.owner is None
        # Such as the fields that all convolutions share: a base of the Params of layers.
        and not any(issubclass(other.Params, each) for other in made)
    ]
    return [*made, *sections]


def test_every_class_has_a_public_name_without_a_file_in_it() -> None:
    classes = nameable_in_texts()
    assert {layers.Conv2D, task.Train} <= set(classes)
    assert len(classes) >= 60
    directly = {found.name for found in pkgutil.iter_modules(lingvo_gpipe.__path__)}
    for each in classes:
        name = names.public_name(each)
        place, _, own = name.rpartition(".")
        assert own == each.__name__
        assert place.split(".")[0] in directly, f"{name}: its package does not export it"
        module = importlib.import_module(f"lingvo_gpipe.{place}")
        assert "." not in place or hasattr(module, "__path__"), f"{name} names a file"
        assert names.resolve(name) is each
        names.check_references(each)


def test_public_names_are_short() -> None:
    assert [names.public_name(each) for each in (layers.Conv2D, task.Train, task.Task)] == [
        "layers.Conv2D",
        "task.Train",
        "task.Task",
    ]
    assert names.resolve("tasks.mt.Translation").__module__ == "lingvo_gpipe.tasks.mt.input"
    assert names.resolve("pipelining.PipeliningLayer").Params.class_name() == (
        "pipelining.PipeliningLayer"
    )
    assert names.resolve("layers.Dense.Params") is layers.Dense.Params
    assert names.resolve("lingvo_gpipe.layers.Dense") is layers.Dense


@pytest.mark.parametrize("name", WRITTEN_BEFORE)
def test_every_name_written_before_is_read(name: str) -> None:
    current = old_names.current(name)
    found = names.resolve(name)
    assert names.public_name(found) == current
    assert found.__name__ == name.rpartition(".")[2] or current in old_names.RENAMED.values()
    assert old_names.current(f"{name}.Params") == f"{current}.Params"


def test_every_entry_of_the_table_is_used() -> None:
    assert {name.rpartition(".")[0] for name in WRITTEN_BEFORE} | {
        "lingvo_gpipe.hyperparams"
    } == set(old_names.MODULES)
    for new in old_names.RENAMED.values():
        assert names.public_name(names.resolve(new)) == new


def test_a_text_written_before_is_read_and_compared() -> None:
    tree = hyperparams.from_text(OLD_TEXT)
    text = tree.to_text()
    assert text.splitlines()[0] == "class: layers.Sequential"
    assert tree.get("layers[0]") == layers.Dense.Params(
        units=2, name="lingvo_gpipe.layers.dense.Dense"
    )
    assert hyperparams.from_text(text) == tree
    lines = task.change(OLD_TEXT + text.split("units: 2\n")[1], text).lines
    assert [line for line in lines if not line.startswith("+ ")] == []


def test_renamed_classes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_names, "RENAMED", {"layers.Linear": "layers.Dense"})
    for name in ("layers.Linear", "layers.Dense", "lingvo_gpipe.layers.dense.Linear"):
        assert names.resolve(name) is layers.Dense
        assert names.resolve(f"{name}.Params") is layers.Dense.Params
    assert old_names.current_value("{'a': layers.Linear, 'layers.Linear': 1.5}") == (
        "{'a': layers.Dense, 'layers.Linear': 1.5}"
    )


@pytest.mark.parametrize("name", ["layers.Dens", "lingvo_gpipe.layers.dense.Dens"])
def test_an_unknown_class_names_the_nearest(name: str) -> None:
    with pytest.raises(errors.ParamsError, match=r"nearest 'layers\.Dense'"):
        names.resolve(name)


@pytest.mark.parametrize("name", ["layers", "layers.dense", "task.hyperparams", "task.Any"])
def test_a_name_that_is_no_class_of_the_package_is_refused(name: str) -> None:
    with pytest.raises(errors.ParamsError):
        names.resolve(name)


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a registered user module called `layers`."""
    module = types.ModuleType("layers")
    for name in ("Dense", "Mine"):
        setattr(module, name, type(name, (cases.Layer,), {"__module__": "layers"}))
    monkeypatch.setitem(sys.modules, "layers", module)
    monkeypatch.setattr(names, "_packages", {*names._packages, "layers"})
    return module


def test_a_users_class_does_not_take_the_name_of_another(user_module: types.ModuleType) -> None:
    tree = cases.Everything.Params(kind=user_module.Mine)
    assert hyperparams.from_text(tree.to_text()) == tree
    with pytest.raises(errors.ParamsError) as caught:
        cases.Everything.Params(kind=user_module.Dense).to_text()
    assert str(caught.value) == (
        f"{cases.here('Everything')}: 'kind': a text names <class 'layers.Dense'> 'layers.Dense', "
        "which is a name of lingvo_gpipe already; define it in a package that is not called "
        "'layers'"
    )


def test_lazy_exports_of_a_users_module_are_not_called(user_module: types.ModuleType) -> None:
    def fail(name: str) -> None:
        pytest.fail(f"a text led to a call with {name}")

    vars(user_module).update(__getattr__=fail, __all__=["Lazy"])
    with pytest.raises(errors.ParamsError):
        names.resolve("layers.Lazy")


def test_a_package_inside_another_is_registered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_packages", {*names._packages, "importlib.metadata"})
    assert names.resolve("importlib.metadata.EntryPoint") is importlib.metadata.EntryPoint
    with pytest.raises(
        errors.ParamsError, match=r"'importlib\.util\.find_spec' is not in a regist"
    ):
        names.resolve("importlib.util.find_spec")


def test_a_dtype_whose_name_is_no_dtype_has_no_text() -> None:
    with pytest.raises(errors.ParamsError, match="float32_ref has no name that a text could hold"):
        names.check_references([tf.float32._as_ref])
