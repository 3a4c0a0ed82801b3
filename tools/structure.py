"""Measure how the source is divided: sizes of folders, modules, classes and signatures, and types.

`python -m tools.structure` prints a Markdown table of this checkout; `--repo=DIR` measures another
one, such as a worktree of an earlier commit, by the same rules. The package is `lingvo_gpipe/`,
`tasks/` and `params/`; what else is Python is counted apart.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tools import dialect

PACKAGE = ("lingvo_gpipe", "tasks", "params")
OTHERS = ("tests", "benchmarks", "tools", "docs")
LAW = "tests/architecture_test.py"

MAX_MODULES = 14
MAX_MODULE_LINES = 500
MAX_CLASS_LINES = 300
MAX_PUBLIC_METHODS = 15
MAX_PARAMETERS = 6
DUPLICATE_LINES = 6

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A source file.

    Attributes:
        path: relative to the checkout, with slashes.
        text: what it holds.
        tree: the same, parsed.
    """

    path: str
    text: str
    tree: ast.Module


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """Something with a size, named `module:name` where it is inside a module."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class AnyCount:
    """How many annotations there are, and how many of them leave the type open.

    Attributes:
        annotated: all of them.
        bare: `Any` is the whole annotation.
        nested: `Any` is a part of it, such as in `dict[str, Any]`.
        aliased: the whole annotation is a name that a module defines as `Any`.
    """

    annotated: int
    bare: int
    nested: int
    aliased: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    question: str
    figure: str
    detail: str = ""


# --- Reading --------------------------------------------------------------------------------------


def modules(root: Path, folders: Sequence[str]) -> list[Module]:
    """Return the modules below `folders` of `root`, sorted; links are not followed."""
    found = []
    for top in folders:
        for folder, subfolders, files in os.walk(root / top):
            subfolders[:] = [name for name in subfolders if not name.startswith((".", "__"))]
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    text = path.read_text(encoding="utf-8")
                    found.append(
                        Module(path.relative_to(root).as_posix(), text, ast.parse(text, str(path)))
                    )
    return sorted(found, key=lambda module: module.path)


def functions(module: Module) -> Iterator[tuple[str, _Function, bool]]:
    """Yield the qualified name of every function, the function, and whether a class holds it."""
    pending: list[tuple[ast.AST, str, bool]] = [(module.tree, "", False)]
    while pending:
        node, prefix, in_class = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child, in_class
                pending.append((child, f"{prefix}{child.name}.", False))
            elif isinstance(child, ast.ClassDef):
                pending.append((child, f"{prefix}{child.name}.", True))
            else:
                pending.append((child, prefix, in_class))


def classes(module: Module) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class and its name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield f"{module.path}:{node.name}", node


def parameters(function: _Function, in_class: bool) -> list[ast.arg]:
    """Return the parameters of a function, without `self` and `cls`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    static = any(ast.unparse(item) == "staticmethod" for item in function.decorator_list)
    if in_class and not static:
        positional = positional[1:]
    packed = [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [*positional, *given.kwonlyargs, *packed]


# --- Measures -------------------------------------------------------------------------------------


def modules_by_folder(found: Sequence[Module]) -> list[Sized]:
    """Count the modules of each folder, `__init__` included, largest first."""
    counts = Counter(str(PurePosixPath(module.path).parent) for module in found)
    return [Sized(name, count) for name, count in counts.most_common()]


def long_modules(found: Sequence[Module]) -> list[Sized]:
    """Return modules of more than `MAX_MODULE_LINES` lines, longest first."""
    return _above(
        (Sized(module.path, len(module.text.splitlines())) for module in found), MAX_MODULE_LINES
    )


def long_classes(found: Sequence[Module]) -> list[Sized]:
    """Return classes of more than `MAX_CLASS_LINES` lines, longest first."""
    sizes = (
        Sized(name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for module in found
        for name, node in classes(module)
    )
    return _above(sizes, MAX_CLASS_LINES)


def wide_classes(found: Sequence[Module]) -> list[Sized]:
    """Return classes with more than `MAX_PUBLIC_METHODS` public methods and properties."""
    sizes = (
        Sized(
            name,
            len(
                {
                    child.name
                    for child in node.body
                    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not child.name.startswith("_")
                }
            ),
        )
        for module in found
        for name, node in classes(module)
    )
    return _above(sizes, MAX_PUBLIC_METHODS)


def long_signatures(found: Sequence[Module]) -> list[Sized]:
    """Return functions of more than `MAX_PARAMETERS` parameters, most first."""
    sizes = (
        Sized(f"{module.path}:{name}", len(parameters(function, in_class)))
        for module in found
        for name, function, in_class in functions(module)
    )
    return _above(sizes, MAX_PARAMETERS)


def any_in_parameters(found: Sequence[Module]) -> AnyCount:
    """Count the annotations of parameters."""
    return _any_count(
        found,
        [
            arg.annotation
            for module in found
            for _, function, in_class in functions(module)
            for arg in parameters(function, in_class)
            if arg.annotation is not None
        ],
    )


def any_in_returns(found: Sequence[Module]) -> AnyCount:
    """Count the annotations of return values."""
    return _any_count(
        found,
        [
            function.returns
            for module in found
            for _, function, _ in functions(module)
            if function.returns is not None
        ],
    )


def duplicates(found: Sequence[Module]) -> list[Sized]:
    """Return runs of at least `DUPLICATE_LINES` lines that occurred before, longest first.

    Blank lines, comments, docstrings and imports do not count, and indentation does not matter.
    """
    seen: set[tuple[str, ...]] = set()
    runs = []
    for module in found:
        lines = list(_code_lines(module))
        windows = [
            tuple(text for _, text in lines[start : start + DUPLICATE_LINES])
            for start in range(len(lines) - DUPLICATE_LINES + 1)
        ]
        start = None
        for index, window in enumerate([*windows, None]):
            if index >= DUPLICATE_LINES:  # for those after them
                seen.add(windows[index - DUPLICATE_LINES])
            repeated = window is not None and window in seen
            if repeated and start is None:
                start = index
            elif not repeated and start is not None:
                size = index - start + DUPLICATE_LINES - 1
                runs.append(Sized(f"{module.path}:{lines[start][0]}", size))
                start = None
        seen.update(windows)
    return _above(runs, 0)


def law_rows(root: Path) -> int | None:
    """Return how many rows the import law has, None where it is not found.

    The law is `ROWS` of `tests/architecture_test.py`: lines of a text, or elements of a display.
    """
    path = root / LAW
    if not path.exists():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if not any(isinstance(target, ast.Name) and target.id == "ROWS" for target in targets):
            continue
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return sum(1 for line in value.value.splitlines() if line.strip())
        if isinstance(value, ast.Tuple | ast.List | ast.Set):
            return len(value.elts)
        if isinstance(value, ast.Dict):
            return len(value.keys)
    return None


# --- Details --------------------------------------------------------------------------------------


def _above(sizes: Iterator[Sized] | list[Sized], limit: int) -> list[Sized]:
    return sorted((item for item in sizes if item.size > limit), key=lambda item: -item.size)


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (
        isinstance(node, ast.Attribute) and node.attr == "Any"
    )


def _aliases_of_any(found: Sequence[Module]) -> set[str]:
    """Return the names that modules define as `Any` itself."""
    names = set()
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and _is_any(node.value):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and node.value and _is_any(node.value):
                names |= {node.target.id} if isinstance(node.target, ast.Name) else set()
    return names


def _any_count(found: Sequence[Module], annotations: Sequence[ast.expr]) -> AnyCount:
    aliases = _aliases_of_any(found)
    bare = nested = aliased = 0
    for annotation in annotations:
        node: ast.AST = annotation
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            node = ast.parse(annotation.value, mode="eval").body
        name = getattr(node, "id", getattr(node, "attr", None))
        if _is_any(node):
            bare += 1
        elif name in aliases:
            aliased += 1
        elif any(_is_any(part) for part in ast.walk(node)):
            nested += 1
    return AnyCount(len(annotations), bare, nested, aliased)


def _code_lines(module: Module) -> Iterator[tuple[int, str]]:
    skipped: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Expr | ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(module.text.splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#") and number not in skipped:
            yield number, text


# --- Table ----------------------------------------------------------------------------------------


def rows(root: Path) -> list[Row]:
    """Measure the checkout at `root`."""
    package, others = modules(root, PACKAGE), modules(root, OTHERS)
    duplicate = duplicates(package)
    law = law_rows(root)
    words = len(dialect.occurrences(root))
    folders = modules_by_folder(package)
    return [
        Row("modules, and lines, of the package", _total(package)),
        Row("modules, and lines, of tests, benchmarks, tools, docs", _total(others)),
        Row("modules in a folder, most", *_largest(folders, limit=MAX_MODULES)),
        Row(
            "the same of tests, benchmarks, tools, docs",
            *_largest(modules_by_folder(others), limit=MAX_MODULES),
        ),
        Row("rows of the import law", "unknown" if law is None else str(law)),
        _count("modules over 500 lines", long_modules(package)),
        _count("the same of tests, benchmarks, tools, docs", long_modules(others)),
        _count("classes over 300 lines", long_classes(package)),
        _count("classes with over 15 public methods", wide_classes(package)),
        Row("parameters of a function, most", *_largest(long_signatures(package))),
        _count("functions with over 6 parameters", long_signatures(package)),
        _shares("`Any` among annotated parameters", any_in_parameters(package)),
        _shares("`Any` among annotated returns", any_in_returns(package)),
        Row(
            "duplicates of six lines or more",
            f"{len(duplicate)} ({sum(item.size for item in duplicate)} lines)",
            _listing(duplicate, 3),
        ),
        Row("words of the old dialect", str(words)),
    ]


def _total(found: Sequence[Module]) -> str:
    return f"{len(found)}, {sum(len(module.text.splitlines()) for module in found):,}"


def _largest(sizes: list[Sized], limit: int = 0) -> tuple[str, str]:
    if not sizes:
        return "0", ""
    shown = [item for item in sizes if item.size > limit] or sizes[:1]
    return str(sizes[0].size), _listing(shown, 3)


def _count(question: str, found: list[Sized]) -> Row:
    return Row(question, str(len(found)), _listing(found, 8))


def _shares(question: str, count: AnyCount) -> Row:
    def share(part: int) -> str:
        return f"{100 * part / max(count.annotated, 1):.1f} % ({part})"

    detail = f"nested {share(count.nested)}, by an alias {share(count.aliased)}"
    return Row(question, share(count.bare), f"{detail}, of {count.annotated}")


def _listing(found: Sequence[Sized], most: int) -> str:
    shown = ", ".join(f"`{item.name}` {item.size}" for item in found[:most])
    return shown + (f", and {len(found) - most} more" if len(found) > most else "")


def table(measured: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| measure | figure | where |", "|---|---|---|"]
    lines += [f"| {row.question} | {row.figure} | {row.detail} |" for row in measured]
    return "\n".join(lines)


def main() -> int:
    """Print the table of a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo", type=Path, default=Path(), help="folder of the checkout")
    print(table(rows(parser.parse_args().repo)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
