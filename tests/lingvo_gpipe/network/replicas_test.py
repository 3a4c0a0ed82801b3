"""Shares of micro-batches and owners of variables: pure Python."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tensorflow as tf
from hypothesis import given, strategies

from lingvo_gpipe import errors, layers, pipelining
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import replicas


def test_shares_are_consecutive_and_differ_by_at_most_one() -> None:
    for num_micro_batches, num_replicas in itertools.product(range(1, 33), range(1, 9)):
        shares = replicas.shares(num_micro_batches, num_replicas)
        assert len(shares) == num_replicas
        assert list(itertools.chain(*shares)) == list(range(num_micro_batches))
        lengths = [len(share) for share in shares]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


def variable(elements: int, dtype: tf.DType = tf.float32) -> base.VariableSpec:
    return base.VariableSpec("w", (elements,), dtype, initializer=lambda *_: tf.zeros([]))


@given(
    sizes=strategies.lists(strategies.integers(0, 1000), min_size=1, max_size=20),
    num_replicas=strategies.integers(1, 5),
    num_devices=strategies.integers(1, 3),
)
def test_no_owner_has_more_than_the_mean_and_one_variable(
    sizes: list[int], num_replicas: int, num_devices: int
) -> None:
    costs = {f"{n}/w": size for n, size in enumerate(sizes)}

    def device_of(path: str) -> int:
        return int(path.partition("/")[0]) % num_devices

    owners = replicas.owners(costs, device_of, num_replicas)
    assert list(owners) == list(costs)
    for device in range(num_devices):
        here = {path: size for path, size in costs.items() if device_of(path) == device}
        mean = sum(here.values()) / num_replicas
        for replica in range(num_replicas):
            owned = sum(size for path, size in here.items() if owners[path] == replica)
            assert owned <= mean + max(here.values(), default=0)
    assert owners == replicas.owners(dict(reversed(costs.items())), device_of, num_replicas)


def test_an_owner_holds_slots_and_what_others_send() -> None:
    weight = dataclasses.replace(variable(100), gradient_rows=None)
    frozen = dataclasses.replace(weight, trainable=False)
    table = dataclasses.replace(weight, shape=(100, 1), gradient_rows=5)
    assert replicas.owned_bytes(weight, 2, 3, 2.0) == 400 + 800 + 2 * 400
    assert replicas.owned_bytes(frozen, 2, 3, 2.0) == 400
    # Rows of 4 bytes, and 8 for the number of each.
    assert replicas.owned_bytes(table, 2, 3, 2.0) == 400 + 800 + 2 * (2 * 5 * 12)


def network(**fields: object) -> pipelining.PipeliningLayer.Params:
    return pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(units=2)],
        **fields,  # type: ignore[arg-type]
    )


def test_the_first_share_is_a_pipeline_without_replicas() -> None:
    params = network(num_micro_batches=5, num_replicas=2, devices=("a", "b"))
    one, fields = replicas.first_share(params, {"x": tf.TensorSpec([11, 3])})
    assert (one.num_replicas, one.num_micro_batches, one.devices) == (1, 3, ("a",))
    assert fields["x"].shape == [7, 3]  # of 3, 2, 2, 2 and 2 examples


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_replicas": 0}, "num_replicas=0, but it must be at least 1"),
        ({"num_replicas": 2}, "num_replicas=2, but a mini-batch has 1 micro-batch in all"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields: dict[str, object], text: str) -> None:
    pipe = network(**fields).instantiate()
    with pytest.raises(errors.PartitionError, match=text):
        pipe.build({"x": tf.zeros([8, 3])})
