"""The programs of a cell while the model decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from lingvo_gpipe.tasks.mt.decoding import search
from lingvo_gpipe.tasks.mt.decoding.candidates import Candidates
from lingvo_gpipe.tasks.mt.decoding.incremental import Caches, DecodingPart, LayerThetas
from lingvo_gpipe.tasks.mt.decoding.search import Search, SearchState


class Choice(NamedTuple):
    """The choice of the search for the next token; a nest of tensors.

    Attributes:
        state: state of the search.
        tokens: [rows · beam], the latest of each hypothesis.
        parents: [rows · beam], the row that each hypothesis continues.
    """

    state: SearchState
    tokens: tf.Tensor
    parents: tf.Tensor


class DecodingCell:
    """A cell's programs: pure, never inlined, traced once for each set of shapes; of all replicas.

    Attributes:
        part: its layers.
        extends: whether it has layers that run for every token.
        begin: program of `_begin`.
        extend: program of `_extend`.
        choose: program of `_choose`.
    """

    def __init__(self, part: DecodingPart, later: Sequence[DecodingPart], settings: Search) -> None:
        """Define the programs.

        Args:
            part: layers of the cell.
            later: layers of later cells, which read what it exports.
            settings: settings of the search.
        """
        self.part = part
        self.extends = bool(part.extend_writes)
        self._settings = settings
        self._begin_exports = _read_by(later, part.begin_writes, "begin_reads")
        self._extend_exports = _read_by(later, part.extend_writes, "extend_reads")
        self.begin = _program(self._begin)
        self.extend = _program(self._extend)
        self.choose = _program(self._choose)

    def _begin(
        self, theta: LayerThetas, inputs: Mapping[str, tf.Tensor], rows: int, length: int
    ) -> tuple[Caches, dict[str, tf.Tensor]]:
        """Return the caches of `rows` hypotheses, and values of the sentences for later cells."""
        caches, outputs = self.part.begin(theta, inputs, rows, length)
        return caches, {name: outputs[name] for name in self._begin_exports}

    def _extend(
        self,
        theta: LayerThetas,
        caches: Caches,
        parents: tf.Tensor,
        inputs: Mapping[str, tf.Tensor],
    ) -> tuple[Caches, dict[str, tf.Tensor]]:
        """Return the caches with one more token, and values of this token for later cells."""
        caches, outputs = self._outputs(theta, caches, parents, inputs)
        return caches, {name: outputs[name] for name in self._extend_exports}

    def _choose(
        self,
        theta: LayerThetas,
        caches: Caches,
        parents: tf.Tensor,
        inputs: Mapping[str, tf.Tensor],
        state: SearchState,
    ) -> tuple[Caches, Choice, tf.Tensor]:
        """Extend in the last cell; return caches, choice, and whether the search is over."""
        caches, outputs = self._outputs(theta, caches, parents, inputs)
        logits = outputs[self.part.extend_writes[-1]]
        if not isinstance(logits, Candidates):
            logits = logits[:, 0]
        choice = Choice(*search.advance(self._settings, state, logits))
        return caches, choice, search.done(self._settings, choice.state)

    def _outputs(
        self,
        theta: LayerThetas,
        caches: Caches,
        parents: tf.Tensor,
        inputs: Mapping[str, tf.Tensor],
    ) -> tuple[Caches, dict[str, tf.Tensor]]:
        if self._settings.beam > 1:
            caches = self.part.reorder(caches, parents)
        outputs, caches = self.part.extend(theta, caches, inputs)
        return caches, outputs


def _read_by(
    later: Sequence[DecodingPart],
    written: Sequence[str],
    reads: Literal["begin_reads", "extend_reads"],
) -> tuple[str, ...]:
    """Return those of `written` that later cells read."""
    wanted = {name for part in later for name in getattr(part, reads)}
    return tuple(name for name in written if name in wanted)


def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    program: Callable[..., Any] = tf.function(
        function, autograph=False, experimental_attributes={"_noinline": True}
    )
    return program
