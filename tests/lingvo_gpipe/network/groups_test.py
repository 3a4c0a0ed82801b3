"""Groups have the micro-batches of the whole mini-batch, each once and in order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network
from lingvo_gpipe.network import groups, micro_batches


def params(**fields: object) -> network.PipelineParams:
    """Return params of a network that is never run."""
    made = network.PipelineParams(layers=[layers.Dense.Params(units=2)])
    return made.set(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_micro_batches": 128}, None),
        ({"num_micro_batches": 129}, 43),
        ({"num_micro_batches": 512}, 128),
        ({"num_micro_batches": 300}, 100),
        ({"num_micro_batches": 257}, None),  # no divisor fits
        ({"num_micro_batches": 514}, None),  # groups of 2 would mostly fill and drain
        ({"num_micro_batches": 12, "group_size": 5}, 4),
        ({"num_micro_batches": 12, "group_size": 5, "num_replicas": 3}, None),
        ({"num_micro_batches": 12, "group_size": 2, "num_replicas": 2}, 4),
        ({"num_micro_batches": 12, "group_size": 1, "num_replicas": 5}, None),
        ({"num_micro_batches": 12, "group_size": 5, "schedule": "0F0,0B0"}, None),
        ({"num_micro_batches": 12, "group_size": 5, "schedule": "auto"}, 4),
        ({"num_micro_batches": 10**12}, 128),
        # What is refused elsewhere.
        ({"num_micro_batches": 512, "num_replicas": 0}, None),
        ({"num_micro_batches": 0}, None),
    ],
)
def test_the_size_of_a_group(fields: dict[str, object], expected: int | None) -> None:
    assert groups.size_of(params(**fields)) == expected


@pytest.mark.parametrize("of_spec", [5, 12, 40])
@pytest.mark.parametrize(
    ("fields", "num_examples", "counts"),
    [
        ({"num_micro_batches": 12}, 12, [4, 4, 4]),
        ({"num_micro_batches": 12}, 31, [4, 4, 4]),
        ({"num_micro_batches": 12}, 10, [4, 4, 2]),  # a short mini-batch: one example in each
        ({"num_micro_batches": 12}, 3, [3]),
        ({"num_micro_batches": 9}, 23, [3, 3, 3]),
    ],
)
def test_they_have_the_micro_batches_of_the_mini_batch(
    fields: dict[str, object], num_examples: int, counts: list[int], of_spec: int
) -> None:
    """Also where the network was built for a mini-batch of another size."""
    whole = params(**fields, group_size=4)
    x = tf.range(num_examples)
    made = groups.make(whole, {"x": tf.TensorSpec([of_spec], tf.int32)})
    cut = made.divided({"x": x})
    np.testing.assert_array_equal(tf.concat([group.fields["x"] for group in cut], 0), x)
    sizes = [micro_batches.sizes_of(made.params, group.fields) for group in cut]
    assert [len(of_group) for of_group in sizes] == counts
    assert sum(sizes, ()) == micro_batches.sizes_of(whole, {"x": x})
    assert [group.first for group in cut] == [sum(counts[:n]) for n in range(len(counts))]
    assert {group.num_micro_batches for group in cut} == {sum(counts) if len(counts) > 1 else None}
    of_training = groups.make(whole, {"x": tf.TensorSpec([num_examples], tf.int32)})
    assert of_training.count == len(counts)
    assert of_training.fields["x"].shape == cut[0].fields["x"].shape


@pytest.mark.parametrize(("number", "num_examples"), [(200, 128), (129, 128), (512, 7)])
def test_more_micro_batches_than_examples_are_as_many_as_examples(
    number: int, num_examples: int
) -> None:
    x = tf.zeros([num_examples, 3])
    made = groups.make(params(num_micro_batches=number), {"x": tf.TensorSpec(x.shape)})
    (group,) = made.divided({"x": x})
    assert made.count == 1
    assert micro_batches.sizes_of(made.params, group.fields) == (1,) * num_examples
    (whole,) = made.divided({"x": tf.zeros([2 * number, 3])})
    assert micro_batches.sizes_of(made.params, whole.fields) == (2,) * number


def test_a_mini_batch_without_examples_is_refused() -> None:
    empty = {"x": tf.zeros([0, 3])}
    made = groups.make(params(num_micro_batches=512), {"x": tf.TensorSpec([1024, 3])})
    with pytest.raises(errors.InputError, match="has no examples"):
        made.divided(empty)


def test_a_field_without_examples_is_in_each_group() -> None:
    whole = params(num_micro_batches=8, group_size=4, unbatched=("table",))
    fields = {"x": tf.reshape(tf.range(16), [8, 2]), "table": tf.zeros([3])}
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, fields)
    first, second = (group.fields for group in groups.make(whole, specs).divided(fields))
    assert first["table"] is second["table"] is fields["table"]
    np.testing.assert_array_equal(second["x"], [[8, 9], [10, 11], [12, 13], [14, 15]])


def test_what_each_host_reads_in_parts_is_one_group() -> None:
    specs = {"x": tf.TensorSpec([16], tf.int32)}
    made = groups.make(params(num_micro_batches=16, group_size=4), specs, in_parts=True)
    assert (made.size, made.count) == (None, 1)


def test_a_group_has_a_micro_batch() -> None:
    with pytest.raises(errors.PartitionError, match="group_size=0, but a group has at least one"):
        groups.size_of(params(group_size=0))
