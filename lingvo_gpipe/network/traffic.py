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

from lingvo_gpipe import nests, network
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import micro_batches, replicas, wiring

INPUT = -1  # the source of links that carry the mini-batch's own fields


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


class Stream:
    """The values that layers read and write: their bytes, and the cells that they come from."""

    def __init__(self, analysis: network.Analysis) -> None:
        self._analysis = analysis
        self._specs = {max(analysis.sizes): analysis.specs}  # of each size of micro-batch
        for size in set(analysis.sizes) - set(self._specs):
            fields = micro_batches.resized(analysis.params, analysis.fields, size)
            self._specs[size] = network.analyze(network.uncut(analysis.params), fields).specs
        self._bytes: dict[tuple[int, int, bool], int] = {}

    def value_bytes(self, version: int, micro_batch: int) -> int:
        """Return the bytes of a version of the stream in one micro-batch."""
        return self._size_bytes(version, micro_batch, floating=False)

    def gradient_bytes(self, version: int, micro_batch: int) -> int:
        """Return the bytes of its gradient, which only floating tensors have."""
        return self._size_bytes(version, micro_batch, floating=True)

    def source(self, version: int) -> int:
        """Return the cell that writes a version, or `INPUT`."""
        producer = self._analysis.wiring.versions[version].producer
        return INPUT if producer == wiring.FIELD else self._analysis.cell_of(producer)

    def is_shared(self, version: int) -> bool:
        """Return whether a version is a field that is the same in all micro-batches."""
        field = self._analysis.wiring.versions[version]
        return field.producer == wiring.FIELD and field.name in self._analysis.params.unbatched

    def _size_bytes(self, version: int, micro_batch: int, *, floating: bool) -> int:
        key = version, self._analysis.sizes[micro_batch], floating
        if key not in self._bytes:
            spec = self._specs[key[1]][version]
            self._bytes[key] = base.spec_bytes(nests.floating(spec) if floating else spec)
        return self._bytes[key]


def links(analysis: network.Analysis, stream: Stream) -> tuple[Link, ...]:
    """Return every link and its bytes per step.

    A value goes directly to each cell that reads it, past the cells between. What several cells of
    one device read is sent to the first of them, and cells of one device send each other nothing.
    Scalars (losses, seeds, sums of metrics) do not count.
    """
    sums = _Sums(analysis)
    for cell in analysis.cells:
        returned = cell.returned_gradients
        for v in cell.imports:
            # A field without a batch dimension is sent once for all micro-batches.
            counted = range(1 if stream.is_shared(v) else len(analysis.sizes))
            gradient_bytes = 0
            if v in returned:
                gradient_bytes = sum(stream.gradient_bytes(v, m) for m in counted)
            value_bytes = sum(stream.value_bytes(v, m) for m in counted)
            name = analysis.wiring.versions[v].name
            sums.add(v, name, (stream.source(v), cell.index), value_bytes, gradient_bytes)
        for path in [*cell.weights, *cell.untrained]:
            owner, spec = analysis.owner_cell(path), analysis.variables[path]
            if owner != cell.index:
                gradient_bytes = spec.size_bytes if path in cell.weights else 0
                sums.add(path, path, (owner, cell.index), spec.read_bytes, gradient_bytes)
    return sums.links()


class _Sums:
    """The bytes of each link so far."""

    def __init__(self, analysis: network.Analysis) -> None:
        self._table = analysis.table
        self._forward: dict[tuple[int, int], int] = defaultdict(int)
        self._backward: dict[tuple[int, int], int] = defaultdict(int)
        self._names: dict[tuple[int, int], list[str]] = defaultdict(list)
        self._tied: dict[tuple[int, int], list[str]] = defaultdict(list)
        # (device, version or path) → the cell of the device that it is sent to.
        self._receivers: dict[tuple[int, int | str], int] = {}

    def add(
        self,
        sent: int | str,
        name: str,
        ends: tuple[int, int],
        value_bytes: int,
        gradient_bytes: int,
    ) -> None:
        """Add a value that cell `ends[1]` reads from `ends[0]`.

        Args:
            sent: version of the stream, or path of a tied weight.
            name: name of the value.
            ends: source and target.
            value_bytes: bytes of the value.
            gradient_bytes: bytes of the gradient that comes back.
        """
        source, target = ends
        device = self._table.device_of(target)
        if source != INPUT and self._table.device_of(source) == device:
            return
        is_first = self._receivers.setdefault((device, sent), target) == target
        # Each cell's gradient comes back by itself, and is added where the value was made.
        if is_first or gradient_bytes:
            self._names[ends].append(name)
            self._forward[ends] += value_bytes if is_first else 0
            self._backward[ends] += gradient_bytes
        if is_first and isinstance(sent, str):
            self._tied[ends].append(sent)

    def links(self) -> tuple[Link, ...]:
        """Return the links, by source and target."""
        return tuple(
            Link(
                *ends,
                self._forward[ends],
                self._backward[ends],
                tuple(self._names[ends]),
                tuple(self._tied[ends]),
            )
            for ends in sorted(self._names)
        )


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
        analysis: of the network of one replica.
        owners: path → number of the replica that owns the variable.
        num_replicas: R.
    """
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
        gradient_bytes = replicas.sent_bytes(spec, len(analysis.sizes)) if spec.is_trained else 0
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
