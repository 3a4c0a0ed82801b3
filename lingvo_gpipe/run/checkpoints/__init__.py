"""Checkpoints: keys, files, saving and restoring.

What a run does with them (when it saves, what it starts from) belongs to `lingvo_gpipe.run`.
"""

from lingvo_gpipe.run.checkpoints.files import (
    DamagedError,
    UnreadableError,
    at,
    find,
    newest,
    newest_text,
    params_text,
    refuse_patterns,
    step_of,
)
from lingvo_gpipe.run.checkpoints.keys import Part
from lingvo_gpipe.run.checkpoints.saved import SavedValues, read_value, reason, trained_values
from lingvo_gpipe.run.checkpoints.store import (
    Checkpoints,
    Matched,
    Restored,
    WriterThread,
    restore,
    restore_matching,
)

__all__ = [
    "Checkpoints",
    "DamagedError",
    "Matched",
    "Part",
    "Restored",
    "SavedValues",
    "UnreadableError",
    "WriterThread",
    "at",
    "find",
    "newest",
    "newest_text",
    "params_text",
    "read_value",
    "reason",
    "refuse_patterns",
    "restore",
    "restore_matching",
    "step_of",
    "trained_values",
]
