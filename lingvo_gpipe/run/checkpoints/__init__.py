"""Checkpoints: keys, files, saving, restoring, and the best one.

What a run does with them (when it saves, what it starts from) belongs to `lingvo_gpipe.run`.
"""

from lingvo_gpipe.run.checkpoints.best import Best, best_variables
from lingvo_gpipe.run.checkpoints.files import (
    find,
    keep_only,
    newest,
    newest_text,
    params_text,
    refuse_patterns,
    step_of,
)
from lingvo_gpipe.run.checkpoints.store import Checkpoints, Matched, Restored, restore_matching
from lingvo_gpipe.run.checkpoints.values import read_value, reason
from lingvo_gpipe.run.checkpoints.writing import Writer, Written

__all__ = [
    "Best",
    "Checkpoints",
    "Matched",
    "Restored",
    "Writer",
    "Written",
    "best_variables",
    "find",
    "keep_only",
    "newest",
    "newest_text",
    "params_text",
    "read_value",
    "reason",
    "refuse_patterns",
    "restore_matching",
    "step_of",
]
