"""Which examples are in which mini-batch: a pure function of (seed, epoch, position).

What is drawn is a *unit*: one example, or some that share a row (packing). Units of one language
and one shape are a *stratum*. An epoch draws from each stratum as often as its language's share
asks (at T=1 each unit once), pass after pass over the stratum, each pass in an order of its own;
what an epoch draws is the difference of two rounded sums, so that over epochs no unit is left
behind, and the number of mini-batches of an epoch is known without planning those before it.

A mini-batch has one shape: rows × length. There are at most as many shapes as asked for, since
each is traced once. The last mini-batch of a shape in an epoch may lack rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_gpipe import errors
from lingvo_gpipe.console import progress
from lingvo_gpipe.tasks.mt.text import mixture

Array = np.ndarray[Any, Any]

# What the keys of permutations are for, so that no two are the same.
_STRATUM, _MIX, _ORDER, _PACK = range(4)
_EPOCHS_AHEAD = 64
_OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of a mini-batch: `rows` of `length` tokens on either side."""

    rows: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """What mini-batches are made of.

    Attributes:
        members: numbers of examples, unit after unit.
        ends: [U] where the members of each unit end.
        languages: [U] index of the unit's pair of languages.
        shapes: shapes of mini-batches.
        shape_of: [U] index of the unit's shape.
        sizes: [languages] examples of each.
    """

    members: Array
    ends: Array
    languages: Array
    shapes: tuple[Shape, ...]
    shape_of: Array
    sizes: Array

    def of(self, unit: int) -> Array:
        """Return the numbers of a unit's examples."""
        return self.members[self.ends[unit - 1] if unit else 0 : self.ends[unit]]


def rows_of(tokens: int, length: int, multiple_of: int = 1) -> int:
    """Return how many rows of `length` a mini-batch of `tokens` has: a multiple, and at least one.

    >>> rows_of(4096, 100, multiple_of=4)
    40
    """
    return max(1, tokens // length // multiple_of) * multiple_of


def bounds(lengths: Array, count: int) -> tuple[int, ...]:
    """Return at most `count` lengths that rows are padded to, with the fewest padded tokens.

    Exact, by dynamic programming over the lengths that occur.

    >>> bounds(np.array([3, 3, 4, 9, 10]), 2)
    (4, 10)
    """
    there, amount = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0], np.cumsum(amount)])
    # best[j]: least padded length of the j shortest lengths, with the bounds so far.
    best = np.concatenate([[0.0], np.full(len(there), np.inf)])
    choices = []
    for _ in range(min(count, len(there))):
        # One more bound, there[j - 1], for all lengths from number i on.
        cost = best[:, None] + (below[None, :] - below[:, None]) * np.append(0, there)[None, :]
        cost[np.tril_indices(len(best), -1)] = np.inf
        choices.append(cost.argmin(0))
        best = cost.min(0)
    found = []
    last = len(there)
    for choice in reversed(choices):
        if last == 0:
            break
        found.append(int(there[last - 1]))
        last = int(choice[last])
    return tuple(sorted(set(found)))


def by_length(
    numbers: Array,
    lengths: Array,
    languages: Array,
    num_languages: int,
    *,
    tokens: int,
    num_shapes: int,
    multiple_of: int = 1,
) -> Units:
    """Make every example a unit, in the shape of the least length that holds it.

    Args:
        numbers: [n] of examples.
        lengths: [n] tokens of their longer side, end mark included.
        languages: [n] index of their pair of languages.
        num_languages: how many there are.
        tokens: of a mini-batch, padding included.
        num_shapes: at most.
        multiple_of: divides the number of rows.
    """
    limits = bounds(lengths, num_shapes)
    return Units(
        members=numbers,
        ends=np.arange(1, len(numbers) + 1),
        languages=languages,
        shapes=tuple(Shape(rows_of(tokens, limit, multiple_of), limit) for limit in limits),
        shape_of=np.searchsorted(limits, lengths),
        sizes=np.bincount(languages, minlength=num_languages),
    )


def packed(
    numbers: Array,
    lengths: Array,
    languages: Array,
    num_languages: int,
    *,
    tokens: int,
    length: int,
    seed: int,
    multiple_of: int = 1,
) -> Units:
    """Make rows that hold as many examples of one language as fit, in an order drawn once.

    Args:
        numbers: [n] of examples.
        lengths: [n, 2] tokens of source and target, end marks included; none over `length`.
        languages: [n] index of their pair of languages.
        num_languages: how many there are.
        tokens: of a mini-batch, padding included.
        length: of a row, on either side.
        seed: of the order.
        multiple_of: divides the number of rows.
    """
    members, ends, of_language = [], [], []
    done = 0
    with progress.Count("packing", "example", len(numbers)) as bar:
        for language in range(num_languages):
            own = np.flatnonzero(languages == language)
            own = own[mixture.permutation(len(own), seed, _PACK, language)]
            rows = _first_fit(lengths[own], length, bar)
            members.append(numbers[own[np.argsort(rows, kind="stable")]])
            stops = np.cumsum(np.bincount(rows)) if len(rows) else rows
            ends.append(stops + done)
            of_language.append(np.full(len(stops), language))
            done += len(own)
    where = np.concatenate(of_language)
    return Units(
        members=np.concatenate(members),
        ends=np.concatenate(ends),
        languages=where,
        shapes=(Shape(rows_of(tokens, length, multiple_of), length),),
        shape_of=np.zeros(len(where), np.int64),
        sizes=np.bincount(languages, minlength=num_languages),
    )


def _first_fit(lengths: Array, capacity: int, bar: progress.Count) -> Array:
    """Return the row of each example: the first that it fits into, of those not closed yet.

    At most `_OPEN_ROWS` are open; where none takes an example, the fullest is closed.
    """
    # Lists: on so few rows NumPy's calls would take several times as long.
    sources, targets, both, names = ([0] * _OPEN_ROWS for _ in range(4))
    found = np.empty(len(lengths), np.int64)
    count = 0
    sides = bar.over(zip(*lengths.T.tolist(), strict=True))
    for number, (source, target) in enumerate(sides):
        for place, free in enumerate(sources):
            if free >= source and targets[place] >= target:
                break
        else:
            place = both.index(min(both))
            sources[place], targets[place], both[place] = capacity, capacity, 2 * capacity
            names[place] = count
            count += 1
        sources[place] -= source
        targets[place] -= target
        both[place] -= source + target
        found[number] = names[place]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A mini-batch.

    Attributes:
        shape: its rows and length.
        units: that fill its first rows; there may be fewer than rows.
        epoch: that it belongs to.
    """

    shape: Shape
    units: Array
    epoch: int

    def replica(self, index: int, count: int) -> Planned:
        """Return the part of replica `index` of `count`: consecutive rows.

        Raises:
            InputError: the rows do not divide.
        """
        if self.shape.rows % count:
            raise errors.InputError(
                f"{self.shape.rows} rows do not divide among {count} replicas. Set "
                f"input.multiple_of={count}"
            )
        rows = self.shape.rows // count
        own = self.units[index * rows : (index + 1) * rows]
        return Planned(Shape(rows, self.shape.length), own, self.epoch)


class Plan:
    """The mini-batches of training, by their number since the run began."""

    def __init__(
        self, units: Units, *, temperature: float, seed: int, epoch_examples: int | None = None
    ) -> None:
        """Plan.

        Args:
            units: what is drawn.
            temperature: T of the languages' shares.
            seed: of every order.
            epoch_examples: drawn in an epoch; None: as many as there are.
        """
        self.units = units
        self.shares = mixture.probabilities(units.sizes.tolist(), temperature)
        self._seed = seed
        total = int(units.sizes.sum()) if epoch_examples is None else epoch_examples
        # How often an example of each language is drawn in an epoch.
        rates = total * self.shares / np.maximum(units.sizes, 1)
        keys = units.shape_of * len(units.sizes) + units.languages
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        self._strata = np.split(order, cuts)
        firsts = np.array([stratum[0] for stratum in self._strata])
        self._stratum_shapes = units.shape_of[firsts]
        self._stratum_keys = keys[firsts]
        counts = np.array([len(stratum) for stratum in self._strata])
        self._quotas = counts * rates[units.languages[firsts]]
        if not self._quotas.sum() >= 1:
            raise errors.InputError(f"an epoch of {total} examples draws none. Use more")
        self._before = np.zeros(1, np.int64)
        self._planned: tuple[int, tuple[Planned, ...]] | None = None

    def locate(self, position: int) -> tuple[int, int]:
        """Return (epoch, place in it) of mini-batch number `position`."""
        while self._before[-1] <= position:
            first = len(self._before) - 1
            sizes = self.epoch_sizes(first, first + _EPOCHS_AHEAD)
            self._before = np.append(self._before, self._before[-1] + np.cumsum(sizes))
        epoch = int(np.searchsorted(self._before, position, "right")) - 1
        return epoch, position - int(self._before[epoch])

    def epoch_sizes(self, first: int, last: int) -> Array:
        """Return the numbers of mini-batches of epochs first … last − 1."""
        edges = self._drawn_before(np.arange(first, last + 1))
        drawn = np.zeros((last - first, len(self.units.shapes)), np.int64)
        np.add.at(drawn.T, self._stratum_shapes, np.diff(edges, axis=0).T)
        rows = np.array([shape.rows for shape in self.units.shapes])
        return (-(-drawn // rows)).sum(1)

    def _drawn_before(self, epochs: Array) -> Array:
        """Return how many units of each stratum were drawn before each epoch, [E, strata]."""
        # The half keeps sums that are whole but for rounding, as all are at T=1, from falling.
        return np.floor(epochs[:, None] * self._quotas[None, :] + 0.5).astype(np.int64)

    def batch(self, position: int) -> Planned:
        """Return mini-batch number `position` of the run."""
        epoch, place = self.locate(position)
        return self.epoch(epoch)[place]

    def epoch(self, epoch: int) -> tuple[Planned, ...]:
        """Return the mini-batches of an epoch in their order; the last one asked for is kept."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._plan(epoch))
        return self._planned[1]

    def _plan(self, epoch: int) -> tuple[Planned, ...]:
        edges = self._drawn_before(np.array([epoch, epoch + 1]))
        drawn: list[list[Array]] = [[] for _ in self.units.shapes]
        for number, stratum in enumerate(self._strata):
            first, last = (int(edge) for edge in edges[:, number])
            key = int(self._stratum_keys[number])
            picks = mixture.draws(len(stratum), first, last, self._seed, _STRATUM, key)
            drawn[self._stratum_shapes[number]].append(stratum[picks])
        found = []
        for index, (shape, parts) in enumerate(zip(self.units.shapes, drawn, strict=True)):
            units = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            units = units[mixture.permutation(len(units), self._seed, _MIX, epoch, index)]
            starts = range(0, len(units), shape.rows)
            found += [Planned(shape, units[s : s + shape.rows], epoch) for s in starts]
        order = mixture.permutation(len(found), self._seed, _ORDER, epoch)
        return tuple(found[number] for number in order)


def once(units: Units) -> tuple[Planned, ...]:
    """Return mini-batches with every unit once, in order: an evaluation."""
    found = []
    for index, shape in enumerate(units.shapes):
        own = np.flatnonzero(units.shape_of == index)
        found += [
            Planned(shape, own[start : start + shape.rows], 0)
            for start in range(0, len(own), shape.rows)
        ]
    return tuple(found)


def fill(lengths: Array, units: Units, planned: Sequence[Planned]) -> float:
    """Return the share of rows × length, both sides, that holds tokens and no padding.

    Args:
        lengths: [N, 2] of all examples, end marks included.
        units: that were planned.
        planned: mini-batches.
    """
    sums = np.cumsum(lengths[units.members].sum(1))
    of_units = np.diff(sums[units.ends - 1], prepend=0)
    held = sum(int(of_units[batch.units].sum()) for batch in planned)
    places = sum(2 * batch.shape.rows * batch.shape.length for batch in planned)
    return held / places if places else 1.0
