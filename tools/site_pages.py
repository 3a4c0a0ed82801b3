"""What MkDocs cannot do by itself: pages from outside `docs/`, notebooks, links to sources."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CHANGELOG.md", "LICENSE")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents from outside `docs/`, and each notebook as a page of Markdown."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            page = notebook_page((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"))
            files.append(File.generated(config, page_of(f"docs/{file.src_uri}"), content=page))
    for name in OUTSIDE:
        files.append(File.generated(config, page_of(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the checkout into links between pages."""
    here = page.file.src_uri
    source = "README.md" if here == "index.md" else here
    folder = posixpath.dirname(source if (ROOT / source).exists() else f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return f"]({posixpath.relpath(page_of(target), posixpath.dirname(here) or '.')}{match[2]})"

    return re.sub(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)", link, markdown)


def page_of(file: str) -> str:
    """Return the page of a file of the checkout.

    >>> page_of("lingvo_gpipe/schedule/__init__.py")
    'reference/lingvo_gpipe/schedule/index.md'
    """
    if file == "README.md":
        return "index.md"
    if file.startswith("lingvo_gpipe/") and file.endswith(".py"):
        return f"reference/{file.removesuffix('.py')}.md".replace("__init__", "index")
    return file.removeprefix("docs/").replace(".ipynb", ".md")


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown: its texts, its code and the outputs that it keeps."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                printed = "".join(output["text"])
                parts.append(f"```text\n{printed.rstrip()}\n```")
            else:
                parts.append(f"![Output](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"
