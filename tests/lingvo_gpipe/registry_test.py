"""Models are found by module path, and a broken file does not hide others."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors, registry
from lingvo_gpipe.task import Task

MODEL = """
from lingvo_gpipe import registry

class {name}(registry.Model):
    def task(self):
        return {name!r}
"""
_numbers = itertools.count()

Writer = Callable[[dict[str, str]], str]


@pytest.fixture(autouse=True)
def no_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the project's package by an empty one, because its models load TensorFlow."""
    (tmp_path / "own" / "models_of_registry_test").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.setattr(registry, "PROJECT_PACKAGE", "models_of_registry_test")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """Return a function that writes a new package from its files' texts and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(files: dict[str, str]) -> str:
        name = f"models_of_registry_test_{next(_numbers)}"
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("models_of_registry_test"):
            del sys.modules[name]


def test_a_model_is_named_by_where_it_lives(package: Writer) -> None:
    name = package(
        {
            "__init__.py": MODEL.format(name="Top"),
            "lab/__init__.py": "",
            "lab/small.py": MODEL.format(name="Smaller") + MODEL.format(name="_Base"),
            "lab/imports.py": "from .small import Smaller",
        }
    )
    found = registry.Registry([name])
    # Neither an imported class nor one with an underscore is a second model.
    assert found.names() == ["Top", "lab.small.Smaller"]
    assert found.names("lab.*") == ["lab.small.Smaller"]
    assert found.model("lab.small.Smaller")().task() == "Smaller"
    assert found.model("Top")().task() == "Top"


def test_a_folder_without_an_init_file_is_looked_into(package: Writer) -> None:
    name = package({"__init__.py": "", "lab/small.py": MODEL.format(name="Smaller")})
    assert registry.Registry([name]).names() == ["lab.small.Smaller"]


def test_asking_for_one_model_imports_no_other_file(package: Writer) -> None:
    name = package(
        {
            "__init__.py": "",
            "good.py": MODEL.format(name="Good"),
            "slow.py": MODEL.format(name="Slow"),
        }
    )
    registry.Registry([name]).model("good.Good")
    assert f"{name}.good" in sys.modules
    assert f"{name}.slow" not in sys.modules


def test_looking_for_a_name_of_no_recipe_imports_no_file(package: Writer) -> None:
    """A run that was started in Python has the name of its task, which is that of no recipe."""
    name = package({"__init__.py": "", "good.py": MODEL.format(name="Good")})
    assert registry.Registry([name]).find("my task") is None
    assert f"{name}.good" not in sys.modules


def test_a_broken_file_hides_no_other_and_is_reported_when_asked_for(package: Writer) -> None:
    name = package(
        {
            "__init__.py": "",
            "good.py": MODEL.format(name="Good"),
            "typo.py": "class A:\n    pass\n\nimport no_such_thing_anywhere\n",
            "torn.py": "def f(:\n",
            "broken/__init__.py": "raise ValueError('on purpose')",
            "broken/inside.py": MODEL.format(name="Hidden"),
        }
    )
    found = registry.Registry([name])
    assert found.names() == ["good.Good"]
    assert "typo.py, line 4" in found.broken[f"{name}.typo"]
    assert found.broken[f"{name}.torn"].startswith("SyntaxError")
    assert found.broken[f"{name}.broken"].startswith("ValueError: on purpose")

    with pytest.raises(errors.ParamsError) as caught:
        registry.Registry([name]).model("typo.A")
    assert f"{name}.typo cannot be imported: ModuleNotFoundError" in str(caught.value)
    assert "typo.py, line 4" in str(caught.value)
    with pytest.raises(errors.ParamsError, match=r"broken\.inside cannot be imported: ValueErr"):
        registry.Registry([name]).model("broken.inside.Hidden")


def test_an_unknown_name_lists_near_ones_and_what_could_not_be_looked_into(
    package: Writer,
) -> None:
    name = package({"__init__.py": "", "lab.py": MODEL.format(name="Smaller"), "bad.py": "1 / 0"})
    with pytest.raises(errors.ParamsError) as caught:
        registry.Registry([name]).model("lab.Smalller")
    first, *detail = str(caught.value).splitlines()
    assert first.startswith("no model 'lab.Smalller'; nearest 'lab.Smaller'")
    assert "--list_models" in first
    (broken,) = detail
    assert broken.strip().startswith(f"{name}.bad: ZeroDivisionError: division by zero")


def test_two_packages_with_one_name_are_both_named(package: Writer) -> None:
    files = {"__init__.py": "", "lab.py": MODEL.format(name="Small")}
    one, other = package(files), package(files)
    found = registry.Registry([one, other])
    for ask in (found.names, lambda: found.model("lab.Small")):
        with pytest.raises(errors.ParamsError) as caught:
            ask()
        assert str(caught.value).startswith("two packages have a model 'lab.Small': ")
        assert one in str(caught.value)
        assert other in str(caught.value)


def test_a_package_that_is_not_there_names_the_way_out() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        registry.Registry(["no_such_models"])
    assert str(caught.value).startswith("--params_package=no_such_models: ModuleNotFoundError")
    assert "PYTHONPATH" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_thing_anywhere", "ModuleNotFoundError: No module named 'no_such_thing"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_package_that_cannot_be_imported_names_the_cause(
    package: Writer, source: str, cause: str
) -> None:
    name = package({"__init__.py": source})
    with pytest.raises(errors.ParamsError) as caught:
        registry.Registry([name])
    assert str(caught.value).startswith(f"--params_package={name}: {cause}")


def test_a_recipe_without_a_task_is_refused() -> None:
    class Bare(registry.Model):
        pass

    with pytest.raises(errors.ParamsError, match=r"<locals>\.Bare defines no task\(\)"):
        Bare().task()


def test_a_package_that_is_a_single_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "single_file_of_registry_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.ParamsError, match=r"is a single file\. Name the package"):
        registry.Registry(["single_file_of_registry_test"])


def test_modes_are_found_by_name_and_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODES", {})

    def export(job: registry.Job) -> None:
        job.report("exported")

    def other(job: registry.Job) -> None:
        del job

    registry.add_mode("export", export)
    registry.add_mode("export", export)
    task: Any = Task.Params()
    assert registry.mode("export", task) is export
    with pytest.raises(errors.ParamsError, match=r"mode 'export' of .* is already that of"):
        registry.add_mode("export", other)
    with pytest.raises(errors.ParamsError, match=r"no mode 'exprt'; nearest 'export'"):
        registry.mode("exprt", task)


def test_a_mode_may_be_of_one_kind_of_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODES", {})

    class Spoken(Task):
        """A task of speech."""

    def train(_: registry.Job) -> None: ...

    def speak(_: registry.Job) -> None: ...

    registry.add_mode("train", train)
    registry.add_mode("speak", speak, tasks=Spoken.Params)
    assert registry.mode("train", Spoken.Params()) is train
    assert registry.mode("speak", Spoken.Params()) is speak
    with pytest.raises(errors.ParamsError, match=r"no mode 'speak'; there are 'train'$"):
        registry.mode("speak", Task.Params())


class Family(registry.Model):
    """A recipe with one size."""

    depth = 3
    kind = "plain"

    def task(self) -> Any:
        return 10 * self.depth


def test_a_recipe_is_resized_by_its_whole_numbers() -> None:
    small = Family()
    assert small.resized("depth", 5).task() == 50
    assert small.task() == 30
    with pytest.raises(errors.ParamsError, match="Family has no size 'deph'; nearest 'depth'"):
        small.resized("deph", 5)
    with pytest.raises(errors.ParamsError, match="Family has no size 'kind'"):
        small.resized("kind", 5)
