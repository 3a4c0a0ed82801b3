"""Has a checkpoint of the card equal bits on the CPU, and again on the card?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator.question import Answers, Setting
from lingvo_gpipe.run import checkpoints, learner
from tests import tiny_task


def answers(setting: Setting) -> Answers:
    """Yield the variables whose bits differ; none should."""
    devices = setting.devices(2, memory_mib=2048)
    first = _learner(devices)
    batches = iter(tiny_task.tiny_task().input.instantiate().batches(0))
    for _ in range(3):
        first.update([next(batches)])
    of_card = _values(first)
    _save(first, setting.folder / "card")
    on_cpu = _learner(["/device:CPU:0"] * 2)
    _restore(on_cpu, setting.folder / "card")
    yield "variables", len(of_card)
    yield "other bits on the CPU", _different(of_card, _values(on_cpu))
    _save(on_cpu, setting.folder / "cpu")
    again = _learner(devices)
    _restore(again, setting.folder / "cpu")
    yield "other bits on the card again", _different(of_card, _values(again))
    batch = next(batches)
    first.update([batch])
    again.update([batch])
    yield "other bits after one more update of both", _different(_values(first), _values(again))


def _learner(devices: list[str]) -> learner.Learner:
    task = tiny_task.tiny_task()
    task.model.devices = tuple(devices)
    return learner.Learner(task, task.input.instantiate().element_spec(training=True))


def _save(updates: learner.Learner, folder: Path) -> None:
    checkpoints.Checkpoints(str(folder), updates.variables).save(3)


def _restore(updates: learner.Learner, folder: Path) -> None:
    if checkpoints.restore(str(folder), updates.variables, {}) is None:
        raise FileNotFoundError(folder)


def _values(updates: learner.Learner) -> dict[str, np.ndarray[Any, Any]]:
    return {key: np.array(variable.numpy()) for key, variable in updates.variables.items()}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in one if one[key].tobytes() != other[key].tobytes())
