"""How many micro-batches `--schedule=auto` may choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lingvo_gpipe import network
from lingvo_gpipe.execution import micro_batch_dependence
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import describe
from lingvo_gpipe.task import Task

_FIRST = 2  # which M is tried first


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of micro-batches to try, rising; None: only that of the task.

    `note` says why M stays, where it is open.
    """

    numbers: tuple[int | None, ...] = (None,)
    note: str = ""

    @property
    def in_turn(self) -> tuple[int | None, ...]:
        """All of them: first 4·K·R, the paper's number, then larger ones, which need less."""
        start = min(_FIRST, len(self.numbers) - 1)
        return (*self.numbers[start:], *reversed(self.numbers[:start]))


def counts_of(task: Task.Params, *, is_measured: bool, goes_on: bool) -> Counts:
    """Return which M are tried; see `choose`."""
    model, fields = task.model, describe.fields_of(task)
    num_examples = micro_batches.batch_size(fields, model.batch_dim, model.unbatched)
    num_devices = model.num_partitions * model.num_replicas
    if not has_open_count(model) or min(num_devices, num_examples) == 1:
        return Counts()
    if goes_on:
        reason: str | None = "the run began so"
    elif not is_measured and any(_stated_costs(model)):
        reason = "costs are stated for micro-batches of one size"
    else:
        analysis = network.analyze(network.uncut(model), fields)
        reason = micro_batch_dependence.reason(analysis)
    if reason is not None:
        return Counts(note=f"M stays 1: {reason}. --num_micro_batches sets it")
    numbers = micro_batches.counts(num_examples, model.num_partitions, model.num_replicas)
    return Counts(numbers)


def has_open_count(model: network.PipelineParams) -> bool:
    """Return whether nobody has set how a mini-batch is divided."""
    return model.num_micro_batches == 1 and model.micro_batch_size is None


def _stated_costs(model: network.PipelineParams) -> Iterator[bool]:
    yield model.costs is not None
    yield from (layer.cost is not None for layer in network.layer_params(model))
