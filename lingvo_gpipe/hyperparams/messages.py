"""Values and paths as messages show them: cut, if they are very long."""

from __future__ import annotations

_VALUE_CHARS = 80
_PATH_CHARS = 200


def shown(value: object) -> str:
    """Return a short text of any value.

    >>> shown("a" * 100)[-6:]
    'aaa...'
    """
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's limit of digits
        text = "an integer of very many digits"
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 3]}..."


def shorten(path: str) -> str:
    """Return a path for a message."""
    return path if len(path) <= _PATH_CHARS else f"{path[: _PATH_CHARS - 3]}..."
