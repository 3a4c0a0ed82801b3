"""What devices send each other in a step: cells of a replica, and replicas of the pipeline.

`links` is what goes from cell to cell of one replica: values of the stream, tied weights, and
gradients back. `Exchange` is what replicas send each other: the owner of a weight sends it to each
device of the other replicas that reads it, and receives the gradient of each of them from the
device that corresponds to its own: of a table that is only gathered from, the rows that have one,
if these are fewer bytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from lingvo_gpipe import network
from lingvo_gpipe.network import replicas, wiring

INPUT = wiring.FIELD  # the source of links that carry the mini-batch's own fields


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What goes from one cell to another in a step.

    Attributes:
        source: the cell that sends it, or `INPUT`.
        target: the cell that reads it.
        forward_bytes: bytes of values, and of tied weights.
        backward_bytes: of gradients on their way back.
        names: names of values and of tied weights, in the order of the network.
        tied: paths of the tied weights that `forward_bytes` counts.
    """

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    names: tuple[str, ...]
    tied: tuple[str, ...] = ()


def links(analysis: network.Analysis) -> tuple[Link, ...]:
    """Return every link of a replica and its bytes per step.

    A value goes directly to each cell that reads it, past the cells between. What several cells of
    one device read is sent to the first of them, and cells of one device send each other nothing.
    Scalars (losses, seeds, sums of metrics) do not count.
    """
    sent: dict[tuple[int, int], list[_SentValue]] = defaultdict(list)
    # (device, version or path) → the cell of the device that it is sent to.
    receivers: dict[tuple[int, int | str], int] = {}

    def add(key: int | str, source: int, target: int, value: _SentValue) -> None:
        """Add a version of the stream, or the tied weight at a path, that a cell reads."""
        device = analysis.table.device_of(target)
        if source != INPUT and analysis.table.device_of(source) == device:
            return
        if receivers.setdefault((device, key), target) != target:
            value = value._replace(value_bytes=0, is_tied=False)
            if not value.gradient_bytes:
                return
        # Each cell's gradient comes back by itself, and is added where the value was made.
        sent[source, target].append(value)

    micro_batches = _micro_batches(analysis)
    for cell in analysis.cells:
        for v in cell.imports:
            value_bytes = sum(analysis.value_bytes(v, m) for m in micro_batches)
            gradient_bytes = 0
            if v in cell.returned_gradients:
                gradient_bytes = sum(analysis.gradient_bytes(v, m) for m in micro_batches)
            name = analysis.wiring.versions[v].name
            add(v, analysis.source(v), cell.index, _SentValue(name, value_bytes, gradient_bytes))
        for path in (*cell.weights, *cell.untrained):
            owner, spec = analysis.owner_cell(path), analysis.variables[path]
            gradient_bytes = spec.size_bytes if path in cell.weights else 0
            tied = _SentValue(path, spec.read_bytes, gradient_bytes, is_tied=True)
            add(path, owner, cell.index, tied)
    return tuple(
        Link(
            *ends,
            forward_bytes=sum(value.value_bytes for value in values),
            backward_bytes=sum(value.gradient_bytes for value in values),
            names=tuple(value.name for value in values),
            tied=tuple(value.name for value in values if value.is_tied),
        )
        for ends, values in sorted(sent.items())
    )


def _micro_batches(analysis: network.Analysis) -> range:
    """Return the micro-batches of a step of the replica that has most."""
    return replicas.shares(len(analysis.sizes), analysis.params.num_replicas)[0]


class _SentValue(NamedTuple):
    """What a link carries of one value of the stream or one tied weight."""

    name: str
    value_bytes: int
    gradient_bytes: int
    is_tied: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What one device sends to another in a step.

    Attributes:
        source: number of the device that sends it, among those of all replicas: K for each.
        target: number of the device that receives it.
        size: bytes.
    """

    source: int
    target: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """What replicas send each other in a step.

    Attributes:
        owners: path → number of the replica that owns the variable.
        num_replicas: R.
        num_devices: K.
        weights: what owners send to the devices of other replicas that read a weight.
        gradients: what the others' devices send to the owner of a weight.
    """

    owners: Mapping[str, int]
    num_replicas: int
    num_devices: int
    weights: tuple[Sent, ...]
    gradients: tuple[Sent, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a replica sends to the others, on average over the replicas."""
        return sum(sent.size for sent in (*self.weights, *self.gradients)) // self.num_replicas


def exchange(analysis: network.Analysis, owners: Mapping[str, int], num_replicas: int) -> Exchange:
    """Return what replicas send each other.

    Args:
        analysis: of the network, or of one of its replicas.
        owners: path → number of the replica that owns the variable.
        num_replicas: R.
    """
    num_micro_batches = len(_micro_batches(analysis))
    num_devices = analysis.table.num_devices
    readers: dict[str, set[int]] = {}  # path → devices of a replica
    for cell in analysis.cells:
        for path in (*cell.weights, *cell.untrained):
            readers.setdefault(path, set()).add(cell.device_number)
    weights: Counter[tuple[int, int]] = Counter()
    gradients: Counter[tuple[int, int]] = Counter()
    for path, spec in analysis.variables.items():
        home = analysis.cells[analysis.owner_cell(path)].device_number
        owner = owners[path] * num_devices + home
        gradient_bytes = replicas.sent_bytes(spec, num_micro_batches) if spec.is_trained else 0
        for other in set(range(num_replicas)) - {owners[path]}:
            first = other * num_devices
            for reader in readers.get(path, ()):
                weights[owner, first + reader] += spec.read_bytes
            if gradient_bytes:
                gradients[first + home, owner] += gradient_bytes
    sent = (
        tuple(Sent(*ends, size) for ends, size in sizes.items()) for sizes in (weights, gradients)
    )
    return Exchange(owners, num_replicas, num_devices, *sent)
