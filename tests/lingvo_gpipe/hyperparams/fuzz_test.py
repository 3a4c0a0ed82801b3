"""Any text or override leads to a round trip or a ParamsError, nothing else."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import math
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.hyperparams import literals, references
from lingvo_gpipe.hyperparams import text as texts
from tests.lingvo_gpipe.hyperparams import cases
from tests.lingvo_gpipe.hyperparams.cases import Dense, Everything, Other, Stack, Wide

# --- Trees ---

STRINGS = st.text(st.characters(), max_size=12)  # surrogates and control characters too
NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324]),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    STRINGS,
    st.sampled_from([Dense, Dense.Params, cases.double]),
)
DENSE = st.builds(
    Dense.Params,
    name=STRINGS,
    units=st.one_of(st.just(hyperparams.REQUIRED), st.integers()),
    rate=st.floats(),
    use_bias=st.booleans(),
)
LAYERS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(DENSE, st.builds(Other.Params, choice=st.sampled_from(["gpipe", "1f1b"]))),
    lambda inner: st.builds(
        Stack.Params,
        layers=st.lists(inner, max_size=3),
        head=st.one_of(st.none(), DENSE),
        tie=st.dictionaries(STRINGS, STRINGS, max_size=2),
    ),
    max_leaves=4,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SCALARS, DENSE),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(STRINGS, inner, max_size=3),
    ),
    max_leaves=8,
)
TREES = st.builds(
    Everything.Params,
    number=st.integers(),
    real=st.floats(),
    word=STRINGS,
    either=st.one_of(st.none(), STRINGS, st.integers()),
    literal=st.sampled_from(["gpipe", 2, None]),
    pair=st.tuples(st.integers(), st.floats()),
    many=st.lists(st.integers(), max_size=3),
    words=st.lists(STRINGS, max_size=3),
    table=st.dictionaries(STRINGS, st.lists(st.integers(), max_size=2), max_size=3),
    kind=st.sampled_from([Dense, Wide]),
    child=LAYERS,
    children=st.dictionaries(STRINGS, LAYERS, max_size=2),
    pairs=st.lists(st.tuples(DENSE, st.integers()), max_size=2),
    anything=VALUES,
)


@hypothesis.given(TREES)
def test_every_tree_round_trips(tree: Everything.Params) -> None:
    text = tree.to_text()
    found = hyperparams.from_text(text)
    assert found == tree
    assert found.to_text() == text
    assert tree.diff(found) == ""
    assert tree.copy() == tree


@hypothesis.given(TREES, TREES)
def test_trees_are_equal_when_their_texts_are(
    one: Everything.Params, two: Everything.Params
) -> None:
    assert (one == two) == (one.diff(two) == "")


@hypothesis.given(VALUES)
def test_every_value_without_params_can_be_an_override(value: Any) -> None:
    tree = Everything.Params(anything=value)
    paths = [path for path, _, _ in tree.iter_paths()]
    hypothesis.assume("anything" in paths)  # it holds no Params
    text = texts.format_value(tree.anything)
    assert Everything.Params().override(f"anything={text}") == tree


# --- Hostile texts ---

WORDS = st.sampled_from(
    [
        *"()[]{},:.-+*/=\"'\\ \n\t#",
        *("class", "list", "tuple", "dict", "REQUIRED", "None", "True", "inf", "nan", "tf.float32"),
        *("9**9**9", "1e999", "0x", "1_", "\\N{DIGIT ONE}", "\\x4", "\\777", "b''", "..."),
        *("__import__", "os.system", "builtins.eval", "subprocess.run", "__class__", "__main__"),
        *("lingvo_gpipe.errors.os", "keras.layers.Dense", "keras", "lingvo_gpipe.hyperparams.re"),
        *(f"{cases.__name__}.{name}" for name in ("Dense", "Stack", "keras", "double")),
        *(field for field in Everything.Params.fields()),
        *("layers", "units", "head", "tie", "[0]", "[-1]", "['a']", ".class: "),
    ]
)
GARBAGE = st.one_of(
    st.text(max_size=30),
    st.lists(WORDS, max_size=12).map("".join),
    st.text(string.printable, max_size=30),
)


@contextlib.contextmanager
def or_params_error() -> Iterator[None]:
    """Ignore a ParamsError."""
    with contextlib.suppress(errors.ParamsError):
        yield


@hypothesis.settings(max_examples=400)
@hypothesis.given(st.sampled_from(list(Everything.Params.fields())), GARBAGE)
def test_an_override_sets_or_raises(path: str, garbage: str) -> None:
    tree = Everything.Params()
    with or_params_error():
        tree.override(f"{path}={garbage}")
    assert hyperparams.from_text(tree.to_text()) == tree


@hypothesis.settings(max_examples=400)
@hypothesis.given(GARBAGE)
def test_an_override_of_any_path_sets_or_raises(garbage: str) -> None:
    tree = Everything.Params()
    with or_params_error():
        tree.override(garbage)
    with or_params_error():
        tree.set_path(garbage, 1)
    with or_params_error():
        tree.get(garbage)
    assert hyperparams.from_text(tree.to_text()) == tree


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Return a valid text with lines and characters removed, doubled, moved and replaced."""
    lines = draw(TREES).to_text().split("\n")
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(lines) - 1))
        line = lines[index]
        cut = draw(st.integers(0, len(line)))
        match draw(st.integers(0, 4)):
            case 0:
                lines.insert(draw(st.integers(0, len(lines))), line)
            case 1 if len(lines) > 1:
                del lines[index]
            case 2:
                lines[index] = line[:cut] + draw(GARBAGE) + line[cut:]
            case 3:
                lines[index] = line[:cut] + line[cut + 1 :]
            case _:
                lines[index] = f"{line.partition(':')[0]}: {draw(GARBAGE)}"
    return "\n".join(lines)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.one_of(mutated(), GARBAGE))
def test_a_text_round_trips_or_raises(text: str) -> None:
    with or_params_error():
        tree = hyperparams.from_text(text)
        assert hyperparams.from_text(tree.to_text()) == tree


def holds_names(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(holds_names, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_names, value))
    return isinstance(value, literals.Name)


@hypothesis.settings(max_examples=300)
@hypothesis.given(GARBAGE)
def test_a_literal_is_read_as_python_reads_it_or_refused(text: str) -> None:
    with or_params_error():
        value = literals.parse_literal(text)
        hypothesis.assume(not holds_names(value))  # names are ours, and so are these two
        hypothesis.assume("inf" not in text and "nan" not in text)
        assert repr(value) == repr(ast.literal_eval(text.strip()))


# --- What must not happen ---


def test_no_name_leads_out_of_the_registered_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"a text led to a call with {args}, {kwargs}")

    # Reading a name may import a registered package, whose code runs then.
    importlib.import_module("lingvo_gpipe.layers")
    for module, name in [(builtins, "eval"), (builtins, "exec"), (os, "system")]:
        monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(subprocess, "Popen", fail)
    for name in [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "importlib.import_module",
        "lingvo_gpipe.hyperparams.references.names.importlib.import_module",
        "lingvo_gpipe.hyperparams.references.names.sys",
        "hyperparams.names.importlib.import_module",
        "hyperparams.names.sys",
        "hyperparams.Params.set",
        "hyperparams.names.tf.function",
        "layers",
        "layers.dense",
        "lingvo_gpipe.hyperparams.Params.set",
        "lingvo_gpipe.hyperparams.Params.__init__",
        "lingvo_gpipe.hyperparams.Mapping",
        "lingvo_gpipe.hyperparams.Any",
        "lingvo_gpipe.hyperparams._BARE_TEXT",
        "lingvo_gpipe.__main__.main",
        "lingvo_gpipe_evil.Layer",
        "lingvo_gpipe",
        "keras",
        "keras.layers",
        "keras.src.backend.numpy",
        "tf.function",
        "tensorflow.function",
        "Params",
        "__main__",
        f"{cases.__name__}.keras.layers.Dense",
        f"{cases.__name__}.Dense.Params.fields",
    ]:
        for path in ("function", "kind", "anything", "child"):
            with pytest.raises(errors.ParamsError):
                Everything.Params().override(f"{path}={name}")
        with pytest.raises(errors.ParamsError):
            hyperparams.from_text(f"class: {name}\n")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a package whose import can be detected."""
    name = "package_of_hyperparams_fuzz_test"
    folder = tmp_path / name
    folder.mkdir()
    mark = "import sys\nsys.modules['mark_of_hyperparams_fuzz_test'] = sys\n"
    (folder / "__init__.py").write_text(f"{mark}class Kind: pass\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    for module in [key for key in sys.modules if "hyperparams_fuzz_test" in key]:
        if module != __name__:
            del sys.modules[module]


def test_only_a_registered_package_is_imported(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = f"anything={package}.Kind"
    with pytest.raises(errors.ParamsError, match="is not in a registered package"):
        Everything.Params().override(override)
    assert "mark_of_hyperparams_fuzz_test" not in sys.modules
    monkeypatch.setattr(references, "_packages", {package})
    assert Everything.Params().override(override).anything.__name__ == "Kind"
    assert "mark_of_hyperparams_fuzz_test" in sys.modules
    for module, reason in {
        "leaves": "SystemExit: 3",
        "broken": "No module named 'no_such_module_anywhere'",
    }.items():
        with pytest.raises(errors.ParamsError, match=f"cannot be imported: .*{reason}"):
            Everything.Params().override(f"anything={package}.{module}.Kind")


def test_a_package_name_is_checked_when_registered() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        hyperparams.register_package("a-b")
    assert str(caught.value) == "'a-b' is not the name of a package"


HUGE = {
    "powers": "9**9**9",
    "brackets": "(" * 100_000,
    "closed brackets": "[" * 50_000 + "]" * 50_000,
    "lists of lists": "[" + "[],[" * 40_000,
    "dicts": "{'a':" * 30_000,
    "minuses": "-" * 100_000 + "1",
    "digits": "9" * 100_000,
    "a million of brackets": "(" * 1_000_000,
    "many values, one wrong": "(" + "1," * 90_000 + "!)",
    "an open string": "'" + "\\" * 100_001,
    "a long name": "a" * 100_000 + "!",
    "a long dotted name": "a." * 90_000 + "a",
    "a long registered name": "keras." * 30_000 + "a",
    "underscores": "1" + "_" * 100_000 + "x",
    "a null": "\0",
}


@pytest.mark.parametrize("literal", HUGE.values(), ids=HUGE)
def test_huge_literals_are_refused(literal: str) -> None:
    start = len(sys.modules)
    tree = Everything.Params()
    for path in ("anything", "number", "words", "child.name", "child"):
        if path == "child.name" and re.fullmatch(r"[\w./:,-]+", literal):
            continue  # a string without quotes
        with pytest.raises(errors.ParamsError) as caught:
            tree.override(f"{path}={literal}")
        assert len(str(caught.value)) < 1_000
        with pytest.raises(errors.ParamsError):
            hyperparams.from_text(f"class: {Everything.Params.class_name()}\n{path}: {literal}\n")
    with pytest.raises(errors.ParamsError):
        tree.override(f"{literal}=1")
    with pytest.raises(errors.ParamsError):
        hyperparams.from_text(f"class: {literal}\n")
    assert tree == Everything.Params()
    assert len(sys.modules) == start


def test_texts_nested_too_deep_are_refused() -> None:
    name = Stack.Params.class_name()
    deep = "".join(f"head{'.head' * depth}.class: {name}\n" for depth in range(500))
    with pytest.raises(errors.ParamsError):
        hyperparams.from_text(f"class: {name}\n{deep}")
    nested = "".join(f"anything{'[0]' * depth}.class: list\n" for depth in range(500))
    with pytest.raises(errors.ParamsError):
        hyperparams.from_text(f"class: {Everything.Params.class_name()}\n{nested}")
