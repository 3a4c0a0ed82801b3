"""Beam search over target tokens: pure functions on tensors, eager or in any graph.

    state = begin(rows, search)
    while not done(search, state):
        state, tokens, parents = advance(search, state, logits)
    ids, score = finish(search, state)

A hypothesis of n tokens, </s> counted, scores log p / ((5 + n) / 6)^length_penalty (Wu et al. 2016,
1609.08144, section 7). Of the 2·beam best continuations of a sentence the first `beam` may end it;
the best `beam` that go on are searched further, until as many have ended as the beam is wide. So a
beam of 1 is greedy search. A hypothesis that reaches its limit ends there and is scored as it is,
without </s>.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.decoding import incremental
from lingvo_gpipe.tasks.mt.text.vocabulary import BEGIN, END


class Search(hyperparams.Params):
    """How translations are searched for."""

    beam: int = hyperparams.field(4, "Hypotheses of a sentence that are followed; 1 is greedy.")
    length_penalty: float = hyperparams.field(
        0.6, "Exponent of a hypothesis' length in its score: more favours longer ones; 0: none."
    )
    max_length: int = hyperparams.field(256, "Target tokens at most, </s> included.")
    max_extra: int | None = hyperparams.field(
        50, "Target tokens at most beyond those of the source; None: no such bound."
    )
    early_stop: bool = hyperparams.field(
        True, "Leaves a sentence when nothing can beat its best translation: the same results."
    )


class State(NamedTuple):
    """Where the search of some sentences stands; a nest of tensors.

    Attributes:
        time: int32, tokens so far.
        ids: [rows, beam, max_length] int32 of what is followed, 0 behind the last.
        live: [rows, beam] float32, log p of it; −∞ where there is none.
        best_ids: [rows, max_length] int32, the best translation that has ended.
        best: [rows] float32, its score; −∞: none has.
        ended: [rows] int32, how many have.
        limits: [rows] int32, tokens at most.
        controls: int32, how many control symbols follow </s>, none of which is ever a translation.
    """

    time: tf.Tensor
    ids: tf.Tensor
    live: tf.Tensor
    best_ids: tf.Tensor
    best: tf.Tensor
    ended: tf.Tensor
    limits: tf.Tensor
    controls: tf.Tensor


def check(search: Search) -> None:
    """Refuse what no search can be.

    Raises:
        ParamsError: a number is out of range.
    """
    least = {"beam": 1, "max_length": 1, "length_penalty": 0, "max_extra": 0}
    for name, smallest in least.items():
        value = search.get(name)
        if value is not None and value < smallest:
            raise errors.ParamsError(f"search.{name}={value} is too small. Use {smallest} or more")


def limits_of(search: Search, source: tf.Tensor) -> tf.Tensor:
    """Return the target tokens that each source [rows, S] may have; 0 for a row of padding."""
    lengths = tf.reduce_sum(tf.cast(source != 0, tf.int32), -1)
    most = tf.fill(tf.shape(lengths), search.max_length)
    if search.max_extra is not None:
        most = tf.minimum(most, lengths + search.max_extra)
    return tf.where(lengths > 0, most, 0)


def begin(
    rows: Any,
    search: Search,
    *,
    limits: tf.Tensor | None = None,
    controls: int = 0,
    length: int | None = None,
) -> State:
    """Return the search before the first token.

    Args:
        rows: how many sentences.
        search: how.
        limits: [rows] int32, target tokens at most, 0 for rows that are none; None: max_length.
        controls: control symbols behind </s> in the vocabulary, the target tokens.
        length: room for tokens, at least the largest limit; None: max_length.

    Raises:
        ParamsError: `search` is out of range.
    """
    check(search)
    if limits is None:
        limits = tf.fill([rows], search.max_length)
    length = search.max_length if length is None else length
    first = tf.one_hot(0, search.beam, on_value=0.0, off_value=-float("inf"))
    there = (limits > 0)[:, tf.newaxis]
    return State(
        time=tf.constant(0),
        ids=tf.zeros([rows, search.beam, length], tf.int32),
        live=tf.where(there, first, -float("inf")),
        best_ids=tf.zeros([rows, length], tf.int32),
        best=tf.fill([rows], -float("inf")),
        ended=tf.zeros([rows], tf.int32),
        limits=limits,
        controls=tf.constant(controls),
    )


def first_tokens(rows: Any, search: Search) -> tuple[tf.Tensor, tf.Tensor]:
    """Return what goes before the first `advance`: <s>, and parents that move nothing."""
    count = rows * search.beam
    return tf.fill([count], BEGIN), tf.range(count)


def advance(search: Search, state: State, logits: tf.Tensor) -> tuple[State, tf.Tensor, tf.Tensor]:
    """Add a token to every hypothesis.

    Args:
        search: as in `begin`.
        state: before.
        logits: [rows · beam, V], of the token that follows each hypothesis.

    Returns:
        The state; tokens [rows · beam] that were added; parents [rows · beam], the row of the
        hypothesis that each was added to, by which caches are gathered.
    """
    beam = search.beam
    rows, size = tf.shape(state.live)[0], logits.shape[-1]
    log_p = tf.nn.log_softmax(tf.cast(logits, tf.float32))
    numbers = tf.range(size)
    allowed = (numbers == END) | (numbers > END + state.controls)
    log_p = tf.where(allowed, log_p, -float("inf"))
    live = state.live[:, :, tf.newaxis]
    # A dead one stays dead whatever its logits, NaN included.
    totals = tf.where(live > -float("inf"), live + tf.reshape(log_p, [rows, beam, size]), live)
    count = min(2 * beam, beam * size)
    found, index = tf.math.top_k(tf.reshape(totals, [rows, beam * size]), count)
    parent, token = index // size, index % size
    time = state.time + 1
    ids = tf.gather(state.ids, parent, axis=1, batch_dims=1)
    here = tf.range(tf.shape(ids)[-1]) == state.time
    ids = tf.where(here, token[:, :, tf.newaxis], ids)

    at_limit = (time >= state.limits)[:, tf.newaxis]
    ending = (token == END) | at_limit
    ending &= (tf.range(count) < beam) & (found > -float("inf"))
    best_ids, best = _better(search, state, time, ids, tf.where(ending, found, -float("inf")))
    ended = state.ended + tf.reduce_sum(tf.cast(ending, tf.int32), -1)

    over = at_limit | (ended >= beam)[:, tf.newaxis]
    going = tf.where((token == END) | over, -float("inf"), found)
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
    search: Search, state: State, time: tf.Tensor, ids: tf.Tensor, found: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the best of what had ended and of what ends now (`found`, log p or −∞)."""
    # All that end now are of one length: the likeliest scores best.
    which = tf.argmax(found, -1, tf.int32)
    score = tf.reduce_max(found, -1) / _penalty(search, time)
    better = score > state.best
    own = tf.gather(ids, which, axis=1, batch_dims=1)
    return tf.where(better[:, tf.newaxis], own, state.best_ids), tf.where(better, score, state.best)


def _penalty(search: Search, count: tf.Tensor) -> tf.Tensor:
    """Return what log p of so many tokens is divided by."""
    return ((5.0 + tf.cast(count, tf.float32)) / 6.0) ** search.length_penalty


def done(search: Search, state: State) -> tf.Tensor:
    """Tell whether the search is over.

    With early stop: whether no hypothesis that is followed can beat the best that has ended. More
    tokens make none more likely, and the divisor grows at most to that of the limit.
    """
    bound = tf.reduce_max(state.live, -1)
    if search.early_stop:
        bound /= _penalty(search, state.limits)
        return tf.logical_not(tf.reduce_any(bound > state.best))
    return tf.logical_not(tf.reduce_any(bound > -float("inf")))


def finish(search: Search, state: State) -> tuple[tf.Tensor, tf.Tensor]:
    """Return what was found.

    Returns:
        ids [rows, max_length] int32 of the best translations, without <s>, 0 behind </s>; a row
        without a source has none. Their scores [rows] float32, 0 for such a row.
    """
    del search
    return state.best_ids, tf.where(state.best > -float("inf"), state.best, 0.0)


def translate(
    incremental: incremental.Incremental,
    weights: Mapping[str, tf.Tensor],
    source: tf.Tensor,
    search: Search,
    *,
    controls: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Translate on one device, in one graph where it is called in one.

    Args:
        incremental: the model.
        weights: by path, variables or tensors.
        source: [rows, S] ids, 0 is padding.
        search: how.
        controls: see `begin`.

    Returns:
        See `finish`.

    Raises:
        ParamsError: `search` is out of range, or the model's caches are shorter than its
            translations.
    """
    check(search)
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

    def step(state: State, caches: Any, tokens: Any, parents: Any) -> Any:
        before = (state, caches, tokens, parents)
        if search.beam > 1:
            caches = incremental.reorder(caches, parents)
        logits, caches = incremental.extend(theta, caches, tokens)
        state, tokens, parents = advance(search, state, logits)
        after = (state, caches, tokens, parents)
        return tf.nest.map_structure(
            lambda new, old: tf.ensure_shape(new, old.shape), after, before
        )

    state, *_ = tf.while_loop(
        lambda state, *_: tf.logical_not(done(search, state)),
        step,
        (state, caches, tokens, parents),
        maximum_iterations=search.max_length,
    )
    return finish(search, state)
