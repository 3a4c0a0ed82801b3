"""Installation: pinned versions, content of the wheel, set-up that reports what is missing."""

from __future__ import annotations

import email
import email.message
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# File of pins → the extras that it pins; the first one pins what every user needs, too.
PINS = {"requirements": ("dev", "mt", "text"), "requirements-docs": ("docs",)}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    wanted = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in wanted}


def declared(file: str) -> dict[str, Requirement]:
    project = pyproject()["project"]
    texts = list(project["dependencies"]) if file == "requirements" else []
    for extra in PINS[file]:
        texts += project["optional-dependencies"][extra]
    wanted = [Requirement(text) for text in texts]
    return {canonicalize_name(requirement.name): requirement for requirement in wanted}


@pytest.mark.parametrize("file", PINS)
def test_requirements_ask_for_what_pyproject_declares(file: str) -> None:
    assert set(requirements(f"{file}.in")) == set(declared(file))


@pytest.mark.parametrize("file", PINS)
def test_every_pin_lies_in_its_range(file: str) -> None:
    pins = requirements(f"{file}.txt")
    for name, requirement in declared(file).items():
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{pins[name]} is not {requirement}"


@pytest.mark.parametrize("file", [*PINS, "requirements-bench"])
def test_pins_name_no_host_or_path(file: str) -> None:
    text = (ROOT / f"{file}.txt").read_text()
    assert not re.search(r"://|--|^[./]", text, flags=re.MULTILINE)


def test_the_site_is_built_with_the_versions_that_are_tested() -> None:
    tested, docs = requirements("requirements.txt"), requirements("requirements-docs.txt")
    both = tested.keys() & docs.keys()
    assert both
    assert {name: docs[name].specifier for name in both} == {
        name: tested[name].specifier for name in both
    }


def test_the_environment_of_the_rivals_is_pinned_and_no_dependency() -> None:
    rivals = requirements("requirements-bench.txt")
    assert all([pin.operator for pin in wanted.specifier] == ["=="] for wanted in rivals.values())
    assert "torch" in rivals
    assert all("torch" not in declared(file) for file in PINS)


def test_pinned_setuptools_can_build() -> None:
    (wanted,) = (Requirement(text) for text in pyproject()["build-system"]["requires"])
    (pin,) = requirements("requirements.txt")[wanted.name].specifier
    assert wanted.specifier.contains(pin.version)


def modules_of(package: Path) -> set[str]:
    return {
        str(Path(folder, file).relative_to(package.parent))
        for folder, _, files in os.walk(package, followlinks=True)
        for file in files
        if file.endswith(".py")
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or "sdist" of `source` with the installed setuptools; return its path."""
    out.mkdir()
    program = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that are built: the build leaves its folders beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    for path in ROOT.glob("*.*"):
        if path.suffix in (".toml", ".md") or path.name == "setup.py":
            shutil.copy(path, copy)
    shutil.copy(ROOT / "LICENSE", copy)
    junk = shutil.ignore_patterns("__pycache__")
    for folder in ("lingvo_gpipe", "params", "tasks"):
        if (ROOT / folder).exists():  # Bazel's copy of the checkout has the links followed.
            shutil.copytree(
                ROOT / folder, copy / folder, symlinks=folder == "lingvo_gpipe", ignore=junk
            )
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name))


def test_wheel_holds_every_module_and_nothing_else(source: Path, wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules_of(source / "lingvo_gpipe")
    assert "lingvo_gpipe/params/__init__.py" in names
    assert "lingvo_gpipe/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lingvo_gpipe"}
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "lingvo-gpipe = lingvo_gpipe.trainer:main" in archive.read(entry_points).decode()


LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def test_description_is_the_readme_without_links_that_lead_nowhere(
    metadata: email.message.Message,
) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = metadata.get_payload(decode=True).decode()  # type: ignore[union-attr]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "urls" not in pyproject()["project"], "say here where links lead"
    assert all("://" in target for _, _, target in LINK.findall(shown))
    assert shown.strip() == LINK.sub(lambda link: "" if link[1] else link[2], readme).strip()


def test_links_of_a_published_description_lead_to_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("setup_of_the_wheel", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    readme = (ROOT / "README.md").read_text()
    home = "https://example.org/home"
    shown = setup.description(readme, home)
    assert LINK.sub(r"\1\2", shown) == LINK.sub(r"\1\2", readme)
    found, relative = LINK.findall(shown), LINK.findall(readme)
    assert len(found) > 10
    for (_, _, target), (picture, _, path) in zip(found, relative, strict=True):
        file = f"README.md{path}" if path.startswith("#") else path
        assert target == f"{home}/{'raw' if picture else 'blob'}/HEAD/{file}"


def test_metadata_names_versions_and_license_and_no_address(
    metadata: email.message.Message,
) -> None:
    assert metadata.get_all("Project-URL") is None
    assert metadata["Home-page"] is None
    classifiers = set(metadata.get_all("Classifier", []))
    assert "Typing :: Typed" in classifiers
    # Refused beside an SPDX expression.
    assert not any(name.startswith("License ::") for name in classifiers)
    assert metadata["License-Expression"] == "Apache-2.0"
    versions = {name.rpartition(" ")[2] for name in classifiers if ":: 3." in name}
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert versions == {f"3.{minor}" for minor in range(30) if f"3.{minor}.1" in allowed}


def test_wheel_of_the_sdist_holds_the_same(source: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path / "unpacked", filter="data")
        else:  # Python before 3.11.4, such as Debian 12's
            archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel"))
    found = {name for name in wheel.namelist() if name.endswith(".py")}
    assert found == modules_of(source / "lingvo_gpipe")


def run_script(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of `script` in `folder`, as its checkout."""
    copy = folder / script
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / script, copy)
    return subprocess.run(
        ["/bin/bash", str(copy)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_setup_names_the_pythons_it_takes_when_given_another(tmp_path: Path) -> None:
    run = run_script("tools/setup.sh", tmp_path, PYTHON="false")
    assert run.returncode != 0
    assert "Python 3.11 to 3.13 is needed, and false is not one" in run.stderr
    assert "make setup PYTHON=/path/to/python3.12" in run.stderr


def test_bazel_script_says_so_when_it_cannot_install(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "dirname").symlink_to(str(shutil.which("dirname")))
    run = run_script("tools/bazel/bazel.sh", tmp_path, PATH=str(programs))
    assert run.returncode != 0
    assert "no apt-get to install Debian's bazel-bootstrap with" in run.stderr
    assert "make bazel BAZEL=/path/to/bazel" in run.stderr
