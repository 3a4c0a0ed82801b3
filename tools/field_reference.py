"""The site's page "Layers and fields": every public Params class with its fields.

`markdown(targets)` imports the package and reads the fields from the classes themselves, so that
fields of private bases are listed, too, with the type, default and help that a run uses.
"""

from __future__ import annotations

import importlib
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from lingvo_gpipe import hyperparams
from tools import reference

PAGE = "reference/layers_and_fields.md"
TITLE = "Layers and fields"
_RECIPES = f"{reference.PACKAGE}.params"  # models, which have no fields of their own
_MAX_DEFAULT_CHARS = 60


def classes(root: Path) -> list[type[hyperparams.Params]]:
    """Return every Params class that the package exports, by public name."""
    for module in reference.modules(root):
        if not module.name.startswith(_RECIPES):
            importlib.import_module(module.name)
    found = {kind.class_name(): kind for kind in _below(hyperparams.Params)}
    exported = (name for name in found if not name.startswith(f"{reference.PACKAGE}."))
    own = (name for name in exported if _is_public(found[name]))
    return [found[name] for name in sorted(own, key=lambda name: name.rpartition(".")[::2])]


def markdown(root: Path, targets: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        root: the checkout.
        targets: what names in backticks are linked to; see `reference.link_targets`.
    """
    listed = classes(root)
    lines = [
        f"# {TITLE}",
        "",
        "Every Params class and its fields, as `--mode=params` lists those of one model.",
    ]
    groups = itertools.groupby(listed, key=lambda kind: kind.class_name().rpartition(".")[0])
    for package, kinds in groups:
        lines += ["", f"## {package}"]
        for kind in kinds:
            lines += ["", *_section(kind, listed, targets)]
    return "\n".join(lines) + "\n"


def _below(kind: type[hyperparams.Params]) -> Iterator[type[hyperparams.Params]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


def _is_public(kind: type[hyperparams.Params]) -> bool:
    """Return whether a class is of the package, and no part of its name is private."""
    private = any(part.startswith("_") for part in kind.class_name().split("."))
    return kind.__module__.startswith(f"{reference.PACKAGE}.") and not private


def _section(
    kind: type[hyperparams.Params],
    listed: list[type[hyperparams.Params]],
    targets: Mapping[str, str],
) -> Iterator[str]:
    name = kind.class_name()
    owner = kind.owner or kind
    yield f"### {name.rpartition('.')[2]}"
    yield ""
    summary = " ".join((owner.__doc__ or "").split("\n\n")[0].split())
    yield reference.prose(f"`{name}`: {summary}" if summary else f"`{name}`.", targets)
    base = next((each for each in kind.__mro__[1:] if each in listed), None)
    inherited = base.fields() if base else {}
    fields = kind.fields()
    new = [field for field in fields.values() if inherited.get(field.name) is not field]
    if new:
        yield ""
        yield "| field | type | default | |"
        yield "|---|---|---|---|"
    for field in new:
        required = field.default is hyperparams.REQUIRED
        default = textwrap.shorten(repr(field.default), _MAX_DEFAULT_CHARS, placeholder=" …")
        yield (
            f"| `{field.name}` | {_code(field.describe_type())} "
            f"| {'required' if required else _code(default)} "
            f"| {reference.prose(field.help, targets).replace('|', chr(92) + '|')} |"
        )
    if base and len(new) < len(fields):
        names = ", ".join(f"`{field}`" for field in fields if inherited.get(field) is fields[field])
        yield ""
        yield f"{reference.prose(f'As `{base.class_name()}`', targets)}: {names}."


def _code(text: str) -> str:
    """Return text as code within a cell of a table."""
    return f"`{text}`".replace("|", "\\|")
