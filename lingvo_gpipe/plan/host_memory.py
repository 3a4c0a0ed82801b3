"""Whether a step fits into the memory of this machine, which all logical CPU devices share.

The system ends a process that takes more without a message, so a line comes before.
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.plan.machine_memory import MachineMemory
from lingvo_gpipe.task import Task, groups_of

_SURELY_TOO_MUCH = 2.0
"""A step that is planned to need this many times the memory does not fit: plans are more exact."""


def warning(
    task: Task.Params, fields: Mapping[str, SpecNest], memory: MachineMemory | None, *, refuse: bool
) -> str | None:
    """Return a line for the user where a step may not fit; None: it fits.

    Args:
        task: params of the task.
        fields: fields of its mini-batch, name → nest of `tf.TensorSpec`.
        memory: of the machine; None: unknown, and nothing is said.
        refuse: whether what is planned to need twice the memory is refused; what surely needs more
            always is.

    Raises:
        DeviceError: the step cannot fit.
    """
    if memory is None:
        return None
    groups = groups_of(task, fields)
    analysis = network.analyze(groups.params, groups.fields)
    if _at_most(analysis) <= memory.available_bytes:
        return None
    averages = task.train.average is not None
    plan = step_plan.make(
        groups.params,
        groups.fields,
        optimizer_params=task.train.optimizer,
        averages=averages,
        accumulate=task.train.accumulate * groups.count,
    )
    slots = step_plan.slot_bytes(analysis.variables, task.train.optimizer, averages=averages)
    kept = sum(slots.values()) + sum(spec.size_bytes for spec in analysis.variables.values())
    # The first counts the heaviest replica for all, the second the peak of each device at once.
    step = min(task.model.num_replicas * plan.together_bytes, sum(plan.device_bytes))
    there = f"this {'control group' if memory.is_group else 'machine'}"
    way_out = (
        "--mode=plan shows what needs it; a smaller model or input.batch_size, more micro-batches "
        "or --recompute=full need less"
    )
    if kept > memory.total_bytes:
        raise errors.DeviceError(
            f"{task.name or 'the model'} needs {units.size(kept)} for its variables and optimizer "
            f"slots alone, and {there} has {units.size(memory.total_bytes)}. A smaller model needs "
            "less, or workers on more machines"
        )
    has = f"{there} has {units.size(memory.total_bytes)}, {units.size(memory.available_bytes)} free"
    if refuse and step > _SURELY_TOO_MUCH * memory.total_bytes:
        raise errors.DeviceError(
            f"a step of {task.name or 'the model'} is planned to need {units.size(step)}, and {has}"
            f". {way_out[0].upper()}{way_out[1:]}"
        )
    if step > memory.available_bytes:
        return (
            f"a step is planned to need {units.size(step)}, and {has}: if that does not suffice, "
            f"the system ends the run without a message. {way_out}"
        )
    return None


def _at_most(analysis: network.Analysis) -> int:
    """Return a rough bound of the bytes of a step, as if nothing were freed while it lasts."""
    variables = sum(spec.size_bytes for spec in analysis.variables.values())
    kept = sum(
        layer.meta.activation_bytes + 2 * base.spec_bytes(layer.meta.outputs)
        for layer in analysis.layers
    )
    return 8 * analysis.params.num_replicas * variables + 2 * len(analysis.sizes) * kept
