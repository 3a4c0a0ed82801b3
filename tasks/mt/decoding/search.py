"""Beam search over target tokens: pure functions on tensors, eager or in any graph.

    state = begin(rows, search)
    while not done(search, state):
        state, tokens, parents = advance(search, state, logits)
    ids, score = finish(state)

The score of a hypothesis of n tokens, with </s>, is log p / ((5 + n) / 6)^length_penalty (Wu et al.
2016, 1609.08144, section 7). Of the 2·beam best continuations of a sentence, the first `beam` may
end; the best `beam` that do not end are continued. The search of a sentence is over when `beam`
hypotheses have ended, so a beam of 1 is greedy search. A hypothesis that reaches its limit ends
there and is scored without </s>.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.decoding import candidates
from lingvo_gpipe.tasks.mt.decoding.candidates import Candidates
from lingvo_gpipe.tasks.mt.decoding.incremental import Caches, Incremental
from lingvo_gpipe.tasks.mt.text.vocabulary import BEGIN, END


class Search(hyperparams.Params):
    """How translations are searched for."""

    beam: int = hyperparams.field(4, "Hypotheses of a sentence; 1 is greedy search.")
    length_penalty: float = hyperparams.field(
        0.6, "Exponent of the length in a score: higher prefers longer translations; 0: no effect."
    )
    max_length: int = hyperparams.field(256, "Maximum number of target tokens, with </s>.")
    max_extra: int | None = hyperparams.field(
        50, "Maximum number of target tokens more than source tokens; None: no such limit."
    )


class Decode(hyperparams.Params):
    """How sentences are translated, and where they are read and written."""

    search: Search = hyperparams.field(Search(), "Settings of the beam search.")
    batch: int = hyperparams.field(32, "Sentences of a group, which are translated together.")
    groups: int | None = hyperparams.field(
        None,
        "M: groups that pass through the cells at the same time; None: one per cell and replica.",
    )
    max_length: int | None = hyperparams.field(
        None, "Maximum number of source tokens, with </s>; longer lines are split. None: input's."
    )
    num_shapes: int = hyperparams.field(
        4, "Lengths to which sources are padded. Each is traced once; more mean less padding."
    )
    target: str | None = hyperparams.field(
        None, "Language to translate to, one of those with a <2xx> in the vocabulary."
    )
    input: str | None = hyperparams.field(None, "File of lines; None: the standard input.")
    output: str | None = hyperparams.field(None, "File of translations; None: standard output.")
    shown: int = hyperparams.field(
        3,
        "Sentences of each pair of languages, of at most 10 pairs, that every evaluation "
        "translates and shows in TensorBoard, always the same; 0: none.",
    )
    read_ahead: int = hyperparams.field(
        8192, "Lines that are read, sorted by length and translated together."
    )


class SearchState(NamedTuple):
    """State of the search of some sentences; a nest of tensors.

    Attributes:
        time: int32, number of tokens so far.
        ids: [rows, beam, max_length] int32, the live hypotheses, 0 after their last token.
        live: [rows, beam] float32, their log p; −∞ for a dead one.
        best_ids: [rows, max_length] int32, the best translation that has ended.
        best: [rows] float32, its score; −∞ if none has ended.
        ended: [rows] int32, number of translations that have ended.
        limits: [rows] int32, maximum number of tokens.
        controls: int32, number of control symbols after </s>, which are never translations.
    """

    time: tf.Tensor
    ids: tf.Tensor
    live: tf.Tensor
    best_ids: tf.Tensor
    best: tf.Tensor
    ended: tf.Tensor
    limits: tf.Tensor
    controls: tf.Tensor


def check(decode: Decode) -> None:
    """Refuse settings that are out of range.

    Raises:
        ParamsError: names the first such setting.
    """
    for name, least in (
        ("search.beam", 1),
        ("search.max_length", 1),
        ("search.max_extra", 0),
        ("search.length_penalty", 0),
        ("batch", 1),
        ("groups", 1),
        ("max_length", 3),
        ("num_shapes", 1),
        ("read_ahead", 1),
    ):
        value = decode.get(name)
        if value is not None and value < least:
            raise errors.ParamsError(f"decode.{name}={value} is too small. Use {least} or more")


def limits_of(search: Search, source: tf.Tensor) -> tf.Tensor:
    """Return the maximum number of target tokens of each source [rows, S]; 0 for padding rows."""
    lengths = tf.reduce_sum(tf.cast(source != 0, tf.int32), -1)
    most = tf.fill(tf.shape(lengths), search.max_length)
    if search.max_extra is not None:
        most = tf.minimum(most, lengths + search.max_extra)
    return tf.where(lengths > 0, most, 0)


def begin(
    rows: int | tf.Tensor,
    search: Search,
    *,
    limits: tf.Tensor | None = None,
    controls: int = 0,
    length: int | None = None,
) -> SearchState:
    """Return the state before the first token.

    Args:
        rows: number of sentences.
        search: settings.
        limits: [rows] int32, maximum number of target tokens, 0 for rows without a sentence; None:
            max_length.
        controls: number of control symbols after </s> in the vocabulary, the target tokens.
        length: size of the token axis, at least the largest limit; None: max_length.
    """
    if limits is None:
        limits = tf.fill([rows], search.max_length)
    length = search.max_length if length is None else length
    first = tf.one_hot(0, search.beam, on_value=0.0, off_value=-float("inf"))
    has_source = (limits > 0)[:, tf.newaxis]
    return SearchState(
        time=tf.constant(0),
        ids=tf.zeros([rows, search.beam, length], tf.int32),
        live=tf.where(has_source, first, -float("inf")),
        best_ids=tf.zeros([rows, length], tf.int32),
        best=tf.fill([rows], -float("inf")),
        ended=tf.zeros([rows], tf.int32),
        limits=limits,
        controls=tf.constant(controls),
    )


def first_tokens(rows: int | tf.Tensor, search: Search) -> tuple[tf.Tensor, tf.Tensor]:
    """Return tokens and parents before the first `advance`: <s>, and parents that move nothing."""
    count = rows * search.beam
    return tf.fill([count], BEGIN), tf.range(count)


def advance(
    search: Search, state: SearchState, logits: tf.Tensor | Candidates
) -> tuple[SearchState, tf.Tensor, tf.Tensor]:
    """Add a token to every hypothesis.

    Args:
        search: as in `begin`.
        state: before.
        logits: [rows · beam, V], of the next token of each hypothesis; or its candidates, at least
            2·beam of each slice of the vocabulary.

    Returns:
        The new state; tokens [rows · beam], the added ones; parents [rows · beam], the row of the
        hypothesis that each continues, by which caches are gathered.
    """
    beam = search.beam
    rows = tf.shape(state.live)[0]
    if isinstance(logits, Candidates):
        log_p = logits.log_p()
    else:
        log_p = tf.nn.log_softmax(tf.cast(logits, tf.float32))
        allowed = candidates.is_token(tf.range(logits.shape[-1]), state.controls)
        log_p = tf.where(allowed, log_p, -float("inf"))
    size = log_p.shape[-1]
    live = state.live[:, :, tf.newaxis]
    # A dead hypothesis stays dead even if its logits are NaN.
    totals = tf.where(live > -float("inf"), live + tf.reshape(log_p, [rows, beam, size]), live)
    count = min(2 * beam, beam * size)
    continued, index = tf.math.top_k(tf.reshape(totals, [rows, beam * size]), count)
    parent, token = index // size, index % size
    if isinstance(logits, Candidates):
        ids = tf.reshape(logits.ids, [rows, beam * size])
        token = tf.gather(ids, index, batch_dims=1)
    time = state.time + 1
    ids = tf.gather(state.ids, parent, axis=1, batch_dims=1)
    here = tf.range(tf.shape(ids)[-1]) == state.time
    ids = tf.where(here, token[:, :, tf.newaxis], ids)

    at_limit = (time >= state.limits)[:, tf.newaxis]
    ending = (token == END) | at_limit
    ending &= (tf.range(count) < beam) & (continued > -float("inf"))
    best_ids, best = _better(search, state, time, ids, tf.where(ending, continued, -float("inf")))
    ended = state.ended + tf.reduce_sum(tf.cast(ending, tf.int32), -1)

    over = at_limit | (ended >= beam)[:, tf.newaxis]
    going = tf.where((token == END) | over, -float("inf"), continued)
    going, chosen = tf.math.top_k(going, beam)
    parent, token = (tf.gather(each, chosen, axis=1, batch_dims=1) for each in (parent, token))
    new = state._replace(
        time=time,
        ids=tf.gather(ids, chosen, axis=1, batch_dims=1),
        live=going,
        best_ids=best_ids,
        best=best,
        ended=ended,
    )
    parents = parent + beam * tf.range(rows)[:, tf.newaxis]
    return new, tf.reshape(token, [-1]), tf.reshape(parents, [-1])


def _better(
    search: Search, state: SearchState, time: tf.Tensor, ids: tf.Tensor, ending: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the best translation so far and its score.

    `ending`: [rows, n] log p of the hypotheses `ids` that end now, −∞ for the others.
    """
    # All that end now have the same length, so the most likely has the best score.
    which = tf.argmax(ending, -1, tf.int32)
    score = tf.reduce_max(ending, -1) / _penalty(search, time)
    better = score > state.best
    new_ids = tf.gather(ids, which, axis=1, batch_dims=1)
    best_ids = tf.where(better[:, tf.newaxis], new_ids, state.best_ids)
    return best_ids, tf.where(better, score, state.best)


def _penalty(search: Search, count: tf.Tensor) -> tf.Tensor:
    """Return the divisor of log p for `count` tokens."""
    return ((5.0 + tf.cast(count, tf.float32)) / 6.0) ** search.length_penalty


def done(search: Search, state: SearchState) -> tf.Tensor:
    """Return whether the search is over.

    It is over when no live hypothesis can beat the best translation that has ended: more tokens
    never raise log p, and the divisor is at most that of the limit.
    """
    bound = tf.reduce_max(state.live, -1) / _penalty(search, state.limits)
    return tf.logical_not(tf.reduce_any(bound > state.best))


def finish(state: SearchState) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the result.

    Returns:
        ids [rows, max_length] int32 of the best translations, without <s>, 0 after </s>; only 0 in
        a row without a source. Their scores [rows] float32, 0 for such a row.
    """
    return state.best_ids, tf.where(state.best > -float("inf"), state.best, 0.0)


def translate(
    incremental: Incremental,
    weights: Mapping[str, tf.Tensor],
    source: tf.Tensor,
    search: Search,
    *,
    controls: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Translate on one device, eagerly or inside a graph.

    Args:
        incremental: the model.
        weights: by path, variables or tensors.
        source: [rows, S] ids, 0 is padding.
        search: settings.
        controls: see `begin`.

    Returns:
        See `finish`.

    Raises:
        ParamsError: the model's caches are shorter than the translations.
    """
    if incremental.length < search.max_length:
        raise errors.ParamsError(
            f"search.max_length={search.max_length}, but the model's caches hold "
            f"{incremental.length} tokens. Make them equal"
        )
    theta = incremental.read(weights)
    rows = tf.shape(source)[0]
    state = begin(rows, search, limits=limits_of(search, source), controls=controls)
    caches = incremental.begin(theta, source, search.beam)
    tokens, parents = first_tokens(rows, search)

    def step(
        state: SearchState, caches: Caches, tokens: tf.Tensor, parents: tf.Tensor
    ) -> tuple[SearchState, Caches, tf.Tensor, tf.Tensor]:
        before = (state, caches, tokens, parents)
        if search.beam > 1:
            caches = incremental.reorder(caches, parents)
        logits, caches = incremental.extend(theta, caches, tokens)
        state, tokens, parents = advance(search, state, logits)
        after = (state, caches, tokens, parents)
        same: tuple[SearchState, Caches, tf.Tensor, tf.Tensor] = tf.nest.map_structure(
            lambda new, old: tf.ensure_shape(new, old.shape), after, before
        )
        return same

    state, *_ = tf.while_loop(
        lambda state, *_: tf.logical_not(done(search, state)),
        step,
        (state, caches, tokens, parents),
        maximum_iterations=search.max_length,
    )
    return finish(state)
