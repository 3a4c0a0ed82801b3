"""Translation by a model that is spread over devices: each token is one sweep over the cells.

The cells are those of training. Weights and caches of a cell stay on its device. For each token a
cell receives what its layers read: ids, or one position of an earlier cell's output. When beam
search reorders hypotheses, the new order is sent with the token as an index, and each cell gathers
its caches by it. Each replica has as many groups of sentences as cells, so all devices are busy.
When a group is done, the next one takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lingvo_gpipe import pipelining, task
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.run import log_directory, restoring
from lingvo_gpipe.schedule.table import forward_table
from lingvo_gpipe.tasks.mt.decoding import incremental, search
from lingvo_gpipe.tasks.mt.decoding.candidates import Shortlist
from lingvo_gpipe.tasks.mt.decoding.decoding_cell import Choice, DecodingCell
from lingvo_gpipe.tasks.mt.decoding.incremental import Caches, DecodingPart, LayerThetas
from lingvo_gpipe.tasks.mt.decoding.search import Decode, SearchState
from lingvo_gpipe.tasks.mt.text.vocabulary import END, PAD, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.input import Translation
    from lingvo_gpipe.tasks.mt.task import TranslationTask

Ids: TypeAlias = npt.NDArray[np.int32]


class _Group(NamedTuple):
    """Sentences that are translated together; a nest of tensors.

    Attributes:
        caches: caches of each cell.
        state: state of the search.
        tokens: [rows · beam], the latest of each hypothesis.
        parents: [rows · beam], the row that each hypothesis continues.
    """

    caches: tuple[Caches, ...]
    state: SearchState
    tokens: tf.Tensor
    parents: tf.Tensor


class _Weights(NamedTuple):
    """The weights of all cells, as their layers read them.

    Attributes:
        begin: for each cell, the layers that `begin` runs.
        extend: for each cell, the layers that `extend` runs.
    """

    begin: Sequence[LayerThetas]
    extend: Sequence[LayerThetas]


@dataclasses.dataclass(slots=True)
class _Running:
    """A group of sentences that is being translated.

    Attributes:
        replica: the replica that does it.
        numbers: numbers of its sentences.
        group: what is kept between tokens.
        is_over: whether its search is over.
    """

    replica: int
    numbers: list[int]
    group: _Group
    is_over: bool = False


class Translator:
    """A built pipeline that translates.

    Attributes:
        cut: number of translations so far that ended because they reached their limit of tokens.
    """

    def __init__(
        self,
        pipe: pipelining.PipeliningLayer,
        params: Decode,
        *,
        max_length: int,
        controls: int = 0,
    ) -> None:
        """Prepare the programs; each translation reads the weights at its start.

        Args:
            pipe: built; decoding uses its cells, devices and variables.
            params: settings.
            max_length: longest source for which shapes are planned; longer ones get more shapes.
            controls: see `search.begin`.

        Raises:
            UserError: `params` are out of range, or the network cannot compute token by token.
        """
        search.check(params)
        self._params = params
        self._search = params.search
        self._controls = controls
        self._pipe = pipe
        self._analysis = pipe.analysis
        shortlist = Shortlist(2 * params.search.beam, controls)
        layers = incremental.decoding_layers(pipe.analysis, shortlist)
        parts = [
            DecodingPart(layers[n] for n in cell.layers if n in layers)
            for cell in pipe.analysis.cells
        ]
        self._devices = pipe.executor.devices  # of each replica
        self._cells = [
            DecodingCell(part, parts[k + 1 :], params.search) for k, part in enumerate(parts)
        ]
        self._last = max(k for k, cell in enumerate(self._cells) if cell.extends)
        halves = (-(-max_length // 2**n) for n in range(params.num_shapes))
        self._spans = sorted(set(halves))
        self.cut = 0
        self._read = outer_function.OuterFunction(self._read_weights)
        self._begins = [
            outer_function.OuterFunction(functools.partial(self._begin_group, replica))
            for replica in range(len(self._devices))
        ]
        self._sweep = outer_function.OuterFunction(self._sweep_groups)

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        progress: Callable[[int], object] = lambda _: None,
    ) -> list[list[int]]:
        """Translate sentences; those of similar length form a group.

        Args:
            sources: ids of each, ending in </s>.
            progress: called after every token with the number of sentences that it finished.

        Returns:
            The ids of each translation, in the order of `sources`, without <s> and </s>.
        """
        translations: list[list[int]] = [[] for _ in sources]
        # Once, not for every token, because in mixed precision reading copies.
        weights = [_Weights(*of_replica) for of_replica in self._read()]
        for span, chunks in self._planned(sources):
            for numbers, ids in self._run(weights, span, chunks, sources, progress):
                for number, row in zip(numbers, ids, strict=False):
                    translations[number] = _trimmed(row)
                    self.cut += END not in row
        return translations

    def _planned(self, sources: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield each length to which sources are padded, with its groups of sentence numbers."""
        order = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
        chunks: list[tuple[int, list[int]]] = []
        start = 0
        while start < len(order):
            span = self._span(len(sources[order[start]]))
            end = start + self._rows(len(sources), span)
            chunks.append((span, order[start:end]))
            start = end
        for span, of_span in itertools.groupby(chunks, lambda chunk: chunk[0]):
            yield span, [numbers for _, numbers in of_span]

    def _rows(self, count: int, span: int) -> int:
        """Return the rows of a group: the batch size, or a power of two for few sentences.

        A group with sentences longer than planned has fewer rows, so that it has as many tokens as
        a batch: all its sentences are padded to the longest.
        """
        rows = min(self._params.batch, 1 << max(count - 1, 0).bit_length())
        return max(1, min(rows, self._params.batch * self._spans[-1] // span))

    def _span(self, length: int) -> int:
        """Return the length to which a source is padded."""
        longest = self._spans[-1]
        return next((n for n in self._spans if n >= length), -(-length // longest) * longest)

    def _run(
        self,
        weights: Sequence[_Weights],
        span: int,
        waiting: list[list[int]],
        sources: Sequence[Sequence[int]],
        progress: Callable[[int], object],
    ) -> Iterator[tuple[list[int], Ids]]:
        """Yield the numbers and the translated ids of each group when it is done."""
        rows = self._rows(len(sources), span)
        replicas = range(len(weights))
        places = self._params.groups or len(replicas) * len(self._cells)
        running: list[_Running] = []
        while True:
            live = sum(not entry.is_over for entry in running)
            # A finished group stays until another takes its place, or until half of all groups are
            # finished, because a sweep over another number of groups needs another trace.
            if waiting or 2 * live <= len(running):
                running = [entry for entry in running if not entry.is_over]
            while waiting and len(running) < places:
                numbers = waiting.pop(0)
                ids = _padded([sources[number] for number in numbers], rows, span)
                busy = [entry.replica for entry in running]
                replica = min(replicas, key=busy.count)
                group = self._begins[replica](weights[replica].begin, tf.constant(ids))
                running.append(_Running(replica, numbers, group))
            if not running:
                return
            running.sort(key=lambda entry: entry.replica)
            groups, ends = self._sweep(
                [of_replica.extend for of_replica in weights],
                [tuple(entry.group for entry in running if entry.replica == r) for r in replicas],
            )
            finished = 0
            for entry, group, is_over in zip(running, groups, ends.numpy().tolist(), strict=True):
                entry.group = group
                if is_over and not entry.is_over:
                    entry.is_over = True
                    ids, _ = search.finish(group.state)
                    yield entry.numbers, ids.numpy()
                    finished += len(entry.numbers)
            progress(finished)

    def _begin_group(
        self, replica: int, weights: Sequence[LayerThetas], source: tf.Tensor
    ) -> _Group:
        """Encode sources [rows, S]: the outer function of a group of a replica."""
        settings, (rows, span) = self._search, source.shape
        length = settings.max_length
        if settings.max_extra is not None:
            length = min(length, span + settings.max_extra)
        stream: dict[str, tf.Tensor] = {"source": source}
        caches = []
        devices = self._devices[replica]
        for cell, theta, device in zip(self._cells, weights, devices, strict=True):
            with tf.device(device):
                inputs = {name: stream[name] for name in cell.part.begin_reads}
                cell_caches, outputs = cell.begin(theta, inputs, rows * settings.beam, length)
            stream |= outputs
            caches.append(cell_caches)
        with tf.device(devices[self._last]):
            state = search.begin(
                rows,
                settings,
                limits=search.limits_of(settings, source),
                controls=self._controls,
                length=length,
            )
        return _Group(tuple(caches), state, *search.first_tokens(rows, settings))

    def _sweep_groups(
        self,
        weights: Sequence[Sequence[LayerThetas]],
        groups: Sequence[tuple[_Group, ...]],
    ) -> tuple[list[_Group], tf.Tensor]:
        """Add a token to all hypotheses of all replicas: the outer function of a token."""
        extended, over = [], []
        for replica, of_replica in enumerate(groups):
            if of_replica:
                ours, ends = self._sweep_replica(replica, weights[replica], of_replica)
                extended += ours
                over += ends
        return extended, tf.stack(over)

    def _sweep_replica(
        self, replica: int, weights: Sequence[LayerThetas], groups: Sequence[_Group]
    ) -> tuple[list[_Group], list[tf.Tensor]]:
        """Return the groups of a replica with one more token, and whether each search is over."""
        table = forward_table(self._analysis.table, len(groups))
        streams = [{"target": group.tokens[:, tf.newaxis]} for group in groups]
        caches = [list(group.caches) for group in groups]
        choices: dict[int, Choice] = {}
        over: dict[int, tf.Tensor] = {}
        previous: dict[int, list[tf.Operation]] = {}
        for device, slot in table.order():
            cell, m = self._cells[slot.cell], slot.micro_batch
            if not cell.extends:
                continue
            place = self._devices[replica][slot.cell]
            with tf.device(place), tf.control_dependencies(previous.get(device, [])):
                inputs = {name: streams[m][name] for name in cell.part.extend_reads}
                common = (weights[slot.cell], caches[m][slot.cell], groups[m].parents, inputs)
                if slot.cell == self._last:
                    caches[m][slot.cell], choices[m], over[m] = cell.choose(
                        *common, groups[m].state
                    )
                    last = over[m]
                else:
                    caches[m][slot.cell], outputs = cell.extend(*common)
                    streams[m] |= outputs
                    last = tf.nest.flatten(outputs)[0]
            previous[device] = [last.op]
        extended = [_Group(tuple(caches[m]), *choices[m]) for m in range(len(groups))]
        return extended, [over[m] for m in range(len(groups))]

    def _read_weights(self) -> list[tuple[list[LayerThetas], list[LayerThetas]]]:
        """Read the weights; return, for each replica and cell, those for begin and extend."""
        weights = self._pipe.executor.variables.read()
        of_replicas = []
        for devices in self._devices:
            begins, extends = [], []
            for cell, device in zip(self._cells, devices, strict=True):
                with tf.device(device):  # those of other owners are sent once, not with each token
                    theta = tf.nest.map_structure(tf.identity, cell.part.read(weights))
                begins.append({name: theta[name] for name in cell.part.begin_layers})
                extends.append({name: theta[name] for name in cell.part.extend_layers})
            of_replicas.append((begins, extends))
        return of_replicas


def _padded(sources: Sequence[Sequence[int]], rows: int, span: int) -> Ids:
    """Return ids [rows, span] of sentences; 0 after their ends and in the other rows."""
    ids = np.zeros((rows, span), np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    return ids


def notes(cut: int) -> Iterator[str]:
    """Yield a line about translations that were cut, if there are any.

    Args:
        cut: their number.
    """
    if cut:
        yield (
            f"{cut} translations reached their limit of tokens and end there: "
            "decode.search.max_length and decode.search.max_extra set it"
        )


def _trimmed(row: Ids) -> list[int]:
    """Return ids up to </s> or padding."""
    ends = np.flatnonzero((row == END) | (row == PAD))
    translation: list[int] = row[: ends[0] if len(ends) else None].tolist()
    return translation


class Decoder(Translator):
    """Translates with the model of a checkpoint, spread over its devices.

    Attributes:
        vocabulary: vocabulary of the run.
        target_tokens: whether its sources begin with <2xx>.
        max_length: maximum number of source tokens, with </s>, for which the model was made.
        step: number of updates of the checkpoint.
    """

    def __init__(
        self,
        params: TranslationTask.Params,
        *,
        logdir: Path | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Build the network and restore its weights, or their averages if training keeps them.

        Args:
            params: params of the task.
            logdir: log directory of the run whose newest checkpoint is used.
            checkpoint: path of another checkpoint, or of a directory of them.

        Raises:
            UserError: there is no such checkpoint, it does not fit, or neither the run's vocabulary
                nor its data exist.
        """
        search.check(params.decode)
        source = cast("Translation", log_directory.source(params, logdir=logdir, which=checkpoint))
        completed = task.complete(params, source)
        self.vocabulary: Vocabulary = source.vocabulary
        self.target_tokens: bool = source.target_tokens
        self.max_length: int = completed.decode.max_length or source.params.max_length
        pipe: pipelining.PipeliningLayer = completed.model.instantiate()
        pipe.build(source.element_spec(training=True))
        restored = restoring.restore(
            pipe.by_path, pipe.analysis, completed, logdir=logdir, which=checkpoint
        )
        self.step: int = restored.step
        super().__init__(
            pipe,
            completed.decode,
            max_length=self.max_length,
            controls=len(self.vocabulary.targets),
        )
