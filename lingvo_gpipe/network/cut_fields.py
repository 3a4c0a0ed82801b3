"""Fields of a mini-batch, cut into micro-batches on the devices that read them.

A device receives the examples of a replica in one piece and cuts them itself. Cut before they are
sent, every field would be a message for each micro-batch: the process that calls would send M times
as many, each of them small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import micro_batches


class CutFields:
    """Fields of consecutive micro-batches, in one piece or several."""

    def __init__(
        self,
        pieces: Sequence[Mapping[int, Nest]],
        sizes: Sequence[Sequence[int]],
        batch_dim: int,
        unbatched: Collection[int],
    ) -> None:
        """Make it.

        Args:
            pieces: for each, version of a field → nest of tensors [N, …].
            sizes: for each piece, the number of examples of each of its micro-batches; their sum
                is N.
            batch_dim: which dimension counts examples.
            unbatched: versions of fields that every micro-batch receives whole.
        """
        self._pieces = pieces
        self._sizes = sizes
        self._batch_dim = batch_dim
        self._unbatched = unbatched

    def piece(self, number: int) -> CutFields:
        """Return one of the pieces as fields of its own micro-batches."""
        own = slice(number, number + 1)
        return CutFields(self._pieces[own], self._sizes[own], self._batch_dim, self._unbatched)

    def of_version(self, version: int) -> list[Nest]:
        """Cut a field on the current device; return its nest for each micro-batch."""
        found: list[Nest] = []
        for piece, sizes in zip(self._pieces, self._sizes, strict=True):
            if version in self._unbatched:
                found += [piece[version]] * len(sizes)
            else:
                found += micro_batches.split(piece[version], sizes, self._batch_dim)
        return found

    def __contains__(self, version: int) -> bool:
        """Return whether a version is one of the fields."""
        return version in self._pieces[0]
