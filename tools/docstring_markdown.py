"""Turn the text of docstrings into Markdown with Google sections.

Docstrings are plain text with names in backticks, Google sections, doctests and indented code.
Brackets, stars and angle brackets in them are themselves, names become links, doctests code. The
fields of a Params class, whose help is an argument of `field` or `required`, become a table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from tools import reference

_SECTION = re.compile(
    r"(Args|Attributes|Returns|Raises|Yields|Receives|Warns|Examples?|Note|See Also):$"
)
_ARGUMENT = re.compile(r"(\s+\*{0,2})(\w+)((?: \([^)]*\))?:)(.*)")
_MAX_DEFAULT_CHARS = 60


def markdown(text: str, targets: Mapping[str, str]) -> str:
    """Return the text of a docstring as Markdown with Google sections."""
    return "\n".join(_markdown_lines(text.splitlines(), targets))


def _markdown_lines(lines: list[str], targets: Mapping[str, str]) -> Iterator[str]:
    section = ""
    example: str | None = None  # indentation of the doctest that is being read
    for line in [*lines, ""]:
        text = line.lstrip()
        indentation = line[: len(line) - len(text)]
        if example is not None and not text:
            yield f"{example}```"
            example = None
        if example is None and text.startswith(">>>"):
            example = indentation
            yield f"{indentation}```pycon"
        if text and not indentation:
            match = _SECTION.match(text)
            section = match[1] if match else ""
        if example is not None or (indentation.startswith("    ") and not section):
            yield line
        elif section in ("Returns", "Yields") and indentation:
            # What comes before a colon would be read as a type.
            yield indentation + reference.prose(text, targets).replace(": ", "&#58; ")
        elif section and (match := _ARGUMENT.fullmatch(line)):
            name = match[2]
            if section == "Raises":
                name = targets.get(name, name)
            yield f"{match[1]}{name}{match[3]}" + reference.prose(match[4], targets)
        else:
            yield indentation + re.sub("^>", "&gt;", reference.prose(text, targets))


def fields(values: Mapping[str, str]) -> str:
    """Return an Attributes section of the fields of a Params class; empty where there are none.

    Args:
        values: name of each attribute → source of its value.
    """
    lines = []
    for name, value in values.items():
        call = ast.parse(value, mode="eval").body
        function = ast.unparse(call.func).split(".")[-1] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or function not in ("field", "required"):
            continue
        given = list(call.args)
        if function == "field" and not given:  # of a dataclass
            continue
        default = ast.unparse(given.pop(0)) if function == "field" else None
        text = ast.literal_eval(given[0]) if given else ""
        if default is None:
            text += " Required."
        elif len(default) <= _MAX_DEFAULT_CHARS:
            text += f" Default: `{default}`."
        lines.append(f"    {name}: {text.strip()}")
    return "\n".join(["", "", "Attributes:", *lines]) if lines else ""
