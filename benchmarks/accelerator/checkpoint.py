"""Has a checkpoint of the card equal bits on the CPU, and again on the card?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accelerator.question import Answers, Setting
from lingvo_gpipe.run import checkpoints, learner
from tests import tiny_task


def answers(setting: Setting) -> Answers:
    """Yield the variables whose bits differ; none should."""
    devices = setting.devices(2, memory_mib=2048)
    batches = iter(tiny_task.tiny_task().input.instantiate().batches(0))
    first = _learner(devices)
    for _ in range(3):
        first.update([next(batches)])
    _save(first, setting.folder / "card")
    on_cpu = _learner(["/device:CPU:0"] * 2)
    _restore(on_cpu, setting.folder / "card")
    yield "other bits on the CPU", _different(first, on_cpu)
    _save(on_cpu, setting.folder / "cpu")
    again = _learner(devices)
    _restore(again, setting.folder / "cpu")
    yield "other bits on the card again", _different(first, again)
    batch = next(batches)
    for each in (first, again):
        each.update([batch])
    yield "other bits after one more update of both", _different(first, again)


def _learner(devices: list[str]) -> learner.Learner:
    task = tiny_task.tiny_task()
    task.model.devices = tuple(devices)
    return learner.Learner(task, task.input.instantiate().element_spec(training=True))


def _save(updates: learner.Learner, folder: Path) -> None:
    checkpoints.Checkpoints(str(folder), updates.variables).save(3)


def _restore(updates: learner.Learner, folder: Path) -> None:
    if checkpoints.restore(str(folder), updates.variables, {}) is None:
        raise FileNotFoundError(folder)


def _different(one: learner.Learner, other: learner.Learner) -> list[str]:
    bits: list[dict[str, Any]] = [
        {key: variable.numpy().tobytes() for key, variable in each.variables.items()}
        for each in (one, other)
    ]
    return sorted(key for key in bits[0] if bits[0][key] != bits[1][key])
