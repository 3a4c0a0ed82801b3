"""Time and memory of a step of the largest model that fits a machine, beside its plan.

`python -m benchmarks.largest_step` finds the largest AmoebaNet-D of 18 cells at 224² (K=2) and the
largest T(L, 8192, 16) (K=4) whose training fits 16 GiB together with the program itself, by the
plan only. Then it makes two updates of each on generated mini-batches, in a process of its own, and
prints a row in Markdown. If the measured peak (VmHWM) is above 16 GiB, a model is measured that is
planned for less by the difference. All devices are CPUs of one host, so the memory of all of them
together counts.

`python -m benchmarks.largest_step translation` measures one family;
`python -m benchmarks.largest_step translation,6GiB` measures it once within another limit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 2**30
LIMIT = "16GiB"
UPDATES = 2
TRIES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Models that differ in one size.

    Attributes:
        title: in the table; {} stands for the size.
        model: registered name of a member.
        grow: the size.
        overrides: of its task, for a machine without accelerators.
    """

    title: str
    model: str
    grow: str
    overrides: tuple[str, ...]

    def member(self, value: int | None = None) -> Any:
        """Return the task of a member; None: the registered one's size."""
        from lingvo_gpipe import registry

        recipe = registry.Registry().model(self.model)()
        if value is not None:
            recipe = recipe.resized(self.grow, value)
        task = recipe.task()
        for assignment in self.overrides:
            task.override(assignment)
        return task


FAMILIES = {
    "images": Family(
        "AmoebaNet-D(18, {})",
        "image.imagenet.AmoebaNetD18x256",
        "filters",
        (
            "model.num_partitions=2",
            "model.num_micro_batches=4",
            "model.dtype=None",
            "input.batch_size=8",
        ),
    ),
    "translation": Family(
        "T({}, 8192, 16)",
        "mt.multilingual.T24x8192x16",
        "num_layers",
        (
            "model.num_partitions=4",
            "model.num_micro_batches=4",
            "input.multiple_of=4",
            "input.batch_size=2048",
            "train.accumulate=1",
        ),
    ),
}


def measure(point: str) -> dict[str, Any]:
    """Return what two updates of a family's largest member took; `point` is NAME,LIMIT."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    name, limit = point.split(",")
    family = FAMILIES[name]
    from benchmarks import memory
    from lingvo_gpipe.console import units
    from lingvo_gpipe.plan import largest
    from lingvo_gpipe.run import learner, process

    one = family.member()
    process.prepare_devices(one.model)
    program = memory.status("VmRSS")
    partitions = one.model.num_partitions
    room = units.parse_size(limit) - program
    member = largest.find(family.member, partitions, room, together=True)
    if member.value is None or member.plan is None:
        sys.exit(f"no {family.title.format('…')} fits {limit}")
    task = family.member(member.value)
    fields = task.input.instantiate().element_spec(training=True)
    learned = learner.Learner(task, fields)
    built = memory.status("VmHWM")
    batch = {field: made(field, spec) for field, spec in fields.items()}
    seconds = []
    for _ in range(UPDATES):
        start = time.monotonic()
        loss = float(learned.update([batch]).loss)
        seconds.append(time.monotonic() - start)
    return {
        "title": family.title.format(member.value),
        "parameters": member.plan.parameters,
        "partitions": partitions,
        "micro_batches": len(member.plan.analysis.sizes),
        "shape": list(batch[min(batch)].shape),
        "limit": limit,
        "planned_gib": (member.plan.together_bytes + program) / GIB,
        "built_gib": built / GIB,
        "peak_gib": memory.status("VmHWM") / GIB,
        "loss": loss,
        "first_s": seconds[0],
        "step_s": seconds[-1],
    }


def made(field: str, spec: Any) -> Any:
    """Return a field of a made mini-batch: whole rows of one segment, images of noise."""
    import tensorflow as tf

    if field == "weight" or field.endswith("_segment"):
        return tf.ones(spec.shape, spec.dtype)
    if field.endswith("_position"):
        return tf.broadcast_to(tf.range(spec.shape[1], dtype=spec.dtype), spec.shape)
    if field == "language":
        return tf.zeros(spec.shape, spec.dtype)
    if spec.dtype.is_floating:
        return tf.random.stateless_normal(spec.shape, [1, 2], dtype=spec.dtype)
    return tf.random.stateless_uniform(spec.shape, [1, 2], 4, 1000, spec.dtype)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "largest": lambda run: run["title"],
    "parameters": lambda run: f"{run['parameters']:,}",
    "K, M": lambda run: f"{run['partitions']}, {run['micro_batches']}",
    "mini-batch": lambda run: " × ".join(map(str, run["shape"])),
    "plan and program, GiB": lambda run: f"{run['planned_gib']:.2f}",
    "peak when built": lambda run: f"{run['built_gib']:.2f}",
    "peak of updates": lambda run: f"{run['peak_gib']:.2f}",
    "off by": lambda run: f"{run['peak_gib'] / run['planned_gib'] - 1.0:+.1%}",
    "first update, s": lambda run: f"{run['first_s']:.1f}",
    "second, s": lambda run: f"{run['step_s']:.1f}",
    "other load, cores": lambda run: f"{run['other_load']:.2f}",
}


def main() -> None:
    """Measure every family, or one point in this process."""
    names = sys.argv[1:] or list(FAMILIES)
    if "," in names[0]:
        print(json.dumps(measure(names[0])))
        return
    for name in names:
        if name not in FAMILIES:
            sys.exit(f"{name!r} is not a family of models. Use {' or '.join(FAMILIES)}")
    from benchmarks.support import machine, processes
    from lingvo_gpipe.console import units

    print(machine.describe())
    print(f"within {LIMIT}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    limit = units.parse_size(LIMIT)
    for name in names:
        planned_for = limit
        for _ in range(TRIES):
            point = f"{name},{planned_for}B"
            found = processes.rounds("benchmarks.largest_step", [point], 1)[point][0]
            cells = [shown(found) for shown in COLUMNS.values()]
            print(f"| {' | '.join(cells)} |", flush=True)
            over = round(found["peak_gib"] * GIB) - limit
            if over <= 0:
                break
            planned_for -= over


if __name__ == "__main__":
    main()
