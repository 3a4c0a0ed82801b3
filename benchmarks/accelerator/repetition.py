"""Do two steps of one configuration have equal bits, as they have on CPUs?

Gradients of convolutions, of biases and of gathered rows may add in any order on a GPU. A second
process takes TensorFlow's deterministic kernels, from its first operation on: cuDNN's choice of
kernels stays for the whole process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt
from tests import sameness

NETS = ("conv", "tied", "amoeba_d_small", "translation")


def answers(setting: Setting) -> Answers:
    """Yield the gradients that differ, of K=2, M=3 in float32 with 1F1B."""
    setting.devices(2, memory_mib=2048)
    is_deterministic = setting.part == 1
    if is_deterministic:
        tf.config.experimental.enable_op_determinism()
    for net in setting.sized(NETS[:1], NETS):
        yield f"{net}, deterministic kernels" if is_deterministic else net, attempt(_different, net)


def _different(net: str) -> dict[str, Any]:
    """Return path → largest difference, of gradients whose bits differ."""
    case = sameness.Case(net, 2, 3, "1f1b", "losses inside", "full")
    one, other = (sameness.pipelined(case, dtype="float32").gradients for _ in range(2))
    return {
        path: float(np.abs(value - other[path]).max())
        for path, value in one.items()
        if value.tobytes() != other[path].tobytes()
    }
