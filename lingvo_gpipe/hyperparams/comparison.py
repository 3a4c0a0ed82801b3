"""What differs between two texts of Params, which need not be readable here."""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gpipe.hyperparams import old_names


def values_by_path(text: str) -> dict[str, str]:
    r"""Return the values of a text's lines as they are written, with today's names of classes.

    >>> values_by_path("class: lingvo_gpipe.layers.dense.Dense\nunits: 3\n")
    {'class': 'layers.Dense', 'units': '3'}
    """
    lines = (line.partition(": ") for line in text.splitlines())
    return {path: old_names.current_value(value) for path, _, value in lines}


def changed_lines(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return a line for each path whose value differs.

    It is `path: old -> new` for a changed value, `- path: old` and `+ path: new` for one that only
    `old` or only `new` has.

    >>> list(changed_lines({"a": "1", "b": "2"}, {"a": "3", "c": "4"}).values())
    ['a: 1 -> 3', '- b: 2', '+ c: 4']
    """
    lines = {}
    for path in dict.fromkeys([*old, *new]):
        if path not in new:
            lines[path] = f"- {path}: {old[path]}"
        elif path not in old:
            lines[path] = f"+ {path}: {new[path]}"
        elif old[path] != new[path]:
            lines[path] = f"{path}: {old[path]} -> {new[path]}"
    return lines
