"""Which examples are in which mini-batch: a pure function of (seed, epoch, position).

A *unit* is the content of a row: one example, or with packing several. The units of one language
and one shape are a *stratum*. The share of its language decides how many units an epoch draws from
a stratum; at T=1 it draws each once. Draws go through the stratum repeatedly, each time in a new
order. The number that an epoch draws is the difference of two rounded running sums. So over many
epochs the shares are exact and no unit is skipped, and the number of mini-batches of an epoch is
known without planning earlier epochs.

A mini-batch has one shape: rows × length. Each shape is traced once, so their number is limited.
The last mini-batch of a shape in an epoch may have fewer units than rows.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe.console import progress
from lingvo_gpipe.tasks.mt.text import mixture

Array: TypeAlias = npt.NDArray[Any]

# Part of the key of each permutation, so that all differ.
_STRATUM, _MIX, _ORDER, _PACK = range(4)
_EPOCHS_AHEAD = 64
_CACHED_EPOCHS = 2  # so that readers on both sides of an epoch's edge do not plan in turn
_OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a mini-batch: `rows` sources and targets of `length` tokens each."""

    rows: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """Examples from which units are made.

    Attributes:
        numbers: [n] in their split.
        lengths: [n, 2] tokens of source and target, with end tokens.
        languages: [n] index of their pair of languages.
        num_languages: number of pairs of languages.
    """

    numbers: Array
    lengths: Array
    languages: Array
    num_languages: int

    @property
    def sizes(self) -> Array:
        """[num_languages] number of examples of each pair of languages."""
        return np.bincount(self.languages, minlength=self.num_languages)


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """Contents of rows, from which mini-batches are drawn.

    Attributes:
        members: numbers of the examples of all units, in the order of units.
        ends: [U] end of each unit's examples in `members`.
        languages: [U] index of the unit's pair of languages.
        shapes: shapes of mini-batches.
        shape_of: [U] index of the unit's shape.
        sizes: [languages] number of examples of each.
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
    """Return the rows of a mini-batch of `tokens` tokens, a positive multiple of `multiple_of`.

    >>> rows_of(4096, 100, multiple_of=4)
    40
    """
    return max(1, tokens // length // multiple_of) * multiple_of


def bounds(lengths: Array, count: int) -> tuple[int, ...]:
    """Return the lengths, at most `count`, to which rows are padded with the least padding.

    Computed exactly, by dynamic programming over the lengths that occur.

    >>> bounds(np.array([3, 3, 4, 9, 10]), 2)
    (4, 10)
    """
    distinct, amount = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0], np.cumsum(amount)])
    # best[j]: fewest padded tokens of the rows with the j shortest lengths, by the bounds so far.
    best = np.concatenate([[0.0], np.full(len(distinct), np.inf)])
    choices = []
    for _ in range(min(count, len(distinct))):
        # cost[i, j]: distinct[j - 1] is one more bound, for the lengths i to j - 1.
        cost = best[:, None] + (below[None, :] - below[:, None]) * np.append(0, distinct)[None, :]
        cost[np.tril_indices(len(best), -1)] = np.inf
        choices.append(cost.argmin(0))
        best = cost.min(0)
    chosen = []
    last = len(distinct)
    for choice in reversed(choices):
        if last == 0:
            break
        chosen.append(int(distinct[last - 1]))
        last = int(choice[last])
    return tuple(sorted(set(chosen)))


def by_length(examples: Examples, *, tokens: int, num_shapes: int, multiple_of: int = 1) -> Units:
    """Make each example a unit, in the shortest shape into which it fits.

    Args:
        examples: all of them.
        tokens: number of tokens of a mini-batch, with padding.
        num_shapes: maximum number of shapes.
        multiple_of: divides the number of rows.
    """
    lengths = examples.lengths.max(1)
    limits = bounds(lengths, num_shapes)
    return Units(
        members=examples.numbers,
        ends=np.arange(1, len(examples.numbers) + 1),
        languages=examples.languages,
        shapes=tuple(Shape(rows_of(tokens, limit, multiple_of), limit) for limit in limits),
        shape_of=np.searchsorted(limits, lengths),
        sizes=examples.sizes,
    )


def packed(
    examples: Examples, *, tokens: int, length: int, seed: int, multiple_of: int = 1
) -> Units:
    """Make units of as many examples of one language as fit into a row, in a random order.

    Args:
        examples: none is longer than `length`.
        tokens: number of tokens of a mini-batch, with padding.
        length: length of a row, in source and target.
        seed: seed of the order.
        multiple_of: divides the number of rows.
    """
    members, ends, languages = [], [], []
    done = 0
    with progress.Count("packing", "example", len(examples.numbers)) as bar:
        for language in range(examples.num_languages):
            places = np.flatnonzero(examples.languages == language)
            places = places[mixture.permutation(len(places), seed, _PACK, language)]
            rows = _first_fit(examples.lengths[places], length, bar)
            members.append(examples.numbers[places[np.argsort(rows, kind="stable")]])
            stops = np.cumsum(np.bincount(rows)) if len(rows) else rows
            ends.append(stops + done)
            languages.append(np.full(len(stops), language))
            done += len(places)
    of_units = np.concatenate(languages)
    return Units(
        members=np.concatenate(members),
        ends=np.concatenate(ends),
        languages=of_units,
        shapes=(Shape(rows_of(tokens, length, multiple_of), length),),
        shape_of=np.zeros(len(of_units), np.int64),
        sizes=examples.sizes,
    )


def _first_fit(lengths: Array, capacity: int, bar: progress.Count) -> Array:
    """Return the row of each example: the first open row that has room for it.

    At most `_OPEN_ROWS` rows are open. If none has room, the fullest is closed and a new one
    opened.
    """
    # Free tokens of the open rows. Lists: NumPy's calls are slower on this few rows.
    sources, targets, both, row_numbers = ([0] * _OPEN_ROWS for _ in range(4))
    rows = np.empty(len(lengths), np.int64)
    count = 0
    pairs = bar.over(zip(*lengths.T.tolist(), strict=True))
    for number, (source, target) in enumerate(pairs):
        for place, free in enumerate(sources):
            if free >= source and targets[place] >= target:
                break
        else:
            place = both.index(min(both))
            sources[place], targets[place], both[place] = capacity, capacity, 2 * capacity
            row_numbers[place] = count
            count += 1
        sources[place] -= source
        targets[place] -= target
        both[place] -= source + target
        rows[number] = row_numbers[place]
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A mini-batch.

    Attributes:
        shape: its rows and length.
        units: units of its first rows; there may be fewer units than rows.
        epoch: epoch of the mini-batch.
    """

    shape: Shape
    units: Array
    epoch: int


class BatchPlan:
    """The mini-batches of training, by their number since the start of the run.

    Threads may share it: where several replicas' mini-batches are read by one worker.
    """

    def __init__(self, units: Units, *, temperature: float, seed: int) -> None:
        """Compute the shares and strata.

        Args:
            units: to draw from.
            temperature: T of the languages' shares.
            seed: seed of every order.
        """
        self.units = units
        self.shares = mixture.probabilities(units.sizes.tolist(), temperature)
        self._seed = seed
        # How often an epoch draws an example of each language.
        rates = units.sizes.sum() * self.shares / np.maximum(units.sizes, 1)
        keys = units.shape_of * len(units.sizes) + units.languages
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.diff(keys[order])) + 1
        self._strata = np.split(order, cuts)
        firsts = np.array([stratum[0] for stratum in self._strata])
        self._stratum_shapes = units.shape_of[firsts]
        self._stratum_keys = keys[firsts]
        counts = np.array([len(stratum) for stratum in self._strata])
        self._quotas = counts * rates[units.languages[firsts]]
        self._lock = threading.Lock()
        self._before = np.zeros(1, np.int64)
        self._planned: dict[int, tuple[PlannedBatch, ...]] = {}  # the latest epochs

    def locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of mini-batch number `position`, and its place in the epoch."""
        with self._lock:
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
        """Return the number of units drawn from each stratum before each epoch, [E, strata]."""
        # The half keeps sums that are integers except for rounding (at T=1 all are) from falling.
        return np.floor(epochs[:, None] * self._quotas[None, :] + 0.5).astype(np.int64)

    def batch(self, position: int) -> PlannedBatch:
        """Return mini-batch number `position` of the run."""
        epoch, place = self.locate(position)
        return self.epoch(epoch)[place]

    def epoch(self, epoch: int) -> tuple[PlannedBatch, ...]:
        """Return the mini-batches of an epoch in order; the latest results are cached."""
        with self._lock:
            if epoch not in self._planned:
                latest = list(self._planned.items())[1 - _CACHED_EPOCHS :]
                self._planned = {**dict(latest), epoch: self._plan(epoch)}
            return self._planned[epoch]

    def _plan(self, epoch: int) -> tuple[PlannedBatch, ...]:
        edges = self._drawn_before(np.array([epoch, epoch + 1]))
        drawn: list[list[Array]] = [[] for _ in self.units.shapes]
        for number, stratum in enumerate(self._strata):
            first, last = (int(edge) for edge in edges[:, number])
            key = int(self._stratum_keys[number])
            picks = mixture.draws(len(stratum), first, last, self._seed, _STRATUM, key)
            drawn[self._stratum_shapes[number]].append(stratum[picks])
        planned = []
        for index, (shape, parts) in enumerate(zip(self.units.shapes, drawn, strict=True)):
            units = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            units = units[mixture.permutation(len(units), self._seed, _MIX, epoch, index)]
            starts = range(0, len(units), shape.rows)
            planned += [PlannedBatch(shape, units[s : s + shape.rows], epoch) for s in starts]
        order = mixture.permutation(len(planned), self._seed, _ORDER, epoch)
        return tuple(planned[number] for number in order)


def once(units: Units) -> tuple[PlannedBatch, ...]:
    """Return the mini-batches of an evaluation: every unit once, in order."""
    planned = []
    for index, shape in enumerate(units.shapes):
        of_shape = np.flatnonzero(units.shape_of == index)
        planned += [
            PlannedBatch(shape, of_shape[start : start + shape.rows], 0)
            for start in range(0, len(of_shape), shape.rows)
        ]
    return tuple(planned)
