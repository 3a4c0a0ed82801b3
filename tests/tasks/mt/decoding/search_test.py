"""Beam search: against greedy and exhaustive search, its ends, and forbidden tokens."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.decoding import incremental, search
from tests.tasks.mt import toy_model

BEGIN, END = 2, 3


class Chain:
    """A language model whose next token depends on all tokens so far, in NumPy and as logits."""

    def __init__(self, size: int, rows: int, seed: int = 0, spread: float = 2.0) -> None:
        self.size, self.rows, self.seed, self.spread = size, rows, seed, spread

    def logits(self, row: int, prefix: tuple[int, ...]) -> Any:
        random = np.random.default_rng([self.seed, row, *prefix])
        return self.spread * random.normal(size=self.size)

    def log_p(self, row: int, tokens: tuple[int, ...]) -> float:
        total = 0.0
        for n, token in enumerate(tokens):
            logits = self.logits(row, tokens[:n])
            total += logits[token] - np.log(np.exp(logits).sum())
        return float(total)

    def search(
        self, params: Any, *, to_the_limit: bool = False, **settings: Any
    ) -> tuple[list[tuple[int, ...]], Any, int]:
        """Return the translations without what follows </s>, their scores, and the steps.

        `to_the_limit`: go on even if nothing can beat the best translation that has ended.
        """
        state = search.begin(self.rows, params, **settings)
        steps = 0
        while not search.done(params, state) or (to_the_limit and steps < params.max_length):
            live = state.ids.numpy()[:, :, :steps].reshape([self.rows * params.beam, steps])
            given = [
                self.logits(n // params.beam, tuple(map(int, prefix)))
                for n, prefix in enumerate(live)
            ]
            before = live
            state, tokens, parents = search.advance(params, state, tf.constant(given))
            steps += 1
            # What a cache would hold is what the search holds.
            after = np.concatenate([before[parents.numpy()], tokens.numpy()[:, np.newaxis]], 1)
            alive = state.live.numpy().reshape(-1) > -np.inf
            kept = state.ids.numpy()[:, :, :steps].reshape([-1, steps])
            np.testing.assert_array_equal(after[alive], kept[alive])
        ids, scores = search.finish(state)
        return [trimmed(row) for row in ids.numpy()], scores.numpy(), steps


def trimmed(row: Any) -> tuple[int, ...]:
    """Return a row up to its </s>, or without its padding; nothing else may follow."""
    tokens = tuple(map(int, row))
    end = tokens.index(END) + 1 if END in tokens else len(np.trim_zeros(row, "b"))
    assert not any(tokens[end:])
    return tokens[:end]


def score(params: Any, log_p: float, count: int) -> float:
    return log_p / ((5 + count) / 6) ** params.length_penalty


def greedy(model: Chain, row: int, allowed: list[int], length: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < length and END not in tokens:
        logits = model.logits(row, tokens)
        tokens += (max(allowed, key=lambda token: logits[token]),)
    return tokens


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_beam_of_one_is_greedy(penalty: float) -> None:
    model = Chain(9, rows=12)
    params = search.Search(beam=1, length_penalty=penalty, max_length=6)
    found, scores, _ = model.search(params)
    allowed = [token for token in range(9) if token >= END]
    assert found == [greedy(model, row, allowed, 6) for row in range(12)]
    reported = [score(params, model.log_p(n, each), len(each)) for n, each in enumerate(found)]
    np.testing.assert_allclose(scores, reported, rtol=1e-5)
    lengths = {len(each) for each in found}
    assert 6 in lengths  # some were ended by the limit
    assert min(lengths) < 6


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_beam_of_all_prefixes_is_exhaustive(penalty: float) -> None:
    model, length, words = Chain(7, rows=5, seed=1), 4, (4, 5, 6)
    params = search.Search(beam=4**length, length_penalty=penalty, max_length=length)
    found, scores, _ = model.search(params)
    every = [
        (*prefix, *end)
        for count in range(length + 1)
        for prefix in itertools.product(words, repeat=count)
        for end in ([()] if count == length else [(END,)])
    ]
    for row in range(5):
        values = {each: score(params, model.log_p(row, each), len(each)) for each in every}
        best = max(values, key=values.__getitem__)
        assert found[row] == best
        np.testing.assert_allclose(scores[row], values[best], rtol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_early_stop_changes_no_result(penalty: float) -> None:
    model = Chain(10, rows=1, seed=3, spread=3.0)
    fewer = 0
    for model.seed in range(4):
        params = search.Search(beam=3, length_penalty=penalty, max_length=10)
        found, scores, steps = model.search(params)
        whole, all_scores, most = model.search(params, to_the_limit=True)
        assert found == whole
        np.testing.assert_array_equal(scores, all_scores)
        fewer += steps < most
    assert fewer


def test_a_sentence_is_left_when_as_many_have_ended_as_the_beam_is_wide() -> None:
    """Another continuation, nearly as likely, is not waited for."""
    params = search.Search(beam=1, length_penalty=0.0, max_length=3)
    state = search.begin(1, params)
    logits = np.full([1, 6], -20.0)
    logits[0, [END, 4]] = [1.0, 0.9]
    state, *_ = search.advance(params, state, tf.constant(logits))
    assert bool(search.done(params, state))
    assert search.finish(state)[0].numpy().tolist() == [[END, 0, 0]]


def test_what_ends_makes_room_for_the_next_best() -> None:
    params = search.Search(beam=2, max_length=3)
    logits = np.full([2, 8], -20.0)
    logits[:, [END, 4, 5, 6]] = [1.0, 0.9, 0.8, 0.7]
    state, tokens, _ = search.advance(params, search.begin(1, params), tf.constant(logits))
    assert tokens.numpy().tolist() == [4, 5]
    assert np.isfinite(state.live.numpy()).all()
    # Only the best continuations may end a sentence; none of these does.
    logits[:, [END, 5]] = [0.75, 0.88]
    later, tokens, parents = search.advance(params, state, tf.constant(logits))
    assert tokens.numpy().tolist() == [4, 5]
    assert parents.numpy().tolist() == [0, 0]
    assert later.ended.numpy().tolist() == [1]


def test_control_symbols_are_never_generated() -> None:
    """Even if the model prefers them; their probability is not redistributed."""
    params = search.Search(beam=2, max_length=3, length_penalty=0.0)
    state = search.begin(1, params, controls=2)
    logits = np.zeros([2, 8])
    logits[:, [0, 1, 2, 4, 5]] = 9.0
    for _ in range(3):
        state, tokens, _ = search.advance(params, state, tf.constant(logits))
        alive = state.live.numpy().reshape(-1) > -np.inf
        assert set(tokens.numpy()[alive].tolist()) <= {6, 7}
    ids, scores = search.finish(state)
    assert ids.numpy().tolist() == [[END, 0, 0]]
    np.testing.assert_allclose(scores, [-np.log(5 * np.exp(9.0) + 3)], rtol=1e-6)


def test_rows_end_at_their_own_limits() -> None:
    model = Chain(6, rows=4, seed=5)
    params = search.Search(beam=3, max_length=7)
    limits = [7, 0, 1, 3]
    found, scores, _ = model.search(params, limits=tf.constant(limits))
    assert found[1] == ()
    assert scores[1] == 0.0
    for row in (0, 2, 3):
        alone = search.Search(beam=3, max_length=limits[row])
        same, values, _ = model.search(alone)
        assert found[row] == same[row]
        np.testing.assert_array_equal(scores[row], values[row])


def test_limits_follow_the_source() -> None:
    source = tf.constant([[5, 6, 3, 0], [0, 0, 0, 0], [5, 3, 0, 0]])
    params = search.Search(max_length=5, max_extra=2)
    assert search.limits_of(params, source).numpy().tolist() == [5, 0, 4]
    free = params.copy().set(max_extra=None)
    assert search.limits_of(free, source).numpy().tolist() == [5, 0, 5]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"search.beam": 0}, "decode.search.beam=0 is too small. Use 1 or more"),
        ({"search.length_penalty": -0.1}, "decode.search.length_penalty=-0.1 is too small. Use 0"),
        ({"search.max_extra": -1}, "decode.search.max_extra=-1 is too small. Use 0 or more"),
        ({"groups": 0}, "decode.groups=0 is too small. Use 1 or more"),
        ({"max_length": 2}, "decode.max_length=2 is too small. Use 3 or more"),
    ],
)
def test_settings_out_of_range_are_refused(field: Any, text: str) -> None:
    with pytest.raises(errors.ParamsError, match=re.escape(text)):
        search.check(search.Decode().set(field))


def test_a_model_is_translated_in_a_graph_as_by_hand() -> None:
    """Against full recomputation of every prefix; the source of a row is padding alone."""
    pipe = toy_model.built(transparent="per_layer")
    params = search.Search(beam=2, max_length=toy_model.LENGTH, max_extra=None)
    model = incremental.Incremental(pipe.analysis, toy_model.LENGTH)
    source = np.concatenate([toy_model.SOURCE, np.zeros([1, 5], np.int32)])
    run = tf.function(
        lambda ids: search.translate(model, pipe.by_path, ids, params), autograph=False
    )
    ids, scores = run.get_concrete_function(tf.TensorSpec([None, None], tf.int32))(
        tf.constant(source)
    )
    assert ids.shape == (4, toy_model.LENGTH)
    assert not ids.numpy()[3].any()
    assert scores.numpy()[3] == 0

    class Whole(Chain):
        def logits(self, row: int, prefix: tuple[int, ...]) -> Any:
            target = np.array([[BEGIN, *prefix]], np.int32)
            return pipe(toy_model.fields(target, source[row : row + 1]), training=False)[
                0, -1
            ].numpy()

    found, values, _ = Whole(toy_model.V, rows=3).search(params)
    assert [trimmed(row) for row in ids.numpy()[:3]] == found
    np.testing.assert_allclose(scores[:3], values, rtol=1e-5)


def test_caches_that_are_too_short_are_refused() -> None:
    model = incremental.Incremental(toy_model.built().analysis, toy_model.LENGTH)
    with pytest.raises(errors.ParamsError, match=r"max_length=7, but the model's caches hold 6"):
        search.translate(model, {}, tf.constant(toy_model.SOURCE), search.Search(max_length=7))
