"""Mini-batches are a pure function of (seed, position), and no example is lost."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.input import Batches, InMemory, plain

SIZES = {"train": 10, "test": 7}


class Numbers(InMemory):
    """Example i holds i and [i, -i]."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {"id": tf.TensorSpec([], tf.int32), "pair": tf.TensorSpec([2], tf.float32)}

    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        return {
            split: {
                "id": np.arange(n, dtype=np.int32),
                "pair": np.stack([np.arange(n), -np.arange(n)], 1).astype(np.float32),
            }
            for split, n in (SIZES | {"empty": 0}).items()
        } | {"uneven": {"id": np.zeros(3, np.int32), "pair": np.zeros([2, 2], np.float32)}}


def make(batch_size: int = 4, **more: Any) -> Numbers:
    made: Numbers = Numbers.Params(batch_size=batch_size, **more).instantiate()
    return made


def ids(batches: Batches, count: int | None = None) -> list[list[int]]:
    found = []
    for batch in itertools.islice(batches, count):
        number = batch["id"].numpy()
        np.testing.assert_array_equal(batch["pair"], np.stack([number, -number], 1))
        found.append(number.tolist())
    return found


@hypothesis.given(
    position=st.integers(0, 40), batch_size=st.integers(1, 13), seed=st.integers(0, 2**40)
)
@hypothesis.settings(max_examples=8)
def test_any_position_is_reached_without_what_lies_before(
    position: int, batch_size: int, seed: int
) -> None:
    source = make(batch_size)
    whole = ids(source.batches(seed), position + 3)
    assert ids(source.batches(seed, position), 3) == whole[position:]


@pytest.mark.parametrize("batch_size", [3, 4, 10, 23])
def test_every_epoch_has_every_example_once_though_batches_cross_its_border(
    batch_size: int,
) -> None:
    count = -(-50 // batch_size)
    drawn = list(itertools.chain(*ids(make(batch_size).batches(5), count)))
    epochs = [drawn[start : start + 10] for start in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5


def test_no_order_of_one_seed_comes_back_under_another() -> None:
    seeds = (0, 1, 2, 1 << 31, 1 << 40)
    orders = [tuple(order) for seed in seeds for order in ids(make(10).batches(seed), 4)]
    assert len(set(orders)) == 20


def test_orders_are_spread_evenly() -> None:
    counts = np.zeros([10, 10])
    for order in ids(make(10).batches(3), 1000):
        counts[np.arange(10), order] += 1
    # Chi-square over 81 degrees of freedom: 99.99 % of fair shuffles stay below 138.
    assert ((counts - 100) ** 2 / 100).sum() < 138


def test_without_shuffling_the_order_is_the_datas() -> None:
    assert ids(make(4, shuffle=False).batches(1), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 50])
def test_evaluation_has_every_example_once_in_order(batch_size: int) -> None:
    given = {"one": make(4).evaluation("test", batch_size)}
    given["two"] = make(4, eval_batch_size=batch_size).evaluation("test")
    for batches in given.values():
        found = ids(batches)
        assert list(itertools.chain(*found)) == list(range(7))
        assert {len(part) for part in found[:-1]} <= {batch_size}


def test_the_spec_is_reported_from_params_and_true() -> None:
    source = make(4, eval_batch_size=3)
    told = source.element_spec()
    batch = next(iter(source.batches(1)))
    assert {k: tf.TensorSpec.from_tensor(v) for k, v in batch.items()} == told
    assert source.element_spec(training=False)["pair"].shape == [3, 2]
    assert next(iter(source.evaluation("test")))["pair"].shape == [3, 2]
    assert source.batches(1).dataset.element_spec["pair"].shape[1:] == [2]


def test_another_split_may_be_trained_on() -> None:
    source = make(7, train_split="test")
    assert sorted(*ids(source.batches(1), 1)) == list(range(7))


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ("dev", "Numbers has no split 'dev'; there are empty, test, train, uneven"),
        ("empty", "Numbers: split 'empty' has no examples"),
        ("uneven", "split 'uneven' have different lengths: id 3, pair 2"),
    ],
)
def test_a_wrong_split_is_named(split: str, text: str) -> None:
    with pytest.raises(errors.InputError, match=text):
        make().evaluation(split)
    with pytest.raises(errors.InputError, match=text):
        make(train_split=split).batches(1)


@pytest.mark.parametrize("field", ["batch_size", "eval_batch_size"])
def test_a_batch_of_zero_is_refused(field: str) -> None:
    with pytest.raises(errors.InputError, match=f"input.{field}=0 is too small. Use 1 or more"):
        make(**{field: 0})


def test_a_batch_size_must_be_given() -> None:
    with pytest.raises(errors.ParamsError, match="batch_size"):
        Numbers.Params().instantiate()


class Failing(Numbers):
    """Examples 5 and 6 cannot be read."""

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        def check(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            for number in (5, 6):
                tf.debugging.assert_none_equal(batch["id"], number, message=f"{number} is torn")
            return batch

        return super().read(rows, split, batch_size, seed).map(check)


def test_what_cannot_be_read_is_reported_with_its_batch() -> None:
    batches = iter(Failing.Params(batch_size=2, shuffle=False).instantiate().batches(0))
    next(batches)
    next(batches)
    with pytest.raises(errors.InputError, match=r"mini-batch 2 cannot be read: .*5 is torn"):
        next(batches)


class PassingOver(Failing):
    """Says which examples cannot be read."""

    def find_unreadable(self, split: str, indices: Collection[int]) -> Collection[int]:
        del split
        return {5, 6} & set(indices)


def test_examples_that_cannot_be_read_are_replaced_or_left_out_and_counted() -> None:
    source = PassingOver.Params(batch_size=4, shuffle=False).instantiate()
    batches = source.batches(0)
    assert ids(batches, 3) == [[0, 1, 2, 3], [4, 7, 7, 7], [8, 9, 0, 1]]
    assert batches.counts == {"replaced": 2}
    assert ids(source.batches(0, 1), 2) == [[4, 7, 7, 7], [8, 9, 0, 1]]
    two_readers = [source.evaluation("test", 2) for _ in range(2)]
    for held_out in zip(*two_readers, strict=True):
        assert held_out[0]["id"].numpy().tolist() == held_out[1]["id"].numpy().tolist()
    assert [reader.counts for reader in two_readers] == [{"left_out": 2}] * 2
    again = PassingOver.Params(batch_size=4, shuffle=False).instantiate().evaluation("test", 2)
    first, second = ([batch["id"].numpy().tolist() for batch in again] for _ in range(2))
    assert first == second
    assert make().evaluation("test").counts == {}


def test_an_input_knows_no_classes_pictures_or_serving_unless_it_says_so() -> None:
    source = make()
    assert source.class_names == ()
    assert source.pictures(next(iter(source.batches(1)))) == {}
    with pytest.raises(
        errors.InputError, match="a model on Numbers cannot be exported: that input defines no"
    ):
        source.serving()


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("pair", np.ones([10, 3]), "is float64 [10, 3], expected float32 [n, 2]"),
        ("pair", np.ones([10]), "is float64 [10], expected float32 [n, 2]"),
        ("pair", np.full([10, 2], "a"), "is <U1 [10, 2], expected float32 [n, 2]"),
        ("id", np.full([10], 0.5), "is float64 [10], expected int32 [n]"),
        ("id", np.array(3), "is int64 [], expected int32 [n]"),
        ("id", None, "is object [], expected int32 [n]"),
        ("pair", [[1, 2]] * 10, None),
        ("id", np.arange(10, dtype=np.uint64), None),
        ("id", np.full([10], True), None),
        (
            "id",
            np.array([3] * 9 + [2**31]),
            "has the value 2147483648, which int32 cannot hold",
        ),
        ("id", np.array([-(2**31)] * 10), None),
    ],
)
def test_arrays_that_contradict_their_spec_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, array: Any, problem: str | None
) -> None:
    source = make()
    arrays = source.arrays()
    monkeypatch.setattr(
        source, "arrays", lambda: {"train": {**arrays["train"], name: array}}, raising=True
    )
    if problem is None:
        assert next(iter(source.batches(1)))[name].dtype == source.example_spec()[name].dtype
        return
    with pytest.raises(errors.InputError) as caught:
        source.batches(1)
    assert str(caught.value).startswith(f"Numbers: field {name!r} of split 'train' {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("{{function_node __wrapped__X}} Input is empty. [Op:DecodeImage]", "Input is empty"),
        (
            "Graph execution error:\n\nDetected at node DecodeImage defined at (most recent call "
            'last):\n  File "a.py", line 1, in <module>\n\nUnknown image file format. One of JPEG'
            " required.\n\t [[{{node DecodeImage}}]] [Op:__inference_f_32]",
            "Unknown image file format. One of JPEG required",
        ),
        (
            "Graph execution error:\n\nDetected at node ReadFile defined at (most recent call last)"
            ":\n<stack traces unavailable>\nError in user-defined function passed to MapDataset:1 "
            "transformation with iterator: Iterator::MapV2: /nope; No such file\n\t [[{{node R}}]]",
            "/nope; No such file",
        ),
        (
            "assertion failed: [a side is under 2] [Condition x >= y did not hold] [x] [1 1]",
            "a side is under 2",
        ),
    ],
)
def test_a_message_is_reported_without_names_of_graphs(message: str, expected: str) -> None:
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert plain(error) == expected


def test_reading_leaves_no_temporary_file_to_a_process_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = make()
    next(iter(source.batches(1)))
    next(iter(source.evaluation("test")))
    assert list(tmp_path.iterdir()) == []


def test_an_iterator_ends_without_waiting_for_tensorflow_s_tuning() -> None:
    """Where an iterator is tuned, its end may wait for the next round: up to a minute."""
    source = make()
    for batches in (source.batches(seed=1), source.evaluation("test")):
        options = batches.dataset.options()
        assert options.autotune.enabled is False
        assert options.deterministic is True
