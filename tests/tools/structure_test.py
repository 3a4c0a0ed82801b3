"""The measured structure of a small made-up checkout equals hand counts."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools import structure

# Beyond `structure.MAX_PARAMETERS` and `MAX_CLASS_LINES`, which the table lists, nothing grows.
MOST_PARAMETERS = 8
MOST_CLASS_LINES = 360

BLOCK = "".join(f"    y = g(y, {number})\n" for number in range(7))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of three modules, one of them also reached by a link."""
    (tmp_path / "lingvo_gpipe").mkdir()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "lingvo_gpipe" / "__init__.py").write_text('"""A package."""\n')
    (tmp_path / "lingvo_gpipe" / "tasks").symlink_to("../tasks")
    first = """
        import typing
        from typing import Any, TypeAlias

        Nest: TypeAlias = Any

        class C:
            x: Any
            def f(self, a: Any, b: "Any", *c: dict[str, Any], d: Nest = 1, **e: int) -> Any: ...
            @staticmethod
            def g(a, b: typing.Any) -> None: ...
            @property
            def _h(self) -> list[Any]: ...

        def y(y):
        """
    (tmp_path / "lingvo_gpipe" / "a.py").write_text(textwrap.dedent(first).rstrip(" ") + BLOCK)
    second = f"def y(z):\n    # a comment\n{BLOCK}def k(a, b, c, d, e, f, g):\n    pass\n"
    (tmp_path / "tasks" / "b.py").write_text(second)
    (tmp_path / "tests" / "architecture_test.py").write_text('ROWS = """\na b\nc\n"""\n')
    return tmp_path


def test_counts_of_a_small_checkout(root: Path) -> None:
    found = structure.modules(root, structure.PACKAGE)
    assert [module.path for module in found] == [
        "lingvo_gpipe/__init__.py",
        "lingvo_gpipe/a.py",
        "tasks/b.py",
    ]
    assert structure.modules_by_folder(found) == [
        structure.Sized("lingvo_gpipe", 2),
        structure.Sized("tasks", 1),
    ]
    assert structure.any_in_parameters(found) == structure.AnyCount(
        annotated=6, bare=3, nested=1, aliased=1
    )
    assert structure.any_in_returns(found) == structure.AnyCount(
        annotated=3, bare=1, nested=1, aliased=0
    )
    assert structure.long_signatures(found) == [structure.Sized("tasks/b.py:k", 7)]
    assert structure.duplicates(found) == [structure.Sized("tasks/b.py:3", 7)]
    assert structure.law_rows(root) == 2


def test_long_modules_and_classes_are_named(tmp_path: Path) -> None:
    (tmp_path / "lingvo_gpipe").mkdir()
    methods = "".join(f"    def f{number}(self): ...\n" for number in range(16))
    text = f"class C:\n{methods}    x = 1\n" + "    x = 2\n" * 300 + "z = 3\n" * 183
    (tmp_path / "lingvo_gpipe" / "a.py").write_text(text)
    found = structure.modules(tmp_path, structure.PACKAGE)
    assert structure.long_modules(found) == [structure.Sized("lingvo_gpipe/a.py", 501)]
    assert structure.long_classes(found) == [structure.Sized("lingvo_gpipe/a.py:C", 318)]
    assert structure.wide_classes(found) == [structure.Sized("lingvo_gpipe/a.py:C", 16)]


@pytest.mark.parametrize(
    ("law", "count"),
    [
        ("ROWS = ((1, 2), (3,))", 2),
        ("ROWS: dict[str, str] = {'a': 'b'}", 1),
        ("LAW = 1", None),
    ],
)
def test_rows_of_the_law_are_counted_in_any_display(
    tmp_path: Path, law: str, count: int | None
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "architecture_test.py").write_text(law)
    assert structure.law_rows(tmp_path) == count


def test_table_has_a_line_for_each_measure(root: Path) -> None:
    measured = structure.rows(root)
    lines = structure.table(measured).splitlines()
    assert len(lines) == len(measured) + 2
    assert {line.count("|") for line in lines} == {4}
    assert "| words of the old dialect | 0 |  |" in lines


def test_the_package_keeps_its_limits() -> None:
    found = structure.modules(Path(__file__).parents[2], structure.PACKAGE)
    assert len(found) > 300
    beside = structure.modules(Path(__file__).parents[2], structure.OTHERS)
    folders = structure.modules_by_folder([*found, *beside])
    assert [each for each in folders if each.size > structure.MAX_MODULES] == []
    assert structure.long_modules(found) == []
    longest = structure.long_signatures(found)
    assert [each for each in longest if each.size > MOST_PARAMETERS] == []
    assert [each for each in structure.long_classes(found) if each.size > MOST_CLASS_LINES] == []
