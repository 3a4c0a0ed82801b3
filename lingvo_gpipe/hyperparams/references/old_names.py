"""Names of classes in texts that were written before, and their names today.

The module `names` writes a class by its public name, such as `layers.Conv2D`. Texts of runs and
saved recipes must stay readable, so that no entry here is ever removed. Renaming a public class
needs an entry in `RENAMED`; the test of `names` checks that every name of the table leads to a
class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MODULES: Mapping[str, str] = {
    f"lingvo_gpipe.{module}": place
    for place, modules in {
        "hyperparams": "hyperparams",
        "input": "input",
        "keras_layers": "layers.keras_adapter",
        "layers": (
            "layers.activation layers.attention layers.base layers.composition layers.convolution "
            "layers.dense layers.dropout layers.embedding layers.heads layers.joining "
            "layers.metric layers.normalization layers.pooling layers.shaping"
        ),
        "network": "network",
        "optim": (
            "optimizer update tasks.image.optimizers tasks.image.schedules tasks.mt.adafactor "
            "tasks.mt.schedules"
        ),
        "pipelining": "pipelining",
        "task": "task",
        "tasks.image": (
            "tasks.image.amoebanet tasks.image.digits tasks.image.folder tasks.image.images "
            "tasks.image.operations tasks.image.tfds"
        ),
        "tasks.lm": "tasks.lm.input",
        "tasks.mt": (
            "tasks.mt.bilingual tasks.mt.catalogues tasks.mt.corpus tasks.mt.decoding "
            "tasks.mt.input tasks.mt.layers tasks.mt.preparation tasks.mt.scores tasks.mt.search "
            "tasks.mt.task tasks.mt.tfds_corpus tasks.mt.vocabulary"
        ),
    }.items()
    for module in modules.split()
}
"""Modules by which texts named classes before there were public names → the public place now."""

RENAMED: Mapping[str, str] = {
    "optim.KerasSchedule": "optim.KerasLearningRate",
    "optim.Schedule": "optim.LearningRate",
    "tasks.mt.Files": "tasks.mt.FileCorpus",
    "tasks.mt.Policy": "tasks.mt.FaultPolicy",
    "tasks.mt.TFDS": "tasks.mt.TFDSCorpus",
    "tasks.mt.Training": "tasks.mt.VocabularyTraining",
}
"""Earlier public names → the public names of the same classes now."""

_QUOTED_OR_DOTTED = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![\w.])[^\W\d]\w*(?:\.[^\W\d]\w*)+"""
)


def current(name: str) -> str:
    """Return today's name of the class that a text calls `name`; `name` itself if it is the same.

    >>> current("lingvo_gpipe.layers.convolution.Conv2D"), current("layers.Conv2D")
    ('layers.Conv2D', 'layers.Conv2D')
    """
    if name.startswith("lingvo_gpipe."):
        name = _replaced(name, MODULES)
    return RENAMED.get(name) or _replaced(name, RENAMED)


def current_value(value: str) -> str:
    """Return the text of a value with today's names; what is in quotes stays.

    >>> current_value("[lingvo_gpipe.task.Start, 'lingvo_gpipe.task.Start']")
    "[task.Start, 'lingvo_gpipe.task.Start']"
    """
    return _QUOTED_OR_DOTTED.sub(
        lambda match: match[0] if match[0][0] in "'\"" else current(match[0]), value
    )


def _replaced(name: str, table: Mapping[str, str]) -> str:
    """Return `name` with its longest beginning that `table` has, but not all of it, replaced."""
    longest = max((old.count(".") + 1 for old in table), default=0)
    parts = name.split(".")
    for count in range(min(longest, len(parts) - 1), 0, -1):
        new = table.get(".".join(parts[:count]))
        if new is not None:
            return ".".join([new, *parts[count:]])
    return name
