"""What devices send each other in a step: cells of a replica, and replicas of the pipeline.

`links` is what goes from cell to cell of one replica: values of the stream, tied weights, and
gradients back. `Exchange` is what replicas send each other: the owner of a weight sends it to each
device of the other replicas that reads it, and receives the gradient of each of them from the
device that corresponds to its own: of a table that is only gathered from, the rows that have one,
if these are fewer bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

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


class Exchange:
    """Bytes that replicas send each other in a step.

    Attributes:
        num_replicas: R.
        num_devices: K.
        owners: path → number of the replica that owns the variable.
    """

    def __init__(
        self, analysis: network.Analysis, owners: Mapping[str, int], num_replicas: int
    ) -> None:
        """Add up the bytes.

        Args:
            analysis: of the network of one replica.
            owners: see the class.
            num_replicas: R.
        """
        self.owners = owners
        self.num_replicas = num_replicas
        self.num_devices = analysis.table.num_devices
        # For each replica, bytes that it owns: of weights by the devices that send and read them,
        # of gradients by the device that adds them.
        self._weights: list[dict[tuple[int, int], int]] = [{} for _ in range(num_replicas)]
        self._gradients: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        device_of = [cell.device_number for cell in analysis.cells]
        readers: dict[str, set[int]] = {}
        for cell in analysis.cells:
            for path in (*cell.weights, *cell.untrained):
                readers.setdefault(path, set()).add(cell.device_number)
        for path, spec in analysis.variables.items():
            owner, home = owners[path], device_of[analysis.owner_cell(path)]
            for reader in readers.get(path, ()):
                ends = home, reader
                sizes = self._weights[owner]
                sizes[ends] = sizes.get(ends, 0) + spec.read_bytes
            if spec.is_trained:
                added = self._gradients[owner]
                size = replicas.sent_bytes(spec, len(analysis.sizes))
                added[home] = added.get(home, 0) + size

    @property
    def sent_bytes(self) -> int:
        """Bytes that a replica sends to the others, on average over the replicas."""
        return sum(transfer.size for transfer in self.sent()) // self.num_replicas

    def sent(self) -> Iterator[Sent]:
        """Yield what one device sends to a device of another replica."""
        yield from self.weights()
        yield from self.gradients()

    def weights(self) -> Iterator[Sent]:
        """Yield the weights that an owner sends to a device of another replica."""
        for owner, other in itertools.permutations(range(self.num_replicas), 2):
            owner_start, other_start = owner * self.num_devices, other * self.num_devices
            for (home, reader), size in self._weights[owner].items():
                yield Sent(owner_start + home, other_start + reader, size)

    def gradients(self) -> Iterator[Sent]:
        """Yield the gradients that a device sends to the owner."""
        for owner, other in itertools.permutations(range(self.num_replicas), 2):
            owner_start, other_start = owner * self.num_devices, other * self.num_devices
            for home, size in self._gradients[owner].items():
                yield Sent(other_start + home, owner_start + home, size)
