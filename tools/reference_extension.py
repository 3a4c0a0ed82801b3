"""How MkDocs reads the package's docstrings: loaded by it when it builds the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

from tools import docstring_markdown, reference


class Docstrings(griffe.Extension):
    """Rewrites all docstrings of the package once it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._targets = reference.link_targets(reference.modules(Path.cwd()))

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of `pkg` and of all that is in it."""
        del kwargs
        if pkg.name == reference.PACKAGE:
            self._rewrite(pkg)

    def _rewrite(self, item: griffe.Module | griffe.Class) -> None:
        for member in item.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._rewrite(member)
            elif isinstance(member, griffe.Object) and member.docstring:
                member.docstring.value = docstring_markdown.markdown(
                    member.docstring.value, self._targets
                )
        if isinstance(item, griffe.Class):
            self._add_fields(item)
        if item.docstring:
            item.docstring.value = docstring_markdown.markdown(item.docstring.value, self._targets)

    @staticmethod
    def _add_fields(item: griffe.Class) -> None:
        values = {
            name: str(each.value)
            for name, each in item.members.items()
            if isinstance(each, griffe.Attribute) and each.value is not None
        }
        table = docstring_markdown.fields(values)
        if not table:
            return
        if item.docstring is None:
            owner = item.parent.name if item.parent else item.name
            item.docstring = griffe.Docstring(
                f"Fields of `{owner}`.", parent=item, parser=griffe.Parser.google
            )
        if "Attributes:" not in item.docstring.value:
            item.docstring.value += table
