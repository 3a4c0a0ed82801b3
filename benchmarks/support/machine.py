"""What a benchmark prints about the machine: its cores, and how busy other processes kept them."""

from __future__ import annotations

import os
import platform
import time


class Load:
    """Samples how many cores other processes used between `start` and `stop`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin (again)."""
        self._wall, self._all, self._this = _now()

    def stop(self) -> float:
        """Return the cores that others used since `start`, on average."""
        wall, everyone, this = _now()
        return max(0.0, ((everyone - self._all) - (this - self._this)) / (wall - self._wall))


def _now() -> tuple[float, float, float]:
    """Return wall time, CPU seconds of all processes, and of this one and its ended children."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(part) for part in file.readline().split()[1:]]
    busy = sum(ticks[:3]) + sum(ticks[5:8])  # user, nice, system, irq, softirq, steal
    times = os.times()
    this = times.user + times.system + times.children_user + times.children_system
    return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), this


def describe() -> str:
    """Return one line about the machine."""
    import keras
    import tensorflow as tf

    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
