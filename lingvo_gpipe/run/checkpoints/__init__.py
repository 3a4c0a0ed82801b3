"""Checkpoints: keys, files, saving, restoring, and the best one.

What a run does with them (when it saves, what it starts from) belongs to `lingvo_gpipe.run`.
"""

from lingvo_gpipe.run.checkpoints.best import Best, best_variables
from lingvo_gpipe.run.checkpoints.files import (
    UnreadableNowError,
    at,
    find,
    keep_only,
    newest,
    newest_text,
    params_text,
    refuse_patterns,
    step_of,
)
from lingvo_gpipe.run.checkpoints.store import Checkpoints, Matched, Restored, restore_matching
from lingvo_gpipe.run.checkpoints.values import (
    UNREADABLE,
    SavedValues,
    check_damaged,
    read_value,
    reason,
    trained_values,
    write_values,
)
from lingvo_gpipe.run.checkpoints.writing import Writer, Written

__all__ = [
    "UNREADABLE",
    "Best",
    "Checkpoints",
    "Matched",
    "Restored",
    "SavedValues",
    "UnreadableNowError",
    "Writer",
    "Written",
    "at",
    "best_variables",
    "check_damaged",
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
    "trained_values",
    "write_values",
]
