"""A TensorFlow operation that waits, without a core and without Python, and notes how long.

`measured_wait.cc` is compiled when it is first used, with `g++` and TensorFlow's headers, in about
ten seconds; the library is kept in `__pycache__`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

_SOURCE = Path(__file__).with_suffix(".cc")


@dataclasses.dataclass(frozen=True, slots=True)
class Waited:
    """The waits of one clock.

    Attributes:
        count: how many there were.
        mean_s: seconds of one, as measured.
    """

    count: int
    mean_s: float


class Waits:
    """The operation, and its clocks: one for each key."""

    def __init__(self) -> None:
        """Load the operation, compiled if need be."""
        import tensorflow as tf

        library = _library()
        self._operation: Any = tf.load_op_library(str(library)).measured_wait
        self._clocks: dict[Hashable, int] = {}
        self._measured = ctypes.CDLL(str(library))
        self._measured.measured_wait_ns.restype = ctypes.c_int64
        self._measured.measured_wait_count.restype = ctypes.c_int64

    def wait(self, key: Hashable, seconds: float, x: tf.Tensor) -> tf.Tensor:
        """Return `x` after `seconds`, which the clock of `key` measures."""
        clock = self._clocks.setdefault(key, len(self._clocks))
        result: tf.Tensor = self._operation(x=x, seconds=seconds, clock=clock)
        return result

    def clear(self) -> None:
        """Set every clock to zero."""
        self._measured.measured_wait_clear()

    def waited(self) -> dict[Hashable, Waited]:
        """Return what each clock has measured since then."""
        found = {}
        for key, clock in self._clocks.items():
            count = self._measured.measured_wait_count(clock)
            nanoseconds = self._measured.measured_wait_ns(clock)
            found[key] = Waited(count, nanoseconds / 1e9 / max(1, count))
        return found


def _library() -> Path:
    """Return the compiled operation, for this source and this TensorFlow."""
    import tensorflow as tf

    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    text = "\n".join([_SOURCE.read_text(encoding="utf-8"), tf.__version__, *flags])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = _SOURCE.parent / "__pycache__" / f"measured_wait-{digest}.so"
    if not library.exists():
        compiler = shutil.which("g++") or sys.exit(
            f"the waiting cells need g++, to compile {_SOURCE.name}. Install it, on Debian with: "
            "apt install g++"
        )
        library.parent.mkdir(exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-w", "-shared", "-fPIC", str(_SOURCE), "-o", str(part), *flags]
        subprocess.run(command, check=True)
        part.replace(library)  # other processes may compile it, too
    return library
