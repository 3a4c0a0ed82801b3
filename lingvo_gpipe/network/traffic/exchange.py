"""What replicas of the pipeline send each other in a step: weights, and gradients to their owners.

The owner of a weight sends it to each device of the other replicas that reads it, and receives the
gradient of each of them from the device that corresponds to its own: of a table that is only
gathered from, the rows that have one, if these are fewer bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from lingvo_gpipe import network
from lingvo_gpipe.network import replicas


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
        return sum(one.size for one in self.sent()) // self.num_replicas

    def sent(self) -> Iterator[Sent]:
        """Yield what one device sends to a device of another replica."""
        yield from self.weights()
        yield from self.gradients()

    def weights(self) -> Iterator[Sent]:
        """Yield the weights that an owner sends to a device of another replica."""
        for owner, other in itertools.permutations(range(self.num_replicas), 2):
            here, there = owner * self.num_devices, other * self.num_devices
            for (home, reader), size in self._weights[owner].items():
                yield Sent(here + home, there + reader, size)

    def gradients(self) -> Iterator[Sent]:
        """Yield the gradients that a device sends to the owner."""
        for owner, other in itertools.permutations(range(self.num_replicas), 2):
            here, there = owner * self.num_devices, other * self.num_devices
            for home, size in self._gradients[owner].items():
                yield Sent(there + home, here + home, size)
