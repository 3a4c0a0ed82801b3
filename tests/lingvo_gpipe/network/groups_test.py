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
    ("fields", "num_examples", "expected"),
    [
        ({"num_micro_batches": 128}, 256, 1),
        ({"num_micro_batches": 129}, 256, 3),
        ({"num_micro_batches": 512}, 512, 4),
        ({"num_micro_batches": 300}, 1000, 3),
        ({"num_micro_batches": 512}, 100, 1),  # a smaller mini-batch of an evaluation
        ({"micro_batch_size": 2}, 1023, 4),
        ({"num_micro_batches": 257}, 257, 1),  # no divisor fits
        ({"num_micro_batches": 514}, 514, 1),  # groups of 2 would mostly fill and drain
        ({"num_micro_batches": 12, "group_size": 5}, 12, 3),
        ({"num_micro_batches": 12, "group_size": 5, "num_replicas": 3}, 12, 1),
        ({"num_micro_batches": 12, "group_size": 2, "num_replicas": 2}, 12, 3),
        ({"num_micro_batches": 12, "group_size": 1, "num_replicas": 5}, 12, 1),
        ({"num_micro_batches": 12, "group_size": 5, "schedule": "0F0,0B0"}, 12, 1),
        ({"num_micro_batches": 12, "group_size": 5, "schedule": "auto"}, 12, 3),
        ({"num_micro_batches": 10**12}, 10**12, 10**12 // 128),
    ],
)
def test_how_many(fields: dict[str, object], num_examples: int, expected: int) -> None:
    assert groups.count(params(**fields), num_examples) == expected


@pytest.mark.parametrize(
    ("fields", "num_examples"),
    [
        ({"num_micro_batches": 12}, 12),
        ({"num_micro_batches": 12}, 31),
        ({"num_micro_batches": 9}, 23),
        ({"micro_batch_size": 3}, 36),
        ({"micro_batch_size": 3}, 34),
    ],
)
def test_they_have_the_micro_batches_of_the_mini_batch(
    fields: dict[str, object], num_examples: int
) -> None:
    whole = params(**fields, group_size=4)
    x = tf.range(num_examples)
    made = groups.of(whole, {"x": tf.TensorSpec([num_examples], tf.int32)})
    assert made.count == 3
    cut = made.cut({"x": x})
    np.testing.assert_array_equal(tf.concat([group["x"] for group in cut], 0), x)
    sizes = [micro_batches.sizes_of(made.params, group) for group in cut]
    assert [len(of_group) for of_group in sizes] == [made.size] * 3
    assert sum(sizes, ()) == micro_batches.sizes_of(whole, {"x": x})
    assert made.fields["x"].shape == cut[0]["x"].shape


def test_a_field_without_examples_is_in_each_group() -> None:
    whole = params(num_micro_batches=8, group_size=4, unbatched=("table",), batch_dim=1)
    fields = {"x": tf.reshape(tf.range(16), [2, 8]), "table": tf.zeros([3])}
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, fields)
    first, second = groups.of(whole, specs).cut(fields)
    assert first["table"] is second["table"] is fields["table"]
    np.testing.assert_array_equal(second["x"], [[4, 5, 6, 7], [12, 13, 14, 15]])


def test_what_each_host_reads_in_parts_is_one_group() -> None:
    specs = {"x": tf.TensorSpec([16], tf.int32)}
    assert groups.of(params(num_micro_batches=16, group_size=4), specs, in_parts=True).count == 1


def test_a_group_has_a_micro_batch() -> None:
    with pytest.raises(errors.PartitionError, match="group_size=0, but a group has at least one"):
        groups.count(params(group_size=0), 4)
