"""The site's pages are made from the tree of the package; names in them become links."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import docstring_markdown, reference

FILES = {
    "README.md": "# A package\n\nSee `Dense` and [how](docs/guide.md).\n",
    "CHANGELOG.md": "# Changelog\n",
    "LICENSE": "free",
    "docs/guide.md": "# Guide\n\n[a](../tasks/loop.py#L3), [b](../lingvo_gpipe/layers/dense.py)\n",
    "docs/notebooks/a.ipynb": (
        '{"cells": [{"cell_type": "markdown", "source": ["# First\\n", "See [b](b.ipynb)."]},'
        ' {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["1\\n"]}]}]}'
    ),
    "docs/site.css": "",
    "docs/decisions/0001-a.md": "# 0001: `a` or b\n",
    "benchmarks/README.md": "# Measured\n",
    "lingvo_gpipe/__init__.py": (
        '"""Trains."""\nfrom lingvo_gpipe.layers.dense import Dense as Dense\n'
    ),
    "lingvo_gpipe/_private.py": '"""Hidden."""\n',
    "lingvo_gpipe/layers/__init__.py": (
        '"""Layers, such as `Dense`."""\n'
        "from lingvo_gpipe.layers.dense import Dense, project\n"
        '__all__ = ["Dense"]\n'
    ),
    "lingvo_gpipe/layers/dense.py": (
        '"""The dense | layer."""\n'
        'KIND = 1\n"""A kind."""\n'
        "OTHER = 2\n"
        'class Dense:\n    """x: [B] → x."""\n'
        '    def fprop(self):\n        """Compute it."""\n'
        'def project():\n    """Project x."""\n'
    ),
    "tasks/__init__.py": '"""Tasks."""\n',
    "tasks/loop.py": '"""Loops."""\ndef project():\n    """Project y."""\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small checkout whose tasks are reached by a link."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "lingvo_gpipe" / "tasks").symlink_to("../tasks")
    return tmp_path


def test_every_public_module_has_a_page_and_a_place(root: Path) -> None:
    pages = root / "pages"
    nav = reference.stage(root, pages)
    assert {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")} == {
        "README.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "docs/guide.md",
        "docs/notebooks/a.md",
        "docs/decisions/0001-a.md",
        "reference/index.md",
        "reference/layers/index.md",
        "reference/layers/dense.md",
        "reference/tasks/index.md",
        "reference/tasks/loop.md",
    }
    assert (pages / "docs/site.css").exists()
    assert (pages / "LICENSE").exists()
    assert nav == [
        {"Home": "README.md"},
        {
            "Guides": [
                {"Guide": "docs/guide.md"},
                {"Notebooks": [{"First": "docs/notebooks/a.md"}]},
                {"Decisions": [{"0001: a or b": "docs/decisions/0001-a.md"}]},
            ]
        },
        {
            "Reference": [
                {"lingvo_gpipe": "reference/index.md"},
                {
                    "layers": [
                        {"layers": "reference/layers/index.md"},
                        {"dense": "reference/layers/dense.md"},
                    ]
                },
                {
                    "tasks": [
                        {"tasks": "reference/tasks/index.md"},
                        {"loop": "reference/tasks/loop.md"},
                    ]
                },
            ]
        },
        {"Measurements": [{"Measured": "benchmarks/README.md"}]},
        {"Changelog": "CHANGELOG.md"},
    ]


def test_pages_name_what_modules_define_and_packages_export(root: Path) -> None:
    pages = root / "pages"
    reference.stage(root, pages)
    dense = (pages / "reference/layers/dense.md").read_text()
    assert dense == (
        '::: lingvo_gpipe.layers.dense\n    options:\n      members: ["KIND", "Dense", "project"]\n'
    )
    layers = (pages / "reference/layers/index.md").read_text()
    assert layers.startswith("::: lingvo_gpipe.layers\n    options:\n      members: false\n")
    assert "| [`Dense`][lingvo_gpipe.layers.dense.Dense] | x: \\[B] → x. |" in layers
    assert "| [`dense`][lingvo_gpipe.layers.dense] | The dense \\| layer. |" in layers
    assert "project" not in layers


def test_documents_link_names_and_sources(root: Path) -> None:
    pages = root / "pages"
    reference.stage(root, pages)
    assert "See [`Dense`][lingvo_gpipe.layers.dense.Dense] and" in (pages / "README.md").read_text()
    guide = (pages / "docs/guide.md").read_text()
    assert "[a](../reference/tasks/loop.md), [b](../reference/layers/dense.md)" in guide


def test_notebooks_become_pages_with_their_outputs(root: Path) -> None:
    pages = root / "pages"
    reference.stage(root, pages)
    assert (pages / "docs/notebooks/a.md").read_text() == (
        "# First\nSee [b](b.md).\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
    )


def test_names_are_linked_where_one_object_is_meant(root: Path) -> None:
    targets = reference.link_targets(reference.modules(root))
    assert targets["Dense"] == "lingvo_gpipe.layers.dense.Dense"
    assert targets["layers.Dense"] == "lingvo_gpipe.layers.dense.Dense"
    assert targets["Dense.fprop"] == "lingvo_gpipe.layers.dense.Dense.fprop"
    assert targets["dense.project"] == "lingvo_gpipe.layers.dense.project"
    assert "project" not in targets
    shutil.copy(root / "lingvo_gpipe/layers/dense.py", root / "tasks")
    assert "Dense" not in reference.link_targets(reference.modules(root))


def test_code_and_links_of_documents_stay(tmp_path: Path) -> None:
    targets = {"Dense": "a.Dense"}
    text = """# `Dense`
`Dense()`, [`Dense`](x.md), `dense`
1. first
   - `Dense`
     more

   ```python
   `Dense`
   ```

    `Dense`
```
`Dense`
```
"""
    page = reference.document_page("docs/a.md", text, tmp_path, targets)
    assert (
        page
        == """# `Dense`
[`Dense()`][a.Dense], [`Dense`](x.md), `dense`
1. first
    - [`Dense`][a.Dense]
        more

    ```python
    `Dense`
    ```

    `Dense`
```
`Dense`
```
"""
    )


def test_docstrings_become_markdown() -> None:
    text = """Return x [B, H] of `Dense`; a*b < c*d.

> 0 is `odd`:

    made = x[0] * 2

Args:
    x: [B] of `Dense`
        or none.
    **rest: more.

Returns:
    The span: [a, b].

Raises:
    OddError: it is odd.
    Other: it is other.

>>> f[0] * 2
'<a>'

After."""
    targets = {"Dense": "a.Dense", "OddError": "a.OddError"}
    assert docstring_markdown.markdown(text, targets).rstrip("\n") == (
        """Return x \\[B, H] of [`Dense`][a.Dense]; a\\*b &lt; c\\*d.

&gt; 0 is `odd`:

    made = x[0] * 2

Args:
    x: \\[B] of [`Dense`][a.Dense]
        or none.
    **rest: more.

Returns:
    The span&#58; \\[a, b].

Raises:
    a.OddError: it is odd.
    Other: it is other.

```pycon
>>> f[0] * 2
'<a>'
```

After."""
    )


def test_fields_of_params_become_attributes() -> None:
    values = {
        "units": "hyperparams.required('Features ' 'out.')",
        "rate": "hyperparams.field(0.5, 'A share.')",
        "table": f"field({list(range(30))}, 'A long one.')",
        "bare": "field('')",
        "slots": "dataclasses.field(default_factory=list)",
        "owner": "None",
    }
    assert docstring_markdown.fields(values) == (
        "\n\nAttributes:\n"
        "    units: Features out. Required.\n"
        "    rate: A share. Default: `0.5`.\n"
        "    table: A long one.\n"
        "    bare: Default: `''`."
    )
    assert docstring_markdown.fields({"owner": "None"}) == ""
