"""What a run has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def values(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a run's last checkpoint by key; none without a checkpoint."""
    from lingvo_gpipe.run import checkpoints

    prefix = checkpoints.newest(str(folder / "checkpoints"))
    if prefix is None:
        return {}
    saved = checkpoints.SavedValues(prefix)
    return {key: saved.read(key) for key in saved.shapes}
