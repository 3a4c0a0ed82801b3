"""Are loss, every gradient by name and every statistic those of the plain network on the same card?

Fifty points of the covering set of `tests/sameness.py` in float64, which hold every schedule and
policy, replicas, unequal micro-batches, batch norm, ties and accumulation; ten in float32 (without
TF32) and ten in bfloat16, against the plain network in float64.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt
from tests import sameness
from tests.networks import sameness_nets

# dtype → points, and how far rounding may move a gradient.
POINTS = {"float64": (50, sameness.TOLERANCE), "float32": (10, 5e-4), "mixed_bfloat16": (10, 0.05)}
_BATCH_NORM = ("conv", "recomputed")  # of a few examples, which amplifies the rounding of bfloat16
_DEVICES = 9  # most of a point: three replicas of three partitions


def cases() -> list[tuple[str, sameness.Case]]:
    """Return the points of each dtype."""
    covering = list(sameness.COVERING)
    rounded = [
        case
        for case in covering
        if case.net in sameness_nets.NETS
        if case.code_path == "losses inside" and case.accumulate == 1
    ]
    of_dtype = {
        "float64": covering,
        "float32": rounded,
        "mixed_bfloat16": [case for case in rounded if case.net not in _BATCH_NORM],
    }
    return [
        (dtype, points[n * len(points) // POINTS[dtype][0]])
        for dtype, points in of_dtype.items()
        for n in range(POINTS[dtype][0])
    ]


def answers(setting: Setting) -> Answers:
    """Yield the worst relative error of a gradient in each point."""
    setting.devices(_DEVICES, memory_mib=1024)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    points = cases()
    for dtype, case in setting.mine(setting.sized(points[15::20], points)):
        yield f"{dtype} {case}", attempt(error, case, dtype)


def error(case: sameness.Case, dtype: str) -> float:
    """Return the worst relative error of a gradient.

    Raises:
        DifferentError: something differs by more than rounding explains.
    """
    if dtype == "float64":
        return sameness.check(case)
    # Initial weights depend on their dtype: they are those of the plain network.
    pipe = sameness.build(case, dtype=dtype)
    plain = sameness.build(sameness.Case(case.net, 1, 1, "gpipe", "", "full"))
    for path, variable in pipe.by_path.items():
        variable.assign(tf.cast(plain.by_path[path], variable.dtype))
    result = pipe.value_and_gradients(sameness.NETS[case.net].fields(), step=sameness.STEP)
    gradients = {path: gradient.numpy() for path, gradient in result.gradients.items()}
    wanted = sameness.reference(case.net, case.num_micro_batches)
    return sameness.compare(
        sameness.Answer(float(result.loss), gradients, {}, None),
        dataclasses.replace(wanted, statistics={}, hits=None),
        POINTS[dtype][1],
    )
