"""How a network is cut from its params: by given cuts, costs, speeds and memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, network
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.lm.input import Tokens
from tests.networks.plain_networks import FIELDS, D, N, analyze, dense, error_head, params, text_of

# --- cuts and costs -------------------------------------------------------------------------------


def test_cuts_of_another_number_are_refused() -> None:
    assert text_of(errors.PartitionError, dense(4), dense(3), cuts=(1, 1)) == (
        "cuts=[1, 1] has 2 cells, but num_partitions=1. Give each cell's number of layers, "
        "or cuts=None to cut by cost, or set num_partitions=2"
    )


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ((3, 0, 3), "cuts=[3, 0, 3]: cell 1 has 0 layers. Give each cell a whole number from 1"),
        ((1, 2, 1), "cuts=[1, 2, 1] sums to 4, but there are 6 layers. Change it by +2"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(cuts: tuple[int, ...], text: str) -> None:
    own = {"num_partitions": 3, "cuts": cuts}
    assert text_of(errors.PartitionError, *[dense(4)] * 6, **own) == text


def test_a_table_of_several_cells_per_device_is_named_where_cuts_do_not_fit() -> None:
    own = {"num_partitions": 2, "schedule": "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"}
    given = [dense(4) for _ in range(4)]
    text = text_of(errors.PartitionError, *given, cuts=(2, 2), **own)
    assert text.endswith(
        "or cuts=None to cut by cost, or set cells_per_device or a table of 2 cells"
    )
    assert text_of(errors.PartitionError, *given[1:], **own).endswith("of at most 3 cells")


def test_a_negative_cost_is_reported_with_its_layer() -> None:
    for limit in (None, "8GiB"):
        text = text_of(errors.PartitionError, dense(4, name="d", cost=-1.0), device_memory=limit)
        assert text == "d has cost=-1.0. Use 0 or more"


def test_explicit_cuts_are_taken() -> None:
    found = analyze(dense(4), dense(4), dense(4), num_partitions=2, cuts=(1, 2))
    assert found.cuts == (1, 2)
    assert [found.cell_of(n) for n in range(3)] == [0, 1, 1]


def test_cuts_follow_flops() -> None:
    """Six equal layers: the last cell recomputes nothing where every backward is fused."""
    equal = [dense(D) for _ in range(6)]
    assert analyze(*equal, num_partitions=2, num_micro_batches=4).cuts == (3, 3)
    fused = analyze(*equal, num_partitions=2, num_micro_batches=4, schedule="1f1b")
    assert fused.cuts == (2, 4)  # 4+4 against 3·4, since recomputation is a quarter
    assert analyze(*equal, num_partitions=2, schedule="1f1b", fuse=False).cuts == (3, 3)


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_faster_devices_get_more_layers(limit: str | None) -> None:
    equal = [dense(D) for _ in range(8)]
    own = {"num_partitions": 3, "fuse": False, "device_memory": limit}
    assert analyze(*equal, device_speeds=(1.0, 2.0, 1.0), **own).cuts == (2, 4, 2)
    assert analyze(*equal, device_speeds=(3.0, 3.0, 3.0), **own).cuts == analyze(*equal, **own).cuts


def test_all_cells_of_a_device_are_as_fast_as_it() -> None:
    own = {"num_partitions": 2, "schedule": "interleaved", "num_micro_batches": 4}
    own |= {"device_speeds": (1.0, 2.0), "fuse": False}
    found = analyze(*(dense(D) for _ in range(12)), **own)
    assert (found.cuts, tuple(cell.device_speed for cell in found.cells)) == (
        (2, 4, 2, 4),
        (1.0, 2.0, 1.0, 2.0),
    )


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -2.0), (1.0, 1.0, 1.0)])
def test_speeds_that_are_none_are_refused(speeds: tuple[float, ...]) -> None:
    own = {"num_partitions": 2, "device_speeds": speeds}
    assert text_of(errors.PartitionError, dense(4), dense(4), **own) == (
        f"device_speeds={list(speeds)}, but num_partitions=2. Give a number above 0 for "
        "each, or none where all are equally fast"
    )


def test_costs_are_forward_recomputation_and_backward() -> None:
    flops = 2 * N * D * D
    for policy, again in (("full", 1), ("never", 0)):
        found = analyze(dense(D), dense(D), fuse=False, recompute=policy)
        assert [cell.costs for cell in found.cells] == [(flops * (1 + again + 2),) * 2]


def test_each_cells_policy_decides_what_layers_cost_in_it() -> None:
    flops = 2 * (N // 4) * D * D
    given = [dense(D) for _ in range(11)]
    found = analyze(
        *given, num_partitions=3, num_micro_batches=4, recompute="full,never,except_last"
    )
    kept, once, all_again = 3.0, 3.75, 4.0
    assert [cell.costs[0] / flops for cell in found.cells] == [all_again, kept, once]
    assert found.cuts == (3, 5, 3)  # 12, 15 and 11.25
    assert analyze(*given, num_partitions=3, fuse=False).cuts == (3, 4, 4)
    found = analyze(*given, num_partitions=3, recompute="never,full,full", fuse=False)
    assert found.cuts == (5, 3, 3)


def test_a_split_backward_costs_no_more_than_a_whole_one() -> None:
    flops = 2 * (N // 2) * D * D
    split = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1"
    found = analyze(dense(D), dense(D), num_partitions=2, num_micro_batches=2, schedule=split)
    # A forward, the same again, and twice as much for its gradients; in the last cell I follows F,
    # and nothing is computed again.
    assert [cell.costs[0] / flops for cell in found.cells] == [4.0, 3.0]


def test_a_stated_cost_holds_in_every_cell() -> None:
    given = [dense(D, cost=5.0), dense(D), dense(D)]
    found = analyze(*given, num_partitions=3, recompute="full,never,full")
    assert [cell.costs[0] for cell in found.cells] == [5.0] * 3
    assert found.cells[0].costs[1] > found.cells[1].costs[1]


def test_cells_per_device_are_cut_and_placed() -> None:
    own = {"num_partitions": 2, "num_micro_batches": 2}
    found = analyze(*[dense(4)] * 6, **own, schedule="interleaved", cells_per_device=3)
    assert found.cuts == (1,) * 6
    assert [cell.device_number for cell in found.cells] == [0, 1] * 3
    found = analyze(*[dense(4)] * 6, **own, schedule="zb_v")
    assert [cell.device_number for cell in found.cells] == [0, 1, 1, 0]
    evaluated = found.evaluation_pass(3, outputs=False).table
    assert [evaluated.device_of(k) for k in range(4)] == [0, 1, 1, 0]


def test_cells_that_share_devices_are_cut_for_a_short_step() -> None:
    """Even cells would leave three quarters of the work on one device."""
    own = {"num_partitions": 2}
    stated = [dense(4, cost=cost) for cost in (1.0, 43.0, 0.0, 22.0, 0.0, 34.0)]
    for memory in (None, "1GiB"):
        given = {**own, "schedule": "interleaved", "device_memory": memory}
        found = analyze(*stated, **given, num_micro_batches=4)
        assert found.cuts == (2, 2, 1, 1)
    assert analyze(*stated, **own, schedule="1f1b", num_micro_batches=4).cuts == (2, 4)


def test_a_network_without_cuts_has_one_cell_per_device() -> None:
    own = params(*[dense(4)] * 4, num_partitions=2, schedule="interleaved", cells_per_device=2)
    assert len(network.analyze(network.uncut(own), FIELDS).cells) == 1


@pytest.mark.parametrize("field", ["num_partitions", "cells_per_device", "num_micro_batches"])
def test_counts_begin_at_one(field: str) -> None:
    text = text_of(errors.PartitionError, dense(4), **{field: 0})
    assert text == f"{field}=0, but it must be at least 1"


# --- memory ---------------------------------------------------------------------------------------


def light_end(**fields: Any) -> network.Analysis:
    """Two layers with 4 MiB of weights, and a last layer that costs most and needs no memory."""
    given = [dense(1024, cost=1.0) for _ in range(3)] + [dense(3, cost=9.0)]
    return analyze(*given, num_partitions=2, **fields)


def test_a_devices_memory_moves_the_cut() -> None:
    assert light_end().cuts == (3, 1)
    # Weight, gradient, two slots: 16 MiB for each of the two. New weight, new slots and their
    # intermediate results: 16 MiB for one layer at a time.
    assert light_end(device_memory="50MiB").cuts == (3, 1)
    assert light_end(device_memory="46MiB").cuts == (2, 2)
    # 12 MiB for each, 12 MiB for one at a time.
    assert light_end(device_memory="38MiB", slots_per_weight=1).cuts == (3, 1)


def test_frozen_layers_keep_no_activations() -> None:
    fields = {"x": tf.TensorSpec([4096, D]), "target": tf.TensorSpec([4096, 3])}
    given = params(*(dense(D) for _ in range(6)), dense(3), error_head(), device_memory="700KiB")
    with pytest.raises(errors.PartitionError, match=r"but no cut into 1 cells fits"):
        network.analyze(given, fields)
    given.frozen = ("dense/*", *(f"dense_{n}/*" for n in range(1, 6)))
    assert network.analyze(given, fields).cuts == (8,)
    # A kept forward keeps what its backward reads: of frozen layers nothing more.
    given.recompute = "never"
    assert network.analyze(given, fields).cuts == (8,)
    for profile in (False, True):
        plan = step_plan.make(given, fields, profile=profile)
        assert plan.heaviest_bytes <= 700 * 1024


def test_stated_cuts_are_kept_whatever_the_memory() -> None:
    assert light_end(device_memory="1KiB", cuts=(1, 3)).cuts == (1, 3)


def test_too_little_memory_names_the_layer_or_the_need() -> None:
    text = text_of(errors.PartitionError, dense(1024), dense(1024), device_memory="20MiB")
    assert text == (
        "device_memory=20MiB, but layer dense_1 alone needs 32.0 MiB. Use fewer examples, more "
        "micro-batches, or larger devices"
    )
    many = [dense(1024) for _ in range(6)]
    text = text_of(errors.PartitionError, *many, num_partitions=3, device_memory="40MiB")
    assert text == (
        "device_memory=40MiB, but no cut into 3 cells fits: in one cell, the layers need 100 MiB. "
        "Use more partitions, more micro-batches, or larger devices"
    )
    assert "is not a size" in text_of(errors.ParamsError, dense(4), device_memory="8 giraffes")


@pytest.mark.parametrize("memory", ["12MiB", "20MiB"])
def test_a_layer_larger_than_a_device_is_refused_until_its_slices_fit(memory: str) -> None:
    """Each refusal names a layer and more slices of it than it has."""
    given = network.PipelineParams(
        layers=transformer.language_model(2, units=32, heads=2, hidden=64, vocabulary=20_000),
        num_partitions=5,
        num_micro_batches=8,
        device_memory=memory,
    )
    tokens = Tokens.Params(batch_size=8, data_dir="missing", length=32).instantiate()
    fields = tokens.element_spec(training=True)
    numbers: dict[str, int] = {}
    while refusal := refused(given.set(slices=dict(numbers)), fields):
        found = re.search(r"at least (\d+) slices of (\w+) \(model.slices\)$", refusal)
        assert found is not None, refusal
        name, number = found[2], int(found[1])
        assert number > numbers.get(name, 1)
        numbers[name] = number
    assert numbers["softmax"] >= 2


def refused(given: network.PipelineParams, fields: Any) -> str:
    """Return why a network cannot be cut, or an empty text."""
    try:
        network.analyze(given, fields)
    except errors.PartitionError as error:
        return str(error)
    return ""
