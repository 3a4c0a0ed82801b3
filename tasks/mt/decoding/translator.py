"""Translation by a model that is spread over devices: one token is one sweep over its cells.

The cells are those of training. Each keeps its weights and its caches on its device, and receives
of a token what its layers read: ids, or the one position that the cell before has made. A beam
changes its order by an index that goes along, by which each cell gathers its own caches. As many
groups of sentences are on their way as there are cells, so that all devices work; a group that is
done makes room for the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, network, pipelining, task
from lingvo_gpipe.execution import outer_function, variables
from lingvo_gpipe.run import restoring
from lingvo_gpipe.tasks.mt.decoding import incremental
from lingvo_gpipe.tasks.mt.decoding import search as search_lib
from lingvo_gpipe.tasks.mt.text import vocabulary


class Decode(hyperparams.Params):
    """How sentences are translated, and from where to where."""

    search: search_lib.Search = hyperparams.field(search_lib.Search(), "How one is searched for.")
    batch: int = hyperparams.field(32, "Sentences of a group, which are translated together.")
    groups: int | None = hyperparams.field(
        None, "M: groups that are on their way through the cells; None: as many as cells."
    )
    max_length: int | None = hyperparams.field(
        None, "Source tokens at most, </s> included: longer lines are split; None: input's."
    )
    num_shapes: int = hyperparams.field(
        4, "Lengths that sources are padded to: each is traced once, and pads less."
    )
    target: str | None = hyperparams.field(
        None, "Language to translate to, of those that the vocabulary has a <2xx> for."
    )
    input: str | None = hyperparams.field(None, "File of lines; None: the standard input.")
    output: str | None = hyperparams.field(None, "File of translations; None: standard output.")
    read_ahead: int = hyperparams.field(
        8192, "Lines that are read, sorted by length and translated together."
    )


def check(params: Decode) -> None:
    """Refuse what cannot be done.

    Raises:
        ParamsError: a number is out of range.
    """
    search_lib.check(params.search)
    least = {"batch": 1, "groups": 1, "max_length": 3, "num_shapes": 1, "read_ahead": 1}
    for name, smallest in least.items():
        value = params.get(name)
        if value is not None and value < smallest:
            raise errors.ParamsError(f"decode.{name}={value} is too small. Use {smallest} or more")


class _Group(NamedTuple):
    """Sentences that are translated together; a nest of tensors.

    Attributes:
        caches: per cell, those of its layers.
        state: of the search.
        tokens: [rows · beam], the last of each hypothesis.
        parents: [rows · beam], the rows that they were added to.
    """

    caches: tuple[incremental.State, ...]
    state: search_lib.State
    tokens: tf.Tensor
    parents: tf.Tensor


class _Weights(NamedTuple):
    """The weights of all cells while sentences are translated, as their layers read them.

    Attributes:
        begin: per cell, of the layers that begin a sentence.
        extend: per cell, of those that add a token.
    """

    begin: Sequence[incremental.Theta]
    extend: Sequence[incremental.Theta]


class _Cell:
    """A cell's programs while decoding; pure, never inlined, traced once per shapes."""

    def __init__(
        self,
        part: incremental.Part,
        later: Sequence[incremental.Part],
        device: str,
        search: search_lib.Search,
    ) -> None:
        """Take the layers.

        Args:
            part: of the cell.
            later: those behind it, which read what it gives.
            device: on which it lives.
            search: how translations are searched for.
        """
        self.part = part
        self.device = device
        self.extends = bool(part.extend_writes)
        self._search = search
        self._begin_exports = _read_by(later, part.begin_writes, "begin_reads")
        self._extend_exports = _read_by(later, part.extend_writes, "extend_reads")
        self.begin = _program(self._begin)
        self.extend = _program(self._extend)
        self.choose = _program(self._choose)

    def _begin(self, theta: Any, given: Any, rows: int, length: int) -> Any:
        """Return the caches of `rows` hypotheses, and what later cells read of the sentences."""
        caches, written = self.part.begin(theta, given, rows, length)
        return caches, {name: written[name] for name in self._begin_exports}

    def _extend(self, theta: Any, caches: Any, parents: tf.Tensor, given: Any) -> Any:
        """Return the caches with a token more, and what later cells read of it."""
        if self._search.beam > 1:
            caches = self.part.reorder(caches, parents)
        written, caches = self.part.extend(theta, caches, given)
        return caches, {name: written[name] for name in self._extend_exports}

    def _choose(self, theta: Any, caches: Any, parents: tf.Tensor, given: Any, state: Any) -> Any:
        """Extend, as the last cell does it: return the caches, and what the search makes of it."""
        if self._search.beam > 1:
            caches = self.part.reorder(caches, parents)
        written, caches = self.part.extend(theta, caches, given)
        logits = written[self.part.extend_writes[-1]][:, 0]
        state, tokens, parents = search_lib.advance(self._search, state, logits)
        return caches, (state, tokens, parents), search_lib.done(self._search, state)


def _read_by(later: Sequence[Any], written: Sequence[str], reads: str) -> tuple[str, ...]:
    wanted = {name for part in later for name in getattr(part, reads)}
    return tuple(name for name in written if name in wanted)


def _program(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


class Translator:
    """A built pipeline that translates.

    Attributes:
        cut: translations so far that reached their limit of tokens, and end there.
    """

    def __init__(
        self,
        pipe: pipelining.PipeliningLayer,
        params: Decode,
        *,
        max_length: int,
        controls: int = 0,
    ) -> None:
        """Take the network with its present weights; whatever they become is used.

        Args:
            pipe: built; its cells, devices and variables are those of decoding.
            params: how.
            max_length: source tokens at most for which shapes are planned; longer ones get more.
            controls: see `search.begin`.

        Raises:
            UserError: `params` are out of range, or the network cannot compute token by token.
        """
        check(params)
        self._params = params
        self._search = params.search
        self._controls = controls
        self._pipe = pipe
        self._analysis = pipe.analysis
        steps = incremental.steps(pipe.analysis)
        parts = [
            incremental.Part(steps[n] for n in route.layers if n in steps)
            for route in pipe.analysis.cells
        ]
        devices = pipe.executor.devices
        self._cells = [
            _Cell(part, parts[k + 1 :], devices[k], params.search) for k, part in enumerate(parts)
        ]
        self._last = max(k for k, cell in enumerate(self._cells) if cell.extends)
        halves = (-(-max_length // 2**n) for n in range(params.num_shapes))
        self._spans = sorted(set(halves))
        self.cut = 0
        self._read = outer_function.OuterFunction(self._thetas)
        self._begin = outer_function.OuterFunction(self._begun)
        self._sweep = outer_function.OuterFunction(self._swept)

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Translate sentences; alike in length go together.

        Args:
            sources: ids of each, ending in </s>.
            progress: called after every token with the number of sentences that it finished; what
                it raises ends the translation.

        Returns:
            The ids of each translation, in the order of `sources`, without <s> and </s>.
        """
        found: list[list[int]] = [[] for _ in sources]
        # Once, and not for every token: in mixed precision reading is a copy.
        weights = _Weights(*self._read())
        for span, chunks in self._planned(sources):
            for numbers, ids in self._run(
                weights, span, chunks, sources, progress or (lambda _: None)
            ):
                for number, row in zip(numbers, ids, strict=False):
                    found[number] = _trimmed(row)
                    self.cut += vocabulary.END not in row
        return found

    def _planned(self, sources: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield each length that sources are padded to, with the groups' numbers of sentences."""
        order = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
        chunks: list[tuple[int, list[int]]] = []
        start = 0
        while start < len(order):
            span = self._span(len(sources[order[start]]))
            end = start + self._rows(len(sources), span)
            chunks.append((span, order[start:end]))
            start = end
        for span, own in itertools.groupby(chunks, lambda chunk: chunk[0]):
            yield span, [numbers for _, numbers in own]

    def _rows(self, count: int, span: int) -> int:
        """Return the rows of a group: the batch; of a few sentences, a power of two.

        Of sentences that are longer than planned as many as hold the tokens of a batch, since one
        of them would make all its neighbours as long.
        """
        rows = min(self._params.batch, 1 << max(count - 1, 0).bit_length())
        return max(1, min(rows, self._params.batch * self._spans[-1] // span))

    def _span(self, length: int) -> int:
        """Return the length that a source is padded to."""
        longest = self._spans[-1]
        return next((n for n in self._spans if n >= length), -(-length // longest) * longest)

    def _run(
        self,
        weights: _Weights,
        span: int,
        waiting: list[list[int]],
        sources: Sequence[Sequence[int]],
        progress: Callable[[int], None],
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield the numbers and the translated ids of each group, as they are done."""
        rows = self._rows(len(sources), span)
        places = self._params.groups or len(self._cells)
        running: list[tuple[list[int], _Group]] = []
        over: list[bool] = []
        while True:
            live = len(over) - sum(over)
            # One that is done stays until another takes its place, or most are: a sweep of
            # another width is another trace.
            if waiting or 2 * live <= len(over):
                running = [
                    entry for entry, is_over in zip(running, over, strict=True) if not is_over
                ]
                over = [False] * len(running)
            while waiting and len(running) < places:
                numbers = waiting.pop(0)
                ids = _padded([sources[number] for number in numbers], rows, span)
                running.append((numbers, self._begin(weights.begin, tf.constant(ids))))
                over.append(False)
            if not running:
                return
            groups, done = self._sweep(weights.extend, *(group for _, group in running))
            running = [(n, group) for (n, _), group in zip(running, groups, strict=True)]
            finished = 0
            for place, ends in enumerate(done.numpy().tolist()):
                if ends and not over[place]:
                    over[place] = True
                    numbers, group = running[place]
                    ids, _ = search_lib.finish(self._search, group.state)
                    yield numbers, ids.numpy()
                    finished += len(numbers)
            progress(finished)

    def _begun(self, weights: Sequence[incremental.Theta], source: tf.Tensor) -> _Group:
        """Encode sources [rows, S]: the outer function of a group."""
        search, (rows, span) = self._search, source.shape
        length = search.max_length
        if search.max_extra is not None:
            length = min(length, span + search.max_extra)
        stream: dict[str, Any] = {"source": source}
        caches = []
        for cell, theta in zip(self._cells, weights, strict=True):
            with tf.device(cell.device):
                given = {name: stream[name] for name in cell.part.begin_reads}
                own, written = cell.begin(theta, given, rows * search.beam, length)
            stream |= written
            caches.append(own)
        with tf.device(self._cells[self._last].device):
            state = search_lib.begin(
                rows,
                search,
                limits=search_lib.limits_of(search, source),
                controls=self._controls,
                length=length,
            )
        return _Group(tuple(caches), state, *search_lib.first_tokens(rows, search))

    def _swept(
        self, weights: Sequence[incremental.Theta], *groups: _Group
    ) -> tuple[tuple[_Group, ...], tf.Tensor]:
        """Add a token to every hypothesis of all groups: the outer function of a token."""
        table = network.forward_table(self._analysis.table, len(groups))
        streams = [{"target": group.tokens[:, tf.newaxis]} for group in groups]
        caches = [list(group.caches) for group in groups]
        chosen: dict[int, list[Any]] = {}
        previous: dict[int, list[tf.Operation]] = {}
        for device, slot in table.order():
            cell, m = self._cells[slot.cell], slot.micro_batch
            if not cell.extends:
                continue
            with tf.device(cell.device), tf.control_dependencies(previous.get(device, [])):
                given = {name: streams[m][name] for name in cell.part.extend_reads}
                common = (weights[slot.cell], caches[m][slot.cell], groups[m].parents, given)
                if slot.cell == self._last:
                    caches[m][slot.cell], *chosen[m] = cell.choose(*common, groups[m].state)
                    mark = chosen[m][1]
                else:
                    caches[m][slot.cell], written = cell.extend(*common)
                    streams[m] |= written
                    mark = tf.nest.flatten(written)[0]
            previous[device] = [mark.op]
        moved = [_Group(tuple(own), *chosen[m][0]) for m, own in enumerate(caches)]
        return tuple(moved), tf.stack([chosen[m][1] for m in range(len(groups))])

    def _thetas(self) -> tuple[list[incremental.Theta], list[incremental.Theta]]:
        """Read the weights, on their devices: per cell those of `begin`, and of `extend`."""
        weights = variables.read_weights(self._pipe.executor, self._pipe.by_path)
        begins, extends = [], []
        for cell in self._cells:
            with tf.device(cell.device):
                theta = cell.part.read(weights)
            begins.append({name: theta[name] for name in cell.part.begin_layers})
            extends.append({name: theta[name] for name in cell.part.extend_layers})
        return begins, extends


def _padded(sources: Sequence[Sequence[int]], rows: int, span: int) -> Any:
    """Return ids [rows, span] of sentences, 0 behind each and in further rows."""
    ids = np.zeros((rows, span), np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    return ids


def notes(cut: int) -> Iterator[str]:
    """Yield what is told of translations that were cut, in a line of its own.

    Args:
        cut: how many.
    """
    if cut:
        yield (
            f"{cut} translations reached their limit of tokens and end there: "
            "decode.search.max_length and decode.search.max_extra set it"
        )


def _trimmed(row: Any) -> list[int]:
    """Return ids up to </s> or padding."""
    ends = np.flatnonzero((row == vocabulary.END) | (row == vocabulary.PAD))
    kept: list[int] = row[: ends[0] if len(ends) else None].tolist()
    return kept


class Decoder:
    """The model of a checkpoint, spread over its devices, that translates.

    Attributes:
        vocabulary: of the run.
        target_tokens: whether its sources begin with <2xx>.
        max_length: source tokens at most, </s> included, that the model was made for.
        step: updates that the weights have had.
    """

    def __init__(
        self, params: Any, *, logdir: Path | None = None, checkpoint: str | None = None
    ) -> None:
        """Make the network and restore it; averages stand for weights where training keeps them.

        Args:
            params: a `TranslationTask.Params`.
            logdir: of the run whose newest checkpoint is taken.
            checkpoint: path of a checkpoint, or of a directory of them, in its place.

        Raises:
            UserError: there is no such checkpoint, it does not fit, or the run's vocabulary and
                data are not there.
        """
        check(params.decode)
        source: Any = restoring.source(params, logdir=logdir, which=checkpoint)
        own = task.complete(params, source)
        self.vocabulary: vocabulary.Vocabulary = source.vocabulary
        self.target_tokens: bool = source.target_tokens
        self.max_length: int = own.decode.max_length or own.input.max_length
        pipe: pipelining.PipeliningLayer = own.model.instantiate()
        pipe.build(source.element_spec(training=True))
        restored = restoring.restore(
            pipe.by_path, pipe.analysis.variables, own, logdir=logdir, which=checkpoint
        )
        self.step: int = restored.step
        self._translator = Translator(
            pipe,
            own.decode,
            max_length=self.max_length,
            controls=len(self.vocabulary.targets),
        )

    @property
    def cut(self) -> int:
        """See `Translator`."""
        return self._translator.cut

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """See `Translator.translate`."""
        return self._translator.translate(sources, progress)
