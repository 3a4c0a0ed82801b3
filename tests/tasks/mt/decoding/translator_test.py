"""A model spread over devices translates like the model on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.tasks.mt.decoding import candidates, incremental, search, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from tests.tasks.mt import toy_model

BEGIN, END = 2, 3
LENGTH = 7


def sources(count: int) -> list[list[int]]:
    """Return sentences of 1 to 9 tokens and </s>, in no order of length."""
    random = np.random.default_rng(8)
    return [
        [*random.integers(4, toy_model.V, random.integers(1, 10)).tolist(), END]
        for _ in range(count)
    ]


def searched(pipe: Any, given: list[list[int]], params: Any) -> tuple[Any, Any, Any]:
    """Translate everything at once by `search.translate`; return sources, ids and scores."""
    model = incremental.Incremental(pipe.analysis, params.max_length)
    padded = np.zeros([len(given), 10], np.int32)
    for row, ids in enumerate(given):
        padded[row, : len(ids)] = ids
    run = tf.function(
        lambda ids: search.translate(model, pipe.by_path, ids, params), autograph=False
    )
    ids, scores = run(tf.constant(padded))
    return padded, ids.numpy(), scores.numpy()


def plain(pipe: Any, given: list[list[int]], params: Any) -> list[list[int]]:
    """Return the translations of `searched`."""
    return [translator._trimmed(row) for row in searched(pipe, given, params)[1]]


def cut(
    *cuts: int, dtype: str = "float64", num_replicas: int = 1, shared: bool = False, **settings: Any
) -> Any:
    """Return the toy model in cells with these numbers of layers."""
    params = toy_model.params(**settings)
    params.set(num_partitions=len(cuts) or 1, cuts=cuts or None, dtype=dtype)
    params.set(num_replicas=num_replicas, num_micro_batches=num_replicas)
    if shared:  # there and back
        params.set(num_partitions=len(cuts) // 2, schedule="zb_v")
    pipe = toy_model.built_from(params)
    for path, variable in pipe.by_path.items():
        if "memory_attention/output" in path:  # the source decides more than the token before
            variable.assign(2.0 * variable)
    bias = pipe.by_path["softmax/bias"]
    bias.assign(tf.zeros_like(bias))
    return pipe


@pytest.mark.parametrize(
    ("cuts", "beam", "settings"),
    [
        pytest.param((9,), 1, {"tie": "all"}, marks=pytest.mark.sameness_grid),
        pytest.param((6, 3), 3, {"transparent": "shared"}, marks=pytest.mark.sameness_grid),
        pytest.param((2, 4, 3), 3, {"tie": "all"}, marks=pytest.mark.sameness_grid),
        ((2, 3, 2, 2), 3, {"tie": "all", "shared": True}),
        ((2, 4, 2), 2, {"transparent": "per_layer", "packed": True}),
    ],
    ids=str,
)
def test_cells_translate_as_the_plain_network(
    cuts: tuple[int, ...], beam: int, settings: Any
) -> None:
    """Cut inside the decoder; the last cell of the last one keeps no cache."""
    pipe = cut(*cuts, **settings)
    params = Decode(
        search=search.Search(beam=beam, max_length=LENGTH, max_extra=3), batch=4, num_shapes=2
    )
    given = sources(14)
    wanted = plain(pipe, given, params.search)
    reported: list[int] = []
    model = translator.Translator(pipe, params, max_length=10)
    assert model.translate(given, reported.append) == wanted
    assert sum(reported) == len(given)
    assert len({tuple(row) for row in wanted}) > 2
    check_programs(model, pipe, 3 if "shared" in settings else min(2, len(cuts)))


def one_shape(beam: int) -> Any:
    return Decode(
        search=search.Search(beam=beam, max_length=LENGTH, max_extra=3), batch=4, num_shapes=1
    )


@pytest.fixture(scope="module")
def whole_model() -> tuple[Any, dict[int, list[list[int]]]]:
    """Return a model of which two pairs of logits are equal, and its translations by beam."""
    whole = cut(tie="all")
    for path in ("softmax/bias", "source_embedding/embedding/table"):
        value = whole.by_path[path]
        value.assign(tf.tensor_scatter_nd_update(value, [[9], [7]], tf.gather(value, [5, 4])))
    return whole, {beam: plain(whole, sources(14), one_shape(beam).search) for beam in (1, 3)}


@pytest.mark.parametrize(
    ("slices", "beam"),
    [
        ((2, 1, 8), 3),
        pytest.param(toy_model.V, 1, marks=pytest.mark.sameness_grid),
        pytest.param(3, 3, marks=pytest.mark.sameness_grid),
        pytest.param((2, 1, 8), 1, marks=pytest.mark.sameness_grid),
    ],
    ids=str,
)
def test_slices_in_cells_translate_as_the_whole_model(
    slices: Any, beam: int, whole_model: Any
) -> None:
    """Two pairs of logits are equal: the same beams. What cells send has no axis of V."""
    whole, by_beam = whole_model
    params = one_shape(beam)
    given, wanted = sources(14), by_beam[beam]
    assert len({tuple(row) for row in wanted}) > 2
    by_name = {"*_embedding": slices, "softmax": slices, "*coder_?": (4, 6)}
    flat = toy_model.params(by_name, tie="all")
    flat.set(num_partitions=4, cuts=None)
    pipe = toy_model.in_slices(whole, flat)
    assert plain(pipe, given, params.search) == wanted
    model = translator.Translator(pipe, params, max_length=10)
    assert model.translate(given) == wanted
    ((begins, extends),) = model._read_weights()
    group = model._begin_group(0, begins, tf.ones([4, 10], tf.int32))
    traced = tf.function(model._sweep_groups, autograph=False).get_concrete_function(
        [extends], [(group,)]
    )
    calls = [op for op in traced.graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) > 1
    for call in calls[:-1]:
        assert all(toy_model.V not in tuple(value.shape)[1:] for value in call.outputs)


@pytest.mark.parametrize("controls", [0, 3])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_candidates_of_slices_continue_as_all_logits(beam: int, controls: int) -> None:
    """Step by step, with many equal logits."""
    random = np.random.default_rng(5)
    settings = search.Search(beam=beam, max_length=4, max_extra=None)
    states = [search.begin(6, settings, controls=controls) for _ in range(2)]
    shortlist = candidates.Shortlist(2 * beam, controls)
    for _ in range(4):
        logits = tf.constant(random.integers(-2, 3, (6 * beam, 20)).astype(np.float32))
        parts, first = [], 0
        for part in tf.split(logits, (7, 1, 12), 1):
            parts.append(candidates.best_of(part, first, shortlist))
            first += part.shape[1]
        found = search.advance(settings, states[0], candidates.merged(parts))
        wanted = search.advance(settings, states[1], logits)
        alive = wanted[0].live > -np.inf
        for name in ("live", "ids"):
            one, other = (getattr(state, name)[alive] for state, *_ in (found, wanted))
            np.testing.assert_allclose(one, other, rtol=1e-6)
        flat = tf.reshape(alive, [-1])
        for one, other in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_array_equal(one[flat], other[flat])
        np.testing.assert_allclose(found[0].best, wanted[0].best, rtol=1e-6)
        np.testing.assert_array_equal(found[0].best_ids, wanted[0].best_ids)
        states = [found[0], wanted[0]]


@pytest.mark.parametrize(
    ("cuts", "num_shapes"),
    [pytest.param((9,), 2, marks=pytest.mark.sameness_grid), ((6, 3), 1)],
    ids=str,
)
def test_replicas_translate_as_one(
    cuts: tuple[int, ...], num_shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of sentences go to all replicas, also where these have unequal numbers of them."""
    pipe = cut(*cuts, tie="all", num_replicas=3)
    settings = search.Search(beam=2, max_length=LENGTH)
    params = Decode(search=settings, batch=2, num_shapes=num_shapes)
    given = sources(13)
    model = translator.Translator(pipe, params, max_length=10)
    begun: list[int] = []

    def counted(replica: int, function: Any) -> Any:
        def begin(*arguments: Any) -> Any:
            begun.append(replica)
            return function(*arguments)

        return begin

    monkeypatch.setattr(
        model, "_begins", [counted(r, function) for r, function in enumerate(model._begins)]
    )
    assert model.translate(given) == plain(cut(*cuts, tie="all"), given, params.search)
    assert len(begun) == 7
    assert set(begun) == {0, 1, 2}
    check_programs(model, pipe, min(2, len(cuts)))


def check_programs(model: Any, pipe: Any, num_cells: int) -> None:
    """A token is one pure call per group and cell involved, on the cell's device."""
    weights = model._read_weights()
    groups = [
        tuple(model._begin_group(r, begins, tf.ones([4, 10], tf.int32)) for _ in range(2))
        for r, (begins, _) in enumerate(weights)
    ]
    traced = tf.function(model._sweep_groups, autograph=False).get_concrete_function(
        [extends for _, extends in weights], groups
    )
    graph = traced.graph
    assert not graph.captures  # no weight is read for a token: they are given
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    assert {op.type for op in calls} == {"PartitionedCall"}  # not the stateful one
    places = [device for of in pipe.executor.devices for device in of[-num_cells:] * 2]
    assert sorted(op.device for op in calls) == sorted(places)


def test_what_is_planned_has_few_shapes() -> None:
    """Alike in length go together, every sentence once, padded to one of the lengths.

    A group holds 40 tokens at most: few sentences that are longer than planned.
    """
    pipe = cut()
    model = translator.Translator(pipe, Decode(batch=4, num_shapes=3), max_length=10)
    given = [[END] * count for count in (3, 1, 10, 11, 2, 5, 6, 21, 4, 3)]
    planned = list(model._planned(given))
    assert [(span, [len(chunk) for chunk in chunks]) for span, chunks in planned] == [
        (30, [1]),
        (20, [2]),
        (10, [4]),
        (3, [3]),
    ]
    numbers = [n for _, chunks in planned for chunk in chunks for n in chunk]
    assert sorted(numbers) == list(range(10))
    lengths = [len(given[n]) for n in numbers]
    assert lengths == sorted(lengths, reverse=True)
