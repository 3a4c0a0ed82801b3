"""Where a question is asked, and what several of them need.

The module of a question's name has a function `answers(setting)`, which yields each answer as soon
as it is known: its name, and numbers, texts, lists or dictionaries of them.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

Answers: TypeAlias = "Iterator[tuple[str, Any]]"
_T = TypeVar("_T")
MIB = 2**20
_CONTEXTS_MIB = 6 * 1024  # of the card, for contexts of processes and for libraries


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Where a question is asked.

    Attributes:
        cpu: on logical CPU devices at toy size, to test the question itself.
        folder: for files of the question.
        part: number of this process.
        parts: number of processes that share the cases.
        torch_python: an interpreter that has PyTorch.
    """

    cpu: bool
    folder: Path
    part: int = 0
    parts: int = 1
    torch_python: str = "python3"

    def sized(self, toy: _T, full: _T) -> _T:
        """Return the size for CPUs or that for an accelerator."""
        return toy if self.cpu else full

    def mine(self, cases: Sequence[_T]) -> Sequence[_T]:
        """Return this process's share of the cases."""
        return cases[self.part :: self.parts]

    def devices(self, count: int, memory_mib: int | None = None) -> list[str]:
        """Split the card, or the CPU, into logical devices; return their names.

        Call it before TensorFlow's first operation.

        Args:
            count: number of devices.
            memory_mib: memory of each; None: equal shares of the card.
        """
        import tensorflow as tf

        from lingvo_gpipe.execution import placement

        if self.cpu:
            placement.prepare_logical_cpus(count)
        else:
            each = tf.config.LogicalDeviceConfiguration(memory_mib or usable_mib() // count)
            gpu = tf.config.list_physical_devices("GPU")[0]
            tf.config.set_logical_device_configuration(gpu, [each] * count)
        kind = "CPU" if self.cpu else "GPU"
        names = [placement.short(device.name) for device in tf.config.list_logical_devices(kind)]
        return names[:count]

    def reset_peaks(self, devices: Sequence[str]) -> None:
        """Let the peaks of memory of these devices begin now."""
        import tensorflow as tf

        for device in devices if not self.cpu else ():
            tf.config.experimental.reset_memory_stats(device.removeprefix("/device:"))

    def counted_mib(self, devices: Sequence[str], figure: str = "peak") -> list[float]:
        """Return the MiB that TensorFlow counts on each device, `current` or `peak`; CPUs: 0."""
        import tensorflow as tf

        if self.cpu:
            return [0.0] * len(devices)
        names = [device.removeprefix("/device:") for device in devices]
        return [tf.config.experimental.get_memory_info(name)[figure] / MIB for name in names]


def card(fields: str) -> str:
    """Return what the driver says of the first card, such as "name" or "memory.total"."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return told.splitlines()[0]


def usable_mib() -> int:
    """Return the memory of the card that tensors may take, in MiB."""
    return int(card("memory.total")) - _CONTEXTS_MIB


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, or the traceback with which it fails."""
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001 (the next case is tried all the same)
        return {"error": traceback.format_exc()}


def median_s(step: Callable[[], float], least_s: float) -> float:
    """Return the median seconds of a step; three before do not count, since they compile.

    Args:
        step: brings its result to the host, behind which a GPU runs.
        least_s: seconds that all steps take together, at least; there are five or more.
    """
    for _ in range(3):
        step()
    times: list[float] = []
    while len(times) < 5 or sum(times) < least_s:
        begun_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun_s)
    return sorted(times)[len(times) // 2]
