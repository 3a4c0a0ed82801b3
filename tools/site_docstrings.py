"""What mkdocstrings cannot read by itself: doctests between paragraphs, and fields of Params."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings as the package is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence doctests, and keep the brackets of shapes from being read as links."""
        if obj.docstring:
            text = re.sub(r"\](?=[\[(])", r"]\\", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Describe a field of a Params class by its help."""
        call = attr.value if attr.docstring is None else None
        if not isinstance(call, griffe.ExprCall):
            return
        function = str(call.function).rpartition(".")[2]
        position = {"field": 1, "required": 0}.get(function)
        given = [each for each in call.arguments if not isinstance(each, griffe.ExprKeyword)]
        if position is None or len(given) <= position:
            return
        text = ast.literal_eval(str(given[position]))
        default = f"Default: `{given[0]}`." if position else "Required."
        attr.docstring = griffe.Docstring(f"{text} {default}", parent=attr)
