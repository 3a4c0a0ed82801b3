"""Pipelined equals plain: a pairwise covering set here, the whole grid by `make sameness`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import pipelining, seeds
from lingvo_gpipe import schedule as schedules
from lingvo_gpipe.execution import cell_programs, executor, replica_pass, variables
from lingvo_gpipe.layers import base, sequence_softmax, slices
from lingvo_gpipe.network import micro_batches
from tests import sameness
from tests.networks import amoeba_nets, mt_nets, sameness_nets

Case = sameness.Case


@pytest.mark.parametrize("case", sameness.COVERING, ids=str)
def test_pipelined_is_plain_on_a_covering_set(case: Case, record_property: Any) -> None:
    record_property("sameness_error", sameness.check(case))


@pytest.mark.sameness_grid
@pytest.mark.parametrize("case", sameness.grid(), ids=str)
def test_pipelined_is_plain_everywhere(case: Case, record_property: Any) -> None:
    record_property("sameness_error", sameness.check(case))


def test_every_schedule_is_in_a_grid() -> None:
    found = {schedule for each in sameness.GRIDS for schedule in each.axes[3]}
    assert found == set(schedules.SCHEDULES)


@pytest.mark.parametrize("each", sameness.GRIDS, ids=range(len(sameness.GRIDS)))
def test_covering_set_holds_every_pair(each: sameness.Grid) -> None:
    fields = list(Case.__dataclass_fields__)[: len(each.axes)]
    cases = {tuple(getattr(case, f) for f in fields) for case in sameness.COVERING}
    assert len(each.pairs()) > 10 or len(each.apart) == math.comb(len(each.axes), 2)
    for i, values in enumerate(each.axes):
        assert {point[i] for point in cases} >= set(values)
    for i, a, j, b in each.pairs():
        assert any(point[i] == a and point[j] == b for point in cases), (a, b)


def test_a_thinned_grid_holds_every_four_values() -> None:
    (thinned,) = (each for each in sameness.GRIDS if each.thinned > 1)
    whole = thinned.whole()
    for four in itertools.combinations(range(len(thinned.axes)), 4):
        found = {tuple(point[i] for i in four) for point in whole}
        assert found == set(itertools.product(*(thinned.axes[i] for i in four)))


def test_an_update_accumulates_only_with_the_losses_inside() -> None:
    with pytest.raises(ValueError, match="numbers its micro-batches from 0"):
        Case("dense", 2, 3, "gpipe", "own tape", "full", accumulate=2)


@pytest.mark.parametrize("net", mt_nets.NETS)
def test_cuts_lie_in_the_encoder_between_and_in_the_decoder(net: str) -> None:
    """Between two layers of the encoder or decoder, and next to the embedding of the target."""
    found = set()
    for case in sameness.COVERING:
        if case.net == net:
            analysis = sameness.analyze(case)
            names = [layer.name for layer in analysis.layers]
            for place in itertools.accumulate(analysis.cuts[:-1]):
                sides = [re.sub(r"_\d+$", "", name) for name in names[place - 1 : place + 1]]
                found.add("between" if "target_embedding" in sides else "|".join(sides))
    assert found >= {"encoder|encoder", "between", "decoder|decoder"}


@pytest.mark.parametrize(
    "recompute",
    ["full,never,full", "never,full,except_last", "early,recompute_grad,early"],
)
def test_policies_differ_per_cell(recompute: str) -> None:
    assert sameness.check(Case("skip", 3, 3, "1f1b", "losses inside", recompute)) <= 1e-10


@pytest.mark.parametrize("cuts", [(1, 1, 8), (8, 1, 1)])
def test_any_cut(cuts: tuple[int, ...]) -> None:
    case = Case("skip", 3, 3, "gpipe", "losses inside", "full")
    assert sameness.check(case, cuts=cuts) <= 1e-10


@pytest.mark.sameness_grid
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_amoeba_net_with_the_stem_of_large_images(schedule: str, record_property: Any) -> None:
    case = Case(amoeba_nets.IMAGENET.name, 5, 3, schedule, "losses inside", "full")
    record_property("sameness_error", sameness.check(case))


@pytest.mark.parametrize(
    ("schedule", "cells_per_device"), [("interleaved", 4), ("zb_h1", 2), ("optimal", 2)]
)
def test_other_numbers_of_cells_per_device(schedule: str, cells_per_device: int) -> None:
    case = Case("skip", 2, 3, schedule, "losses inside", "full")
    assert sameness.check(case, cells_per_device=cells_per_device) <= 1e-10


def test_without_fusing() -> None:
    case = Case("conv", 2, 3, "1f1b", "losses inside", "full")
    assert sameness.check(case, fuse=False) <= 1e-10


@pytest.mark.parametrize(
    ("net", "recompute"),
    [
        ("tied", "except_last"),
        ("frozen", "never"),
        ("recomputed", "full"),
        ("conv", "early"),
        ("mixed", "recompute_grad"),
    ],
)
def test_hand_written_table_with_split_backward(net: str, recompute: str) -> None:
    table = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W1,1W0"
    case = Case(net, 2, 2, table, "losses inside", recompute)
    assert sameness.check(case) <= 1e-10


def test_float32_is_close() -> None:
    case = Case("tied", 3, 3, "1f1b", "losses inside", "full")
    fields = {
        name: tf.cast(v, tf.float32) if v.dtype.is_floating else v
        for name, v in sameness_nets.TIED.fields().items()
    }
    settings = {"dtype": "float32"}
    plain = sameness.build(Case("tied", 1, 3, "gpipe", "", "never"), **settings)
    pipe = sameness.build(case, **settings)
    one = plain.value_and_gradients(fields, step=5)
    other = pipe.value_and_gradients(fields, step=5)
    for path, gradient in one.gradients.items():
        assert gradient.dtype == tf.float32
        np.testing.assert_allclose(
            other.gradients[path], gradient, atol=2e-5 * float(tf.reduce_max(tf.abs(gradient)))
        )


def test_bits_are_equal_between_two_runs() -> None:
    case = Case("conv", 3, 3, "1f1b", "losses inside", "full")
    one, other = sameness.pipelined(case), sameness.pipelined(case)
    for path, gradient in one.gradients.items():
        np.testing.assert_array_equal(gradient, other.gradients[path])


# --- broken on purpose: each of these must be found -----------------------------------------------


def _drop_micro_batch(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.store

    def store(self: Any, slot: Any, results: Any) -> None:
        if slot.micro_batch == 1:
            results = dataclasses.replace(results, weights=[])
        true(self, slot, results)

    patch.setattr(replica_pass.ReplicaPass, "store", store)


def _swap_cells(patch: pytest.MonkeyPatch) -> None:
    true = variables.PipelineVariables.read

    def read(self: Any) -> Any:
        weights = true(self)
        for part in ("kernel", "bias"):  # d1, d2, d3 are of one shape, in cells of their own
            weights[f"d2/{part}"], weights[f"d3/{part}"] = (
                weights[f"d3/{part}"],
                weights[f"d2/{part}"],
            )
        return weights

    patch.setattr(variables.PipelineVariables, "read", read)


def _stale_seed(patch: pytest.MonkeyPatch) -> None:
    true = seeds.micro_batch_seed
    patch.setattr(seeds, "micro_batch_seed", lambda seed, step, m: true(seed, step, m * 0))


def _fresh_seed_in_recomputation(patch: pytest.MonkeyPatch) -> None:
    true = cell_programs.CellPrograms.run

    def run(self: Any, cell: Any, name: str, inputs: Any, *rest: Any) -> Any:
        seed = inputs.seed + (name == "B")
        return true(self, cell, name, inputs._replace(seed=seed), *rest)

    patch.setattr(cell_programs.CellPrograms, "run", run)


def _double_batch_norm(patch: pytest.MonkeyPatch) -> None:
    true = pipelining.PipeliningLayer.merge_moments

    def merge(self: Any, moments: Any) -> Any:
        for path, value in true(self, moments).items():
            self.by_path[path].assign(value)
        return true(self, moments)

    patch.setattr(pipelining.PipeliningLayer, "merge_moments", merge)


def _unrouted_consumer(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.backward_inputs

    def backward_inputs(self: Any, *key: Any) -> Any:
        for of_micro_batch in self.value_gradients.values():
            of_micro_batch.update({v: readers[:1] for v, readers in of_micro_batch.items()})
        return true(self, *key)

    patch.setattr(replica_pass.ReplicaPass, "backward_inputs", backward_inputs)


def _weight_by_micro_batch(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.backward_inputs
    sizes: list[int] = []
    original = micro_batches.sizes

    def remember(*args: Any) -> Any:
        sizes[:] = original(*args)
        return tuple(sizes)

    def backward_inputs(self: Any, k: int, m: int) -> Any:
        share = sameness_nets.N / (len(sizes) * sizes[m])
        inputs = true(self, k, m)
        return inputs._replace(loss_factors=[scale * share for scale in inputs.loss_factors])

    patch.setattr(micro_batches, "sizes", remember)
    patch.setattr(replica_pass.ReplicaPass, "backward_inputs", backward_inputs)


def _uncollected_loss(patch: pytest.MonkeyPatch) -> None:
    def recomputed(layer: Any, theta: Any, inputs: Any, ctx: Any) -> Any:
        given = (theta, inputs, ctx.state, ctx.root_seed, ctx.step)

        def forward(*flat: tf.Tensor) -> Any:
            own, x, state, seed, step = tf.nest.pack_sequence_as(given, list(flat))
            sub = ctx.replace(state=state, root_seed=seed, step=step, collected=base.Collected())
            y = layer.fprop(own, x, sub)
            kept[:] = [sub.collected.as_nest()]
            return y

        kept: list[Any] = []
        y = tf.recompute_grad(forward)(*tf.nest.flatten(given))
        # Computed inside, but not returned: no gradient comes back through it.
        ctx.collected.update(tf.nest.map_structure(tf.stop_gradient, kept[0]))
        return y

    patch.setattr(base, "recomputed", recomputed)


def _drop_replica(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.weight_gradients

    def weight_gradients(self: Any) -> Any:
        gradients = true(self)
        return gradients if self.replica == 0 else {p: 0 * g for p, g in gradients.items()}

    patch.setattr(replica_pass.ReplicaPass, "weight_gradients", weight_gradients)


def _change_shares(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Change every replica but the first; field → function of the first and of this one."""
    true = executor.Executor.passes

    def passes(*args: Any, **kwargs: Any) -> Any:
        first, *others = true(*args, **kwargs)
        return [
            first,
            *(
                dataclasses.replace(
                    other, **{name: new(first, other) for name, new in changed.items()}
                )
                for other in others
            ),
        ]

    patch.setattr(executor.Executor, "passes", passes)


def _seeds_by_replica(patch: pytest.MonkeyPatch) -> None:
    _change_shares(patch, seeds=lambda first, own: first.seeds[: len(own.seeds)])


def _stale_weights_in_a_replica(patch: pytest.MonkeyPatch) -> None:
    _change_shares(
        patch,
        variables=lambda _, own: {path: value + 0.01 for path, value in own.variables.items()},
    )


def _forgotten_sums(patch: pytest.MonkeyPatch) -> None:
    true = executor.Executor.collected
    patch.setattr(executor.Executor, "collected", lambda self, passes: true(self, passes[:1]))


def _forgotten_slice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence_softmax, "added_log_sums", lambda before, here: here + 0.0 * before)


def _best_of_the_last_slice(patch: pytest.MonkeyPatch) -> None:
    """Every slice takes the place of the best id so far."""
    true = sequence_softmax.added

    def added(before: Any, here: Any) -> Any:
        return true(before, here) | {name: here[name] for name in ("largest", "largest_id")}

    patch.setattr(sequence_softmax, "added", added)


def _slice_without_a_shift(patch: pytest.MonkeyPatch) -> None:
    """Every slice looks for its ids where the first one begins."""
    true = slices.inside
    patch.setattr(slices, "inside", lambda ids, first, size: true(ids, 0 * first, size))


def _drop_earlier_mini_batches(patch: pytest.MonkeyPatch) -> None:
    true = executor.Executor.train

    def train(self: Any, batch: Any, **kwargs: Any) -> Any:
        return true(self, batch._replace(accumulators=None), **kwargs)

    patch.setattr(executor.Executor, "train", train)


def _earlier_sum_in_every_replica(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.start_accumulators

    def start(self: Any) -> None:
        true(self)
        given = self.earlier_gradients
        for cell, sums in zip(self.network_pass.cells, self.accumulators, strict=True):
            sums[:] = sums if given is None else [given[path] for path in cell.weights]

    patch.setattr(replica_pass.ReplicaPass, "start_accumulators", start)


def _drop_sums_of_an_idle_replica(patch: pytest.MonkeyPatch) -> None:
    """A replica without micro-batches forgets the earlier sums of the weights that it owns."""
    true = executor.Executor.gradients

    def gradients(self: Any, passes: Any) -> Any:
        passes[0].earlier_gradients = None
        return true(self, passes)

    patch.setattr(executor.Executor, "gradients", gradients)


def _seeds_by_mini_batch(patch: pytest.MonkeyPatch) -> None:
    """Every mini-batch draws as if it were the first one of its update."""
    true = executor.Executor.train

    def train(self: Any, batch: Any, **kwargs: Any) -> Any:
        return true(self, batch._replace(first_micro_batch=tf.constant(0)), **kwargs)

    patch.setattr(executor.Executor, "train", train)


def _moments_of_the_last_mini_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelining.PipeliningLayer, "add_moments", lambda self, one, other: other)  # noqa: ARG005


def _drop_weight_gradient(patch: pytest.MonkeyPatch) -> None:
    true = replica_pass.ReplicaPass.issue

    def issue(self: Any, device: int, slot: Any, call: Any) -> None:
        if (slot.phase, slot.micro_batch) != ("W", 1):
            true(self, device, slot, call)

    patch.setattr(replica_pass.ReplicaPass, "issue", issue)


def _left_of_another_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """W of micro-batch 2 computes from what I of micro-batch 1 left; both have the same size."""
    true = replica_pass.ReplicaPass.store

    def store(self: Any, slot: Any, results: Any) -> None:
        true(self, slot, results)
        k, m = slot.cell, slot.micro_batch
        if (slot.phase, m) == ("I", 2):
            self.held[k, m] = self.held[k, m - 1]

    patch.setattr(replica_pass.ReplicaPass, "store", store)


BREAKS: dict[str, tuple[Any, ...]] = {
    "a dropped micro-batch": (_drop_micro_batch, "dense", 4, 3, "gradient of"),
    "a swapped pair of cells": (_swap_cells, "dense", 4, 3, "loss"),
    "a stale seed": (_stale_seed, "conv", 2, 3, "loss"),
    "another mask in the recomputation": (_fresh_seed_in_recomputation, "tied", 3, 3, "gradient"),
    "a doubled batch-norm update": (_double_batch_norm, "conv", 2, 3, "statistic"),
    "an unrouted second consumer": (_unrouted_consumer, "skip", 4, 3, "gradient of"),
    "a loss weighted by micro-batch": (_weight_by_micro_batch, "dense", 2, 3, "gradient of"),
    "a loss collected inside and not returned": (
        _uncollected_loss,
        "recomputed",
        2,
        3,
        "gradient of",
    ),
    "a dropped replica": (_drop_replica, "tied", 2, 3, "gradient of", 2),
    "seeds by replica": (_seeds_by_replica, "conv", 2, 3, "loss", 2),
    "stale weights in a replica": (_stale_weights_in_a_replica, "dense", 2, 3, "loss", 2),
    "sums of one replica": (_forgotten_sums, "conv", 2, 3, "loss", 2),
    "a slice's log-sum-exp left out": (_forgotten_slice, "sliced", 2, 3, "loss"),
    "the best id of the last slice": (_best_of_the_last_slice, "sliced", 2, 3, "hits"),
    "ids not shifted to their slice": (_slice_without_a_shift, "sliced", 2, 3, "loss"),
    "earlier mini-batches left out": (_drop_earlier_mini_batches, "conv", 2, 3, "gradient", 1, 2),
    "an earlier sum twice": (_earlier_sum_in_every_replica, "conv", 2, 3, "gradient", 2, 2),
    "sums of an idle replica": (_drop_sums_of_an_idle_replica, "conv", 2, 8, "gradient", 3, 2),
    "seeds by mini-batch": (_seeds_by_mini_batch, "conv", 2, 3, "loss", 1, 2),
    "moments of one mini-batch": (_moments_of_the_last_mini_batch, "conv", 2, 3, "statistic", 1, 2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_on_purpose_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, net, partitions, micro_batches, found, *others = BREAKS[name]
    case = Case(net, partitions, micro_batches, "gpipe", "losses inside", "full", *others)
    wanted = sameness.reference(net, micro_batches * case.accumulate)
    cuts = (1, 1, 1, 3) if net == "dense" and partitions == 4 else None
    break_it(monkeypatch)
    with pytest.raises(sameness.DifferentError, match=found):
        sameness.compare(sameness.pipelined(case, cuts=cuts), wanted)


@pytest.mark.parametrize("break_it", [_drop_weight_gradient, _left_of_another_micro_batch])
def test_a_split_backward_broken_on_purpose_is_found(
    break_it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("dense", 2, 3, "zb_h1", "losses inside", "full")
    wanted = sameness.reference("dense", 3)
    break_it(monkeypatch)
    with pytest.raises(sameness.DifferentError, match="gradient of"):
        sameness.compare(sameness.pipelined(case), wanted)
