"""Build the site: the documents of `docs/`, and a reference page for each public module.

`python -m tools.reference` writes the pages to `build/docs` and the site to `build/site`. Nothing
is listed by hand: reference pages follow the tree of `lingvo_gpipe/`, its tasks and params
included, and guides are the files of `docs/`, notebooks too. Names in backticks, such as
`PipeliningLayer.build` or `layers.Dense`, become links where one public object with a docstring has
that name; links to a module's source become links to its page. A page lists the fields of all
Params classes (`tools.field_reference`). A warning fails the build, such as a broken link, or a
documented argument that does not exist.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "lingvo_gpipe"
LINKED = ("params", "tasks")  # folders that the package reaches by links of these names
CONFIG = "docs/mkdocs.yml"
COPIED = (".css", ".md", ".png")  # endings of the documents' files

Nav = list["dict[str, str | Nav]"]


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A module or package that gets a page.

    Attributes:
        name: dotted.
        is_package: it has modules below it.
        tree: its parsed source.
    """

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def page(self) -> str:
        """The path of its page among the pages, such as `reference/run/loop.md`."""
        parts = ["reference", *self.name.split(".")[1:]]
        return "/".join(parts) + ("/index.md" if self.is_package else ".md")


@dataclasses.dataclass(frozen=True, slots=True)
class Documented:
    """A public object with a docstring.

    Attributes:
        name: its full dotted name.
        is_class: its name alone is enough to link it.
        summary: first paragraph of the docstring.
    """

    name: str
    is_class: bool
    summary: str


# --- The package ----------------------------------------------------------------------------------


def modules(root: Path) -> list[Module]:
    """Return the public modules of the package, packages before what is in them."""
    found = []
    for folder, subfolders, files in os.walk(root / PACKAGE, followlinks=True):
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name[0] != "_"]
        for file in files:
            if file == "__init__.py" or (file.endswith(".py") and file[0] != "_"):
                parts = list(Path(folder, file).relative_to(root).with_suffix("").parts)
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                tree = ast.parse(Path(folder, file).read_text(encoding="utf-8"))
                found.append(Module(name, is_package, tree))
    return sorted(found, key=lambda module: module.name.split("."))


def documented(module: Module) -> Iterator[Documented]:
    """Yield a module and the public objects in it that have docstrings."""
    yield Documented(module.name, False, _summary(module.tree))
    pending: list[tuple[str, ast.AST]] = [(module.name, module.tree)]
    while pending:
        prefix, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name[0] != "_":
                name = f"{prefix}.{child.name}"
                is_class = isinstance(child, ast.ClassDef)
                if summary := _summary(child):
                    yield Documented(name, is_class, summary)
                if is_class:
                    pending.append((name, child))


def exports(package: Module) -> dict[str, str]:
    """Map the names that a package imports from its own modules to where they are defined."""
    listed: set[str] = set()
    imported = {}
    for node in ast.walk(package.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.name):
            imported.update({alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            listed |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed |= set(ast.literal_eval(node.value))
    return {name: target for name, target in imported.items() if name in listed}


def link_targets(found: list[Module]) -> dict[str, str]:
    """Map what a document may write in backticks to the full name of the one object meant.

    A class may be named alone; a function or module needs the end of its dotted name, such as
    `network.analyze`. What two objects could be is left out.
    """
    objects = [item for module in found for item in documented(module)]
    known = {item.name for item in objects}
    meant: dict[str, set[str]] = {}
    for item in objects:
        _add_endings(meant, item.name, item.name, shortest=1 if item.is_class else 2)
    for package in found:
        if package.is_package:
            for name, target in exports(package).items():
                if target in known:
                    _add_endings(meant, f"{package.name}.{name}", target, shortest=2)
    return {text: targets.pop() for text, targets in meant.items() if len(targets) == 1}


def linked(text: str, targets: Mapping[str, str]) -> str:
    """Return Markdown whose names in backticks are links; other code is left as it is."""

    def link(match: re.Match[str]) -> str:
        target = targets.get(match[1].removesuffix("()"))
        return f"[`{match[1]}`][{target}]" if target else match[0]

    return re.sub(r"(?<![\[`])`([^`\n]+)`(?![\]`])", link, text)


def _summary(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _add_endings(meant: dict[str, set[str]], name: str, target: str, shortest: int) -> None:
    parts = name.split(".")
    for length in range(shortest, len(parts) + 1):
        meant.setdefault(".".join(parts[-length:]), set()).add(target)


# --- Pages ----------------------------------------------------------------------------------------


def reference_page(module: Module, found: list[Module], targets: Mapping[str, str]) -> str:
    """Return the page of a module; that of a package lists what it exports and holds."""
    # What a module imports and exports is documented where it is defined.
    members = json.dumps(documented_members(module.tree) or False)
    text = f"::: {module.name}\n    options:\n      members: {members}\n"
    if not module.is_package:
        return text
    summaries = {item.name: item.summary for each in found for item in documented(each)}
    rows = [
        (name, target)
        for name, target in sorted(exports(module).items())
        if summaries.get(target) is not None
    ]
    if rows:
        text += "\n## Exports\n\n| name | summary |\n|---|---|\n"
        for name, target in rows:
            text += f"| [`{name}`][{target}] | {_cell(summaries[target], targets)} |\n"
    inside = [each for each in found if each.name.rpartition(".")[0] == module.name]
    if inside:
        text += "\n## Modules\n\n| name | summary |\n|---|---|\n"
        for each in inside:
            name = each.name.rpartition(".")[2]
            summary = _cell(summaries[each.name], targets)
            text += f"| [`{name}`][{each.name}] | {summary} |\n"
    return text


def documented_members(tree: ast.Module) -> list[str]:
    """Return the public classes, functions and constants with docstrings, in order."""
    found = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name] if ast.get_docstring(node) else []
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _is_text(after):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        found += [name for name in names if name[0] != "_"]
    return found


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _cell(summary: str, targets: Mapping[str, str]) -> str:
    return prose(summary, targets).replace("|", "\\|")


def prose(text: str, targets: Mapping[str, str]) -> str:
    """Return plain text of a docstring as Markdown: only backticks keep a meaning."""
    parts = re.split(r"(`[^`\n]+`)", text)
    for index in range(0, len(parts), 2):
        part = parts[index].replace("&", "&amp;").replace("<", "&lt;")
        parts[index] = re.sub(r"([\[*])", r"\\\1", part)
    return linked("".join(parts), targets)


def document_page(path: str, text: str, root: Path, targets: Mapping[str, str]) -> str:
    """Return a document at `path` of the checkout as a page: names linked, source links adapted.

    Fenced and indented code, headings and existing links keep their text. What a list item holds is
    indented by four spaces, since Python's Markdown reads less as the end of the item.
    """
    lines = []
    fenced = False
    added = ""
    for line in text.splitlines():
        if not fenced:
            spaces = len(line) - len(line.lstrip(" "))
            added = " " * (-spaces % 4) if spaces > 1 else ""
        line = added + line if line else line
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not (fenced or line.startswith("#") or (line.startswith("    ") and not added)):
            line = re.sub(
                r"\]\(([^)#:\s]+\.py)(#[^)]*)?\)",
                lambda match: f"]({_page_of_source(path, match[1], root)})",
                line,
            )
            line = re.sub(r"\]\(([^)#:\s]+)\.ipynb\)", r"](\1.md)", line)
            pieces = re.split(r"(\[[^\]]*\]\([^)]*\))", line)
            pieces[::2] = [linked(piece, targets) for piece in pieces[::2]]
            line = "".join(pieces)
        lines.append(line)
    return "\n".join(lines) + "\n"


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown: its texts, its code and the outputs that it keeps."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join(line for out in cell.get("outputs", ()) for line in out["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _page_of_source(path: str, link: str, root: Path) -> str:
    """Return the link from the document at `path` to the page of the source file it links."""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    parts = file.removesuffix(".py").split("/")
    if parts[0] in LINKED:
        parts.insert(0, PACKAGE)
    if parts[0] != PACKAGE or not (root / file).exists():
        return link
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    page = Module(name, is_package, ast.Module([], [])).page
    return posixpath.relpath(page, posixpath.dirname(path) or ".")


# --- The site -------------------------------------------------------------------------------------


def stage(root: Path, pages: Path) -> Nav:
    """Write every page below `pages`, laid out as in the checkout, and return the navigation."""
    found = modules(root)
    targets = link_targets(found)
    shutil.rmtree(pages, ignore_errors=True)
    names = ["README.md", "CHANGELOG.md", "LICENSE"]
    for folder in ("docs", "benchmarks"):
        paths = [path for path in (root / folder).rglob("*") if path.suffix in COPIED]
        names += [path.relative_to(root).as_posix() for path in sorted(paths)]
    for name in names:
        page = pages / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".md":
            text = (root / name).read_text(encoding="utf-8")
            page.write_text(document_page(name, text, root, targets), encoding="utf-8")
        else:
            shutil.copy(root / name, page)
    for path in sorted((root / "docs").rglob("*.ipynb")):
        name = path.relative_to(root).with_suffix(".md").as_posix()
        page = pages / name
        page.parent.mkdir(parents=True, exist_ok=True)
        text = notebook_page(path.read_text(encoding="utf-8"))
        page.write_text(document_page(name, text, root, targets), encoding="utf-8")
        names.append(name)
    for module in found:
        page = pages / module.page
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(reference_page(module, found, targets), encoding="utf-8")
    documents = [name for name in names if name.endswith(".md")]
    guides = [name for name in documents if posixpath.dirname(name) == "docs"]
    decisions = [name for name in documents if name.startswith("docs/decisions/")]
    notebooks = [name for name in documents if name.startswith("docs/notebooks/")]
    measured = [name for name in documents if name.startswith("benchmarks/")]
    guided = _entries(pages, guides)
    if notebooks:
        guided.append({"Notebooks": _entries(pages, notebooks)})
    guided.append({"Decisions": _entries(pages, decisions)})
    return [
        {"Home": "README.md"},
        {"Guides": guided},
        {"Reference": reference_nav(PACKAGE, found)},
        {"Measurements": _entries(pages, measured)},
        {"Changelog": "CHANGELOG.md"},
    ]


def reference_nav(package: str, found: list[Module]) -> Nav:
    """Return the navigation below a package: its own page, then its modules and packages."""
    nav: Nav = []
    for module in found:
        parent, _, name = module.name.rpartition(".")
        if module.name == package:
            nav.insert(0, {package.rpartition(".")[2]: module.page})
        elif parent == package:
            below = reference_nav(module.name, found) if module.is_package else module.page
            nav.append({name: below})
    return nav


def _entries(pages: Path, names: list[str]) -> Nav:
    entries: Nav = []
    for name in names:
        heading = re.search(r"^# (.+)$", (pages / name).read_text(encoding="utf-8"), re.MULTILINE)
        entries.append({heading[1].replace("`", "") if heading else name: name})
    return entries


def build(root: Path) -> int:
    """Build the site; return the exit code of MkDocs."""
    pages, config = root / "build/docs/pages", root / "build/docs/mkdocs.yml"
    nav = stage(root, pages)
    _add_fields(root, pages, nav)
    # JSON is YAML.
    settings = {
        "INHERIT": os.path.relpath(root / CONFIG, config.parent),
        "docs_dir": str(pages),
        "site_dir": str(root / "build/site"),
        "nav": nav,
    }
    config.write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of ruff
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PATH": path}
    return subprocess.run(command, cwd=root, env={**os.environ, **quiet}, check=False).returncode


def _add_fields(root: Path, pages: Path, nav: Nav) -> None:
    """Write the page of all fields, first below the reference."""
    from tools import field_reference  # imports the package, whose pages need no import

    text = field_reference.markdown(root, link_targets(modules(root)))
    (pages / field_reference.PAGE).write_text(text, encoding="utf-8")
    (below,) = (entry["Reference"] for entry in nav if "Reference" in entry)
    if isinstance(below, list):
        below.insert(1, {field_reference.TITLE: field_reference.PAGE})


def main() -> int:
    """Build the site of a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo", type=Path, default=Path(), help="folder of the checkout")
    root = parser.parse_args().repo.resolve()
    code = build(root)
    if code == 0:
        print(f"docs: {root / 'build/site/index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
