"""A job of the trainer, as modes receive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from lingvo_gpipe import registry


def job(task: Any, logdir: Path | None, lines: list[str], **fields: Any) -> registry.Job:
    """Return a job whose reports are added to `lines`; `fields` are others of it."""
    others = {"checkpoint": None, "should_stop": lambda: False, "rebuild": Mock()} | fields
    return registry.Job(model="toy", task=task, logdir=logdir, report=lines.append, **others)
