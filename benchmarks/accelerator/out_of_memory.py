"""Does a step that lacks memory name layer, micro-batch and device, and what the plan expects?"""

from __future__ import annotations

from benchmarks.accelerator.question import Answers, Setting, attempt
from tests.lingvo_gpipe.execution import diagnosis_test


def answers(setting: Setting) -> Answers:
    """Yield the line for a second cell that asks for 14.6 TiB, which a test looks at."""
    setting.devices(2, memory_mib=2048)
    error = attempt(diagnosis_test.lack_of_memory, "learner")
    yield "line", error if isinstance(error, dict) else str(error)
