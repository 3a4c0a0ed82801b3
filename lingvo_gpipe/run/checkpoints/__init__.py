"""Checkpoints: keys, files, saving, restoring, and the best one.

What a run does with them (when it saves, what it starts from) belongs to `lingvo_gpipe.run`.
"""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.run.checkpoints.best import Best as Best
    from lingvo_gpipe.run.checkpoints.best import best_variables as best_variables
    from lingvo_gpipe.run.checkpoints.files import UnreadableNowError as UnreadableNowError
    from lingvo_gpipe.run.checkpoints.files import at as at
    from lingvo_gpipe.run.checkpoints.files import find as find
    from lingvo_gpipe.run.checkpoints.files import keep_only as keep_only
    from lingvo_gpipe.run.checkpoints.files import newest as newest
    from lingvo_gpipe.run.checkpoints.files import newest_text as newest_text
    from lingvo_gpipe.run.checkpoints.files import params_text as params_text
    from lingvo_gpipe.run.checkpoints.files import refuse_patterns as refuse_patterns
    from lingvo_gpipe.run.checkpoints.files import step_of as step_of
    from lingvo_gpipe.run.checkpoints.store import Checkpoints as Checkpoints
    from lingvo_gpipe.run.checkpoints.store import Matched as Matched
    from lingvo_gpipe.run.checkpoints.store import Restored as Restored
    from lingvo_gpipe.run.checkpoints.store import restore_matching as restore_matching
    from lingvo_gpipe.run.checkpoints.values import UNREADABLE as UNREADABLE
    from lingvo_gpipe.run.checkpoints.values import SavedValues as SavedValues
    from lingvo_gpipe.run.checkpoints.values import check_damaged as check_damaged
    from lingvo_gpipe.run.checkpoints.values import read_value as read_value
    from lingvo_gpipe.run.checkpoints.values import reason as reason
    from lingvo_gpipe.run.checkpoints.values import trained_values as trained_values
    from lingvo_gpipe.run.checkpoints.values import write_values as write_values
    from lingvo_gpipe.run.checkpoints.writing import Writer as Writer
    from lingvo_gpipe.run.checkpoints.writing import Written as Written

# Lazily: `files` needs no TensorFlow, the others do.
__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "best": ["Best", "best_variables"],
        "files": [
            "UnreadableNowError",
            "at",
            "find",
            "keep_only",
            "newest",
            "newest_text",
            "params_text",
            "refuse_patterns",
            "step_of",
        ],
        "store": ["Checkpoints", "Matched", "Restored", "restore_matching"],
        "values": [
            "UNREADABLE",
            "SavedValues",
            "check_damaged",
            "read_value",
            "reason",
            "trained_values",
            "write_values",
        ],
        "writing": ["Writer", "Written"],
    },
)
