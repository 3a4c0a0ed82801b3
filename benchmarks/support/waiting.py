"""Layers that only wait, without a core and without Python, and measure how long they did.

The wait is a TensorFlow operation, `waiting.cc`, which is compiled when it is first used, with
`g++` and TensorFlow's headers, in about ten seconds; the library is kept in `__pycache__`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest

_SOURCE = Path(__file__).with_suffix(".cc")


class Waits:
    """The operation, and a clock for each key."""

    def __init__(self) -> None:
        """Load the operation, compiled if need be."""
        library = _library()
        self._operation: Any = tf.load_op_library(str(library)).measured_wait
        self._clocks: dict[Hashable, int] = {}
        self._measured = ctypes.CDLL(str(library))
        self._measured.measured_wait_ns.restype = ctypes.c_int64
        self._measured.measured_wait_count.restype = ctypes.c_int64

    def wait(self, key: Hashable, seconds: float, x: tf.Tensor) -> tf.Tensor:
        """Return `x` after `seconds`, which the clock of `key` measures."""
        clock = self._clocks.setdefault(key, len(self._clocks))
        return self._operation(x=x, seconds=seconds, clock=clock)

    def clear(self) -> None:
        """Set every clock to zero."""
        self._measured.measured_wait_clear()

    def mean_s(self, key: Hashable, count: int) -> float:
        """Return the mean seconds of the `count` waits of a key since then."""
        clock = self._clocks[key]
        if self._measured.measured_wait_count(clock) != count:
            sys.exit(f"{key} did not wait {count} times: the figures would mean nothing")
        return float(self._measured.measured_wait_ns(clock)) / 1e9 / count


@functools.cache
def operation() -> Waits:
    """Return the operation of this process."""
    return Waits()


def _library() -> Path:
    """Return the compiled operation, for this source and this TensorFlow."""
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    text = "\n".join([_SOURCE.read_text(encoding="utf-8"), tf.__version__, *flags])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = _SOURCE.parent / "__pycache__" / f"waiting-{digest}.so"
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


class Wait(base.Layer):
    """x → x, after a while: a forward F, then the gradients of the input (I) and the weight (W).

    The keys of its clocks are its path and the phase.
    """

    class Params(base.Layer.Params):
        """Params of Wait."""

        seconds: float = hyperparams.required("Of each of F, I and W.")

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            scale = base.VariableSpec("scale", (), inputs[0].dtype, base.initializer("ones"))
            return base.Meta(inputs[0], (scale,), 1, 2)

    params: Params

    def fprop(self, theta: Any, inputs: Any, ctx: base.Context) -> Nest:
        """Return the inputs, times a weight of one."""
        wait, seconds = operation().wait, self.params.seconds

        def waited(x: tf.Tensor, scale: tf.Tensor) -> Any:
            def back(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                of_input = wait((ctx.path, "I"), seconds, dy)  # W waits after it
                of_weight = wait((ctx.path, "W"), seconds, of_input)
                return of_input * scale, tf.reduce_sum(of_weight)

            return wait((ctx.path, "F"), seconds, x * scale), back

        waiting: Any = tf.custom_gradient(waited)
        return waiting(inputs, theta["scale"])


class Sum(base.Layer):
    """x → x, and the sum of x as a loss: its gradient needs no recomputation."""

    class Params(base.Layer.Params):
        """Params of Sum."""

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            loss = base.LossSpec("loss", 1.0, lambda fields: tf.ones([], fields["x"].dtype))
            return base.Meta(inputs[0], losses=(loss,))

    params: Params

    def fprop(self, theta: Any, inputs: Any, ctx: base.Context) -> Nest:
        """Return the inputs, and add their sum as the loss."""
        del theta
        ctx.add_loss("loss", tf.reduce_sum(inputs))
        return inputs
