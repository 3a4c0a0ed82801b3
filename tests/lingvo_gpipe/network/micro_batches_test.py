"""Cutting mini-batches: sizes, round trips through `split` and `merge`, texts."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe import errors
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches
from tests.networks import pipelines


class MeanOfAll(base.Layer):
    """x: [B, C] → [C], the mean of the examples."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(tf.TensorSpec(inputs[0].shape[1:], inputs[0].dtype))

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta, ctx
        return tf.reduce_mean(inputs, 0)


@pytest.mark.parametrize(
    ("examples", "count", "sizes"),
    [
        (10, 4, (3, 3, 2, 2)),
        (3, 8, (1, 1, 1)),  # fewer examples than micro-batches: as many as there are
    ],
)
def test_sizes_by_number(examples: int, count: int, sizes: tuple[int, ...]) -> None:
    assert micro_batches.sizes(examples, count) == sizes


@hypothesis.given(st.integers(1, 300), st.integers(1, 40))
def test_sizes_add_up_and_larger_ones_come_first(examples: int, count: int) -> None:
    sizes = micro_batches.sizes(examples, count)
    assert sum(sizes) == examples
    assert len(sizes) == min(count, examples)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= 1


@pytest.mark.parametrize(
    ("examples", "partitions", "replicas", "counts"),
    [
        (64, 4, 1, (4, 8, 16, 32)),
        (60, 8, 1, (10, 20, 60)),  # equal micro-batches
        (18, 1, 2, (2, 6, 8, 18)),  # 9 would not share out to replicas
        (3, 2, 2, (3,)),
    ],
)
def test_counts_worth_comparing(
    examples: int, partitions: int, replicas: int, counts: tuple[int, ...]
) -> None:
    assert micro_batches.counts(examples, partitions, replicas) == counts


def test_no_example_is_refused() -> None:
    with pytest.raises(
        errors.InputError, match=r"^a mini-batch has no examples\. Use at least one$"
    ):
        micro_batches.sizes(0, 4)


def test_batch_size_is_read_from_tensors_and_specs() -> None:
    fields = {
        "x": tf.zeros([6, 2]),
        "y": {"deep": tf.TensorSpec([6], tf.string)},
    }
    assert micro_batches.batch_size(fields) == 6


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"x": tf.TensorSpec([None, 3])},
            "field 'x' has shape (None, 3), without a known size in its batch dimension 0. "
            "Give every mini-batch a known size, as by batch(n, drop_remainder=True), and repeat "
            "what all examples share",
        ),
        (
            {"x": [tf.TensorSpec([]), tf.TensorSpec([])]},
            "field 'x' is a list of numbers, which are read as one tensor each. Give an array of "
            "them",
        ),
        (
            {"x": tf.TensorSpec(None), "y": tf.TensorSpec([])},
            "field 'x' has shape <unknown>, without a known size in its batch dimension 0. "
            "Give every mini-batch a known size, as by batch(n, drop_remainder=True), and repeat "
            "what all examples share",
        ),
        (
            {"x": tf.TensorSpec([4]), "y": (tf.TensorSpec([4]), tf.TensorSpec([3]))},
            "fields disagree on the number of examples: 'x' 4, 'y' 3. Repeat what all "
            "examples share",
        ),
        (
            {},
            "fields disagree on the number of examples: none. Repeat what all examples share",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_reported(fields: dict[str, tf.TensorSpec], text: str) -> None:
    with pytest.raises(errors.InputError) as error:
        micro_batches.batch_size(fields)
    assert str(error.value) == text


def test_split_and_merge_are_a_round_trip_of_nests_and_strings() -> None:
    value = {
        "image": tf.reshape(tf.range(70), [7, 10]),
        "parts": (tf.constant(list("abcdefg")), tf.range(7) > 3),
    }
    pieces = micro_batches.split(value, (3, 2, 2))
    assert [piece["image"].shape[0] for piece in pieces] == [3, 2, 2]
    assert pieces[1]["parts"][0].numpy().tolist() == [b"d", b"e"]
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_array_equal(a, b), micro_batches.merge(pieces), value
    )


def test_one_micro_batch_is_the_mini_batch_itself() -> None:
    value = tf.range(6)
    (cut,) = micro_batches.split(value, (6,))
    assert cut is value
    assert micro_batches.merge([cut]) is value


def test_merge_stacks_values_without_a_batch_dimension() -> None:
    merged = micro_batches.merge([tf.constant(1.0), tf.constant(2.0)])
    np.testing.assert_array_equal(merged, [1.0, 2.0])


def test_an_output_without_a_batch_dimension_is_not_joined() -> None:
    own = pipelines.pipe([MeanOfAll.Params(name="m")], num_micro_batches=3)
    with pytest.raises(errors.LayerError, match=r"^output 'x' is \(5,\) in a micro-batch of 3 "):
        own.evaluate({"x": pipelines.batch()["x"]}, outputs=True)
    whole = pipelines.pipe([MeanOfAll.Params(name="m")])
    assert whole({"x": pipelines.batch()["x"]}).shape == [5]
