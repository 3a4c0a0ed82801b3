"""Texts of the documents: whole, without code, and their code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
# Lingvo's own flags, fields and classes are in the first column of these tables.
FOREIGN_FIRST_COLUMN = "docs/from_lingvo.md"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def prose(name: str) -> str:
    """Return a document without fenced blocks and without names of other projects."""
    text = re.sub(r"^```.*?^```$", "", read(name), flags=re.MULTILINE | re.DOTALL)
    if name == FOREIGN_FIRST_COLUMN:
        text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
    return text


def code(name: str) -> list[str]:
    """Return the texts between single backticks, without the escapes of table cells."""
    return re.findall(r"`([^`\n]+)`", prose(name))


def fenced(name: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, read(name), flags=re.MULTILINE | re.DOTALL)
