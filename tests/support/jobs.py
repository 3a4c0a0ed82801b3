"""A job of the trainer, as modes receive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from lingvo_gpipe import registry, trainer


def job(
    task: Any, logdir: Path | None, lines: list[str], *flags: str, **fields: Any
) -> registry.Job:
    """Return a job whose reports are added to `lines`, with flags and other fields."""
    others = {"checkpoint": None, "should_stop": lambda: False, "rebuild": Mock()} | fields
    others["flags"] = trainer.read_flags(flags)
    return registry.Job(model="toy", task=task, logdir=logdir, report=lines.append, **others)
