"""Names in texts: public names of lingvo_gpipe's classes, and names of users."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import types
from collections.abc import Iterator

import pytest

import lingvo_gpipe
from lingvo_gpipe import errors, hyperparams, layers, task
from lingvo_gpipe.hyperparams import references
from lingvo_gpipe.hyperparams.params import undefined_methods
from tests.lingvo_gpipe.hyperparams import cases


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
        name = references.public_name(each)
        place, _, own = name.rpartition(".")
        assert own == each.__name__
        assert place.split(".")[0] in directly, f"{name}: its package does not export it"
        module = importlib.import_module(f"lingvo_gpipe.{place}")
        assert "." not in place or hasattr(module, "__path__"), f"{name} names a file"
        assert references.resolve(name) is each
        assert references.text_name(each) == name


def test_public_names_are_short() -> None:
    assert [references.public_name(each) for each in (layers.Conv2D, task.Train, task.Task)] == [
        "layers.Conv2D",
        "task.Train",
        "task.Task",
    ]
    assert references.resolve("tasks.mt.Translation").__module__ == "lingvo_gpipe.tasks.mt.input"
    assert references.resolve("pipelining.PipeliningLayer").Params.class_name() == (
        "pipelining.PipeliningLayer"
    )
    assert references.resolve("layers.Dense.Params") is layers.Dense.Params
    assert references.resolve("lingvo_gpipe.layers.Dense") is layers.Dense


@pytest.mark.parametrize("name", ["layers.Dens", "lingvo_gpipe.layers.Dens"])
def test_an_unknown_class_names_the_nearest(name: str) -> None:
    with pytest.raises(errors.ParamsError, match=r"nearest 'layers\.Dense'"):
        references.resolve(name)


@pytest.mark.parametrize("name", ["layers", "layers.dense", "task.hyperparams", "task.Any"])
def test_a_name_that_is_no_class_of_the_package_is_refused(name: str) -> None:
    with pytest.raises(errors.ParamsError):
        references.resolve(name)


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a registered user module called `layers`."""
    module = types.ModuleType("layers")
    for name in ("Dense", "Mine"):
        setattr(module, name, type(name, (cases.Layer,), {"__module__": "layers"}))
    monkeypatch.setitem(sys.modules, "layers", module)
    monkeypatch.setattr(references, "_packages", {*references._packages, "layers"})
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


def test_a_package_inside_another_is_registered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_packages", {*references._packages, "importlib.metadata"})
    assert references.resolve("importlib.metadata.EntryPoint") is importlib.metadata.EntryPoint
    with pytest.raises(
        errors.ParamsError, match=r"'importlib\.util\.find_spec' is not in a regist"
    ):
        references.resolve("importlib.util.find_spec")
