"""Parts of a mini-batch: each example is in one, and a network computes on them as on the whole."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies

from lingvo_gpipe import errors, layers, pipelining
from lingvo_gpipe.network import micro_batches, parts, replicas

NUM_EXAMPLES = 7


def part(replica: int, num_replicas: int, num_micro_batches: int) -> parts.ReplicaPart:
    return parts.ReplicaPart(replica, num_replicas, num_micro_batches)


@given(
    num_examples=strategies.integers(1, 40),
    num_micro_batches=strategies.integers(1, 12),
    num_replicas=strategies.integers(1, 5),
)
def test_parts_are_what_replicas_compute(
    num_examples: int, num_micro_batches: int, num_replicas: int
) -> None:
    sizes = micro_batches.sizes(num_examples, num_micro_batches)
    expected = [sum(sizes[m] for m in share) for share in replicas.shares(len(sizes), num_replicas)]
    found = [
        part(replica, num_replicas, num_micro_batches).examples(num_examples)
        for replica in range(num_replicas)
    ]
    assert [len(one) for one in found] == expected
    assert [number for one in found for number in one] == list(range(num_examples))


def batch() -> dict[str, tf.Tensor]:
    random = np.random.RandomState(0)
    return {
        "x": tf.constant(random.normal(size=(NUM_EXAMPLES, 3))),
        "label": tf.constant(random.randint(0, 2, NUM_EXAMPLES).astype(np.int32)),
        "weight": tf.constant(random.randint(0, 3, NUM_EXAMPLES).astype(np.float64)),
    }


def in_parts(num_replicas: int = 3) -> parts.InParts:
    """Return the mini-batch in the parts of 4 micro-batches: 4, 2 and 1 examples."""
    return parts.InParts([part(r, num_replicas, 4).cut(batch()) for r in range(3)])


def test_parts_are_joined_where_a_field_is_looked_up() -> None:
    joined = in_parts()
    assert [len(fields["x"]) for fields in joined.parts] == [4, 2, 1]
    assert list(joined) == ["x", "label", "weight"]
    assert len(joined) == 3
    for name, value in batch().items():
        assert np.array_equal(joined[name], value)
    assert parts.num_examples(joined) == parts.num_examples(batch()) == NUM_EXAMPLES


@pytest.mark.parametrize("rows", [[0], [6, 1, 4, 0], [5, 4], [3, 2]])
def test_a_few_examples_are_taken_in_their_order(rows: list[int]) -> None:
    for whole in (batch(), in_parts()):
        taken = parts.take(whole, rows)
        for name, value in batch().items():
            assert np.array_equal(taken[name], np.asarray(value)[rows]), name


@functools.cache
def network() -> pipelining.PipeliningLayer:
    """Return a network of three replicas, with dropout and batch norm."""
    made: pipelining.PipeliningLayer = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(name="d0", units=4, activation="tanh"),
            layers.BatchNorm.Params(name="norm"),
            layers.Dropout.Params(name="drop", rate=0.25),
            layers.Softmax.Params(name="head", classes=2, reads=("x", "label", "weight")),
        ],
        num_partitions=2,
        num_replicas=3,
        num_micro_batches=4,
        dtype="float64",
    ).instantiate()
    made.build(batch())
    return made


def bits(given: parts.Batch) -> list[Any]:
    """Return all that a network computes of a mini-batch, and its evaluation."""
    pipe = network()
    trained = pipe.value_and_gradients(given, step=3)
    evaluated = pipe.evaluate(given, outputs=True)
    nests = (trained.loss, trained.gradients, trained.moments, trained.sums)
    found = [*tf.nest.flatten(nests), *tf.nest.flatten((evaluated.loss, evaluated.outputs))]
    return [np.asarray(value).tobytes() for value in found]


def test_a_network_computes_on_parts_as_on_the_whole() -> None:
    expected = bits(batch())
    read = in_parts()
    assert bits(read) == expected
    assert network().first_nonfinite(read) == "nowhere"
    first, second, _ = read.parts
    repeated = {name: value[:1] for name, value in second.items()}
    assert bits((first, second, repeated)) != expected


def test_parts_that_are_not_those_of_the_replicas_are_refused() -> None:
    first, second, third = in_parts().parts
    with pytest.raises(errors.InputError, match=r"have \[2, 4, 1\] examples, but .* \[4, 2, 1\]"):
        network().value_and_gradients((second, first, third))


def test_a_loss_that_is_a_sum_is_that_of_the_mini_batch() -> None:
    """Its divisor is 1, however many parts the mini-batch has."""
    loss = layers.Loss.Params(
        loss="SparseCategoricalCrossentropy",
        config={"reduction": "sum", "from_logits": True},
        reads=("x", "label"),
    )
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(name="head", units=3), loss],
        num_replicas=3,
        num_micro_batches=4,
        dtype="float64",
    ).instantiate()
    whole = pipe.value_and_gradients(batch())
    assert float(whole.loss) > 5.0
    np.testing.assert_allclose(pipe.value_and_gradients(in_parts()).loss, whole.loss, rtol=1e-12)
