"""Replicas of the pipeline: which micro-batches each computes, and which weights each owns.

R replicas have R × K devices. M stays the number of micro-batches of the mini-batch, so that R
changes no seed and no micro-batch. Every variable has one owner among the replicas, whose device
holds the variable and its slots. The others receive its value and send their gradients, as cells
with a tied weight do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.network.params import PipelineParams

_ROW_NUMBER_BYTES = 8


def shares(num_micro_batches: int, num_replicas: int) -> tuple[range, ...]:
    """Return the micro-batches of each replica: consecutive, the first ones take one more.

    A mini-batch with fewer micro-batches than replicas leaves the last replicas without any.

    >>> shares(5, 2), shares(2, 3)
    ((range(0, 3), range(3, 5)), (range(0, 1), range(1, 2), range(2, 2)))
    """
    small, larger = divmod(num_micro_batches, num_replicas)
    ends = [r * small + min(r, larger) for r in range(num_replicas + 1)]
    return tuple(map(range, ends[:-1], ends[1:]))


def check(num_replicas: int, sizes: Sequence[int]) -> None:
    """Refuse a number of replicas that a mini-batch cannot be shared out to.

    Args:
        num_replicas: R.
        sizes: number of examples of each micro-batch.

    Raises:
        PartitionError: there is none, or one that would compute nothing.
    """
    if num_replicas < 1:
        raise errors.PartitionError(f"num_replicas={num_replicas}, but it must be at least 1")
    num_micro_batches = len(sizes)
    if num_replicas > num_micro_batches:
        way_out = "Raise num_micro_batches"
        if sum(sizes) == num_micro_batches:  # of one example each
            way_out = "Begin with a larger mini-batch"
        raise errors.PartitionError(
            f"num_replicas={num_replicas}, but a mini-batch has {num_micro_batches} "
            f"micro-batch{'es' if num_micro_batches > 1 else ''} in all, so that some replicas "
            f"would compute nothing. {way_out}, or lower num_replicas"
        )


def first_share(
    params: PipelineParams, fields: Mapping[str, SpecNest]
) -> tuple[PipelineParams, dict[str, SpecNest]]:
    """Return params and fields of a pipeline without replicas that does what the first one does.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.
    """
    sizes = micro_batches.sizes_of(params, fields)
    check(params.num_replicas, sizes)
    first = shares(len(sizes), params.num_replicas)[0]
    devices = None if params.devices is None else params.devices[: params.num_partitions]
    of_first = params.copy()
    of_first.set(num_replicas=1, num_micro_batches=len(first), devices=devices)
    num_examples = sum(sizes[m] for m in first)
    return of_first, micro_batches.resized(fields, num_examples)


def sends_rows(spec: base.VariableSpec, num_micro_batches: int) -> bool:
    """Return whether a gradient is fewer bytes as the rows that have one, each with its number."""
    return sent_bytes(spec, num_micro_batches) < spec.size_bytes


def sent_bytes(spec: base.VariableSpec, num_micro_batches: int) -> int:
    """Return the most bytes of a gradient that a replica sends to the owner.

    Of slices of a table, the most bytes of all of them are their sum: a slice sends more than its
    share where more ids are its own.

    Args:
        spec: of the weight.
        num_micro_batches: micro-batches of the replica.
    """
    if spec.gradient_rows is None or not spec.shape[0]:
        return spec.size_bytes
    rows = spec.gradient_rows * num_micro_batches
    return min(spec.size_bytes, rows * (spec.size_bytes // spec.shape[0] + _ROW_NUMBER_BYTES))


def received_bytes(spec: base.VariableSpec, num_micro_batches: int, num_replicas: int) -> int:
    """Return the most bytes of a weight's gradients that the owner receives from the others.

    Args:
        spec: of the weight.
        num_micro_batches: micro-batches of the replica that has most.
        num_replicas: R.
    """
    return (num_replicas - 1) * sent_bytes(spec, num_micro_batches) if spec.is_trained else 0


def owned_bytes(
    spec: base.VariableSpec, num_micro_batches: int, num_replicas: int, slots_per_weight: float
) -> int:
    """Return the bytes that a variable costs its owner: itself, its slots, gradients of others.

    Args:
        spec: of the variable.
        num_micro_batches: micro-batches of the replica that has most.
        num_replicas: R.
        slots_per_weight: bytes of the slots of a trained weight, in units of its own.
    """
    slots = int(slots_per_weight * spec.size_bytes) if spec.is_trained else 0
    return spec.size_bytes + slots + received_bytes(spec, num_micro_batches, num_replicas)


def owners(
    sizes: Mapping[str, int], device_of: Callable[[str], int], num_replicas: int
) -> dict[str, int]:
    """Return the replica that owns each variable, so that bytes are balanced on each device.

    Args:
        sizes: path → bytes that the variable costs its owner: see `owned_bytes`.
        device_of: number of the device, in its replica, of a variable's cell.
        num_replicas: R.

    Returns:
        Path → number of the replica. The heaviest variable that is left goes to the replica that
        has the least on that device: none has more than the mean and one variable.
    """
    filled: dict[int, list[int]] = {}
    chosen = {}
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        loads = filled.setdefault(device_of(path), [0] * num_replicas)
        chosen[path] = loads.index(min(loads))
        loads[chosen[path]] += sizes[path]
    return {path: chosen[path] for path in sizes}
