"""Do two worker processes share the card (`--workers=local:2`), with the results of one process?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator.question import Answers, Setting, attempt
from lingvo_gpipe.run import checkpoints, loop
from tests import tiny_task
from tests.support import saved

UPDATES = 4


def answers(setting: Setting) -> Answers:
    """Yield how far the variables of both runs are from each other."""
    setting.devices(2, memory_mib=2048)
    task = tiny_task.tiny_task(max_steps=UPDATES, save_interval_steps=UPDATES)
    (setting.folder / "task.txt").write_text(task.to_text(), encoding="utf-8")
    alone = attempt(lambda: loop.run(task, setting.folder / "alone").step)
    yield "one process", alone
    shared = attempt(_over_workers, setting.folder)
    yield "two workers", shared
    if "error" not in shared and isinstance(alone, int):
        yield "largest difference", attempt(_difference, setting.folder)


def _over_workers(folder: Path) -> dict[str, Any]:
    """Train over two workers; return the last lines of the trainer."""
    command = [sys.executable, "-m", "lingvo_gpipe.trainer", f"--params={folder}/task.txt"]
    command += ["--params_package=tests", f"--logdir={folder}/shared", "--workers=local:2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0:
        raise RuntimeError("\n".join(lines[-20:]))
    return {"exit code": done.returncode, "lines": lines[-5:]}


def _difference(folder: Path) -> float:
    alone, shared = (
        saved.values(str(checkpoints.newest(str(folder / name / "checkpoints"))))
        for name in ("alone", "shared")
    )
    return max(
        float(np.abs(alone[key] - shared[key]).max())
        for key in alone
        if np.issubdtype(alone[key].dtype, np.floating) and np.isfinite(alone[key]).all()
    )
