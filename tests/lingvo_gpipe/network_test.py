"""A network from its params alone: names, cuts, costs, ties, frozen patterns, texts of mistakes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, partition, recompute
from lingvo_gpipe.layers import base
from lingvo_gpipe.schedule import Slot, Table

N, D = 8, 6
FIELDS = {"x": tf.TensorSpec([N, D]), "target": tf.TensorSpec([N, 3])}


def dense(units: int, **fields: Any) -> Any:
    return layers.Dense.Params(units=units, **fields)


def error_head(**fields: Any) -> Any:
    return layers.MeanSquaredError.Params(**fields)


def params(*given: Any, **fields: Any) -> Any:
    return network.PipelineParams(layers=list(given), **fields)


def analyze(*given: Any, **fields: Any) -> network.Analysis:
    return network.analyze(params(*given, **fields), FIELDS)


def text_of(kind: type[errors.UserError], *given: Any, **fields: Any) -> str:
    with pytest.raises(kind) as error:
        analyze(*given, **fields)
    return str(error.value)


class Named(base.Layer):
    """x → x; gives a loss and a metric called like the layer."""

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        return base.Meta(
            inputs[0],
            losses=(base.LossSpec(f"{params.name}_loss", 1.0, lambda fields: fields["x"][0, 0]),),
            metrics=(base.MetricSpec(f"{params.name}_metric", lambda sums: sums),),
        )

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta
        ctx.add_loss(f"{self.params.name}_loss", tf.reduce_sum(inputs))
        ctx.add_sum(f"{self.params.name}_metric", tf.reduce_sum(inputs))
        return inputs


class Tripled(base.Layer):
    """x → x three times."""

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        del params
        return base.Meta((inputs[0],) * 3)

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta, ctx
        return (inputs,) * 3


# --- names ----------------------------------------------------------------------------------------


def test_layers_without_a_name_get_one_of_their_own() -> None:
    found = analyze(
        dense(4), dense(4), dense(4, name="dense_1"), layers.Dropout.Params(rate=0.5), dense(4)
    )
    assert [layer.name for layer in found.layers] == [
        "dense",
        "dense_2",
        "dense_1",
        "dropout",
        "dense_3",
    ]


def test_names_do_not_depend_on_the_cut() -> None:
    given = [dense(4), dense(5), dense(4), dense(3)]
    paths = [set(analyze(*given, num_partitions=k).variables) for k in (1, 2, 4)]
    assert paths[0] == paths[1] == paths[2]
    assert "dense_3/kernel" in paths[0]


def test_the_given_params_are_left_alone() -> None:
    own = params(dense(4), dtype="float64")
    before = own.copy()
    network.analyze(own, FIELDS)
    assert own == before
    assert own.layers[0].name == ""


def test_two_layers_of_one_name_are_refused() -> None:
    text = text_of(errors.LayerError, dense(4, name="a"), dense(4, name="a"))
    assert text == "two layers are named 'a'. Give each its own name"


def test_a_slash_in_a_name_is_refused() -> None:
    text = text_of(errors.LayerError, dense(4, name="a/b"))
    assert text == "the layer name 'a/b' holds a slash, which separates paths"


def test_no_layers_are_refused() -> None:
    assert text_of(errors.LayerError) == "the network has no layers. Fill `layers`"
    assert text_of(errors.LayerError, name="tiny") == "tiny has no layers. Fill `layers`"


def test_equal_layers_may_name_their_losses_by_themselves() -> None:
    found = analyze(dense(4), Named.Params(), Named.Params(), Named.Params(name="third"))
    assert [loss.name for loss in found.losses] == ["named_loss", "named_1_loss", "third_loss"]
    assert sorted(found.metrics) == ["named_1_metric", "named_metric", "third_metric"]


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_a_name_given_by_two_layers_is_refused(kind: str) -> None:
    labelled = layers.Softmax.Params(classes=3, reads=("x", "label"))
    second = labelled.copy().set(loss_name="other" if kind == "metric" else "loss")
    second.set(metric_prefix="second_" if kind == "loss" else "")
    own = params(dense(4), labelled, second)
    with pytest.raises(errors.LayerError) as error:
        network.analyze(own, {"x": FIELDS["x"], "label": tf.TensorSpec([N], tf.int32)})
    name = {"loss": "loss", "metric": "accuracy"}[kind]
    assert str(error.value) == (
        f"two layers give a {kind} named {name!r}. Give one of them another name"
    )


# --- cuts and costs -------------------------------------------------------------------------------


def test_ready_cells_are_the_cut() -> None:
    cells = [[dense(4)], [dense(5), dense(4)], [dense(3), error_head()]]
    found = network.analyze(network.PipelineParams(cells=cells, num_partitions=3), FIELDS)
    assert found.cuts == (1, 2, 2)
    assert [layer.name for layer in found.layers][:3] == ["dense", "dense_1", "dense_2"]
    flat = analyze(*[layer for cell in cells for layer in cell], num_partitions=3, cuts=(1, 2, 2))
    assert list(flat.variables) == list(found.variables)
    assert flat.routes == found.routes


def test_ready_cells_of_another_number_are_refused() -> None:
    own = network.PipelineParams(cells=[[dense(4)], [dense(3)]])
    with pytest.raises(errors.PartitionError) as error:
        network.analyze(own, FIELDS)
    assert str(error.value) == (
        "cuts=[1, 1] has 2 cells, but num_partitions=1. Give each cell's number of layers, or set "
        "num_partitions=2"
    )


def test_layers_and_cells_together_are_refused() -> None:
    own = network.PipelineParams(layers=[dense(3)], cells=[[dense(3)]])
    with pytest.raises(errors.LayerError, match=r"^give `layers` or ready `cells`, not both$"):
        network.analyze(own, FIELDS)


def test_cuts_beside_ready_cells_are_refused() -> None:
    own = network.PipelineParams(cells=[[dense(3)]], cuts=(1,))
    with pytest.raises(errors.LayerError, match=r"^ready `cells` are cut already: give `cuts` "):
        network.analyze(own, FIELDS)


def test_a_table_of_several_cells_per_device_is_named_where_cuts_do_not_fit() -> None:
    own = {"num_partitions": 2, "schedule": "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"}
    given = [dense(4) for _ in range(4)]
    text = text_of(errors.PartitionError, *given, cuts=(2, 2), **own)
    assert text.endswith("Give each cell's number of layers, or a table of 2 cells")
    assert text_of(errors.PartitionError, *given[1:], **own).endswith("of at most 3 cells")


def test_a_negative_cost_is_told_with_its_layer() -> None:
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
    rows = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"
    own = {"num_partitions": 2, "schedule": rows, "device_speeds": (1.0, 2.0), "fuse": False}
    found = analyze(*(dense(D) for _ in range(12)), **own)
    assert (found.cuts, found.speeds) == ((2, 4, 2, 4), (1.0, 2.0, 1.0, 2.0))


def test_a_link_that_costs_moves_the_cut_to_where_little_is_sent() -> None:
    """Behind each layer what it makes is sent, of one micro-batch, and its gradient back."""
    units = (16, 16, 16, 2, 16)
    fields = {"x": tf.TensorSpec((1, 16), tf.float32)}
    params = network.PipelineParams(
        layers=[layers.Dense.Params(units=n) for n in units], num_partitions=2, fuse=False
    )
    free = network.analyze(params, fields)
    found = network.analyze(params.set(link_cost_per_byte=30.0), fields)
    assert (free.cuts, found.cuts) == ((2, 3), (4, 1))
    sent = [30.0 * 2 * 4 * n for n in units[:-1]]
    rows = dict(enumerate(found.costs))
    assert partition.partition(rows[0], 2, own_costs=rows, link_costs=sent) == found.cuts
    assert network.analyze(params.set(device_memory="1MiB"), fields).cuts == found.cuts
    with pytest.raises(errors.PartitionError, match=r"^link_cost_per_byte=-1.0 is no cost. Use 0"):
        network.analyze(params.set(link_cost_per_byte=-1.0), fields)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -2.0), (1.0, 1.0, 1.0)])
def test_speeds_that_are_none_are_refused(speeds: tuple[float, ...]) -> None:
    own = {"num_partitions": 2, "device_speeds": speeds}
    assert text_of(errors.PartitionError, dense(4), dense(4), **own) == (
        f"device_speeds={list(speeds)}, but there are num_partitions=2. Give a number above 0 for "
        "each, or none where all are alike"
    )


def test_costs_are_forward_recomputation_and_backward() -> None:
    flops = 2 * N * D * D
    for policy, again in (("full", 1), ("never", 0)):
        found = analyze(dense(D), dense(D), fuse=False, recompute=policy)
        assert found.costs == ((flops * (1 + again + 2),) * 2,)


def test_each_cells_policy_decides_what_layers_cost_in_it() -> None:
    flops = 2 * (N // 4) * D * D
    given = [dense(D) for _ in range(11)]
    found = analyze(
        *given, num_partitions=3, num_micro_batches=4, recompute="full,never,except_last"
    )
    kept, once, all_again = 3.0, 3.75, 4.0
    assert [row[0] / flops for row in found.costs] == [all_again, kept, once]
    assert found.cuts == (3, 5, 3)  # 12, 15 and 11.25
    assert analyze(*given, num_partitions=3, fuse=False).cuts == (3, 4, 4)
    found = analyze(*given, num_partitions=3, recompute="never,full,full", fuse=False)
    assert found.cuts == (5, 3, 3)


def test_both_halves_of_a_split_backward_cost_the_gradient_of_the_inputs() -> None:
    flops = 2 * (N // 2) * D * D
    split = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1"
    found = analyze(dense(D), dense(D), num_partitions=2, num_micro_batches=2, schedule=split)
    # Cell 0 has none to give: 1 + 1 + 2. Cell 1: a forward, and 1 + 1 and 1 + 2 behind it.
    assert [row[0] / flops for row in found.costs] == [4.0, 6.0]


def test_a_stated_cost_holds_in_every_cell() -> None:
    given = [dense(D, cost=5.0), dense(D), dense(D)]
    found = analyze(*given, num_partitions=3, recompute="full,never,full")
    assert [row[0] for row in found.costs] == [5.0] * 3
    assert found.costs[0][1] > found.costs[1][1]


def test_a_layers_stated_cost_is_taken() -> None:
    given = [dense(4, cost=1.0), dense(4, cost=1.0), dense(4, cost=1.0), dense(4, cost=9.0)]
    found = analyze(*given, num_partitions=2)
    assert found.cuts == (3, 1)
    assert found.costs == ((1.0, 1.0, 1.0, 9.0),) * 2


def test_given_costs_replace_all() -> None:
    given = [dense(4, cost=7.0), dense(4), dense(4), dense(4)]
    found = analyze(*given, num_partitions=2, costs=(1.0, 1.0, 1.0, 5.0))
    assert found.cuts == (3, 1)
    assert found.costs == ((1.0, 1.0, 1.0, 5.0),) * 2


def test_costs_of_another_length_are_refused() -> None:
    text = text_of(errors.PartitionError, dense(4), dense(4), costs=(1.0,))
    assert text == "costs has 1 numbers for 2 layers. Give one for each"


def test_more_partitions_than_layers_are_refused() -> None:
    text = text_of(errors.PartitionError, dense(4), dense(4), num_partitions=99)
    assert text == "num_partitions=99, but there are 2 layers. Use 1 to 2"


@pytest.mark.parametrize("field", ["num_partitions", "num_micro_batches", "micro_batch_size"])
def test_counts_begin_at_one(field: str) -> None:
    text = text_of(errors.PartitionError, dense(4), **{field: 0})
    assert text == f"{field}=0, but it counts from 1"


# --- memory ---------------------------------------------------------------------------------------


def light_end(**fields: Any) -> network.Analysis:
    """Two layers of 4 MiB weights, and an end that costs most and weighs nothing."""
    given = [dense(1024, cost=1.0) for _ in range(3)] + [dense(3, cost=9.0)]
    return analyze(*given, num_partitions=2, **fields)


def test_a_devices_memory_moves_the_cut() -> None:
    assert light_end().cuts == (3, 1)
    # Weight, gradient, two slots: 16 MiB for each of the two; new weight, slots and what they are
    # computed by: 16 MiB for one at a time.
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
    # A kept forward leaves theirs too.
    given.recompute = "never"
    with pytest.raises(errors.PartitionError, match=r"but no cut into 1 cells fits"):
        network.analyze(given, fields)


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
    assert "is no size" in text_of(errors.ParamsError, dense(4), device_memory="8 giraffes")


# --- recompute, schedule --------------------------------------------------------------------------


def test_recompute_policies_are_for_all_cells_or_each() -> None:
    assert recompute.policies("except_last", 3) == ("except_last",) * 3
    assert recompute.policies("full, never", 2) == ("full", "never")


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        (
            "nevr",
            "recompute 'nevr' is no policy; nearest 'never'. Use full, except_last, never, or one "
            "for each cell separated by commas",
        ),
        (
            "full,never,full",
            "recompute names 3 policies for 2 cells. Give one, or one for each cell",
        ),
    ],
)
def test_wrong_recompute_texts_are_told(recompute: str, text: str) -> None:
    given = [dense(4), dense(4)]
    assert text_of(errors.LayerError, *given, num_partitions=2, recompute=recompute) == text


def test_forward_table_keeps_cells_on_their_devices() -> None:
    interleaved = Table.from_text(
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0"
    )
    table = network.forward_table(interleaved, 3)
    assert table.is_forward_only
    assert (table.num_cells, table.num_micro_batches) == (4, 3)
    assert [table.device_of(k) for k in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("homes", [(0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2)])
def test_a_forward_table_waits_no_longer_than_one_micro_batch_at_a_time(
    homes: tuple[int, ...],
) -> None:
    K, cells = max(homes) + 1, range(len(homes))
    rows = [[k for k in cells if homes[k] == device] for device in range(K)]
    for M in range(1, 12):
        training = [
            [Slot(k, "F", 0) for k in row] + [Slot(k, "B", 0) for k in reversed(row)]
            for row in rows
        ]
        table = network.forward_table(Table.on_grid(training), M)
        assert {str(slot) for slot in table} == {f"{k}F{m}" for k in cells for m in range(M)}
        alone = Table.on_grid([[Slot(k, "F", m) for m in range(M) for k in row] for row in rows])
        ticks, before = (max(map(len, one.devices)) for one in (table, alone))
        assert ticks <= before
        if homes == tuple(itertools.islice(itertools.cycle(range(K)), len(homes))) and M % K == 0:
            # Devices wait for their first slot and behind their last one alone.
            assert ticks == M * len(homes) // K + K - 1
            assert ticks < before or M <= K


# --- variables: ties, frozen ----------------------------------------------------------------------


def test_a_tied_variable_is_one() -> None:
    found = analyze(dense(D, name="a"), dense(D, name="b", tie={"kernel": "a/kernel"}))
    assert sorted(found.variables) == ["a/bias", "a/kernel", "b/bias"]
    assert found.layers[1].paths == {"kernel": "a/kernel", "bias": "b/bias"}
    assert found.owner["a/kernel"] == 0
    assert found.trainable(1) == ("a/kernel", "b/bias")


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_tie_with_one_frozen_side_is_frozen(frozen: str) -> None:
    found = analyze(
        dense(D, name="a", trainable=frozen != "a"),
        dense(D, name="b", trainable=frozen != "b", tie={"kernel": "a/kernel"}),
    )
    assert not found.variables["a/kernel"].trainable
    assert found.variables[f"{'b' if frozen == 'a' else 'a'}/bias"].trainable


@pytest.mark.parametrize(
    ("tie", "text"),
    [
        (
            {"kernel": "a/kernal"},
            "b/kernel is tied to 'a/kernal', which is no variable of its own in the network; "
            "nearest 'a/kernel'",
        ),
        (
            {"kernel": "a/bias"},
            "b/kernel is (6, 6) float32, but tied to a/bias, which is (6,) float32. Make the two "
            "alike",
        ),
        (
            {"kernl": "a/kernel"},
            "b (Dense): tie names 'kernl', which it has not; nearest kernel",
        ),
    ],
)
def test_wrong_ties_are_told(tie: dict[str, str], text: str) -> None:
    assert text_of(errors.LayerError, dense(D, name="a"), dense(D, name="b", tie=tie)) == text


def test_frozen_patterns_freeze_by_path() -> None:
    found = analyze(dense(4, name="stem"), dense(3, name="head"), frozen=("stem/*", "*/bias"))
    trained = [path for path, spec in found.variables.items() if spec.trainable]
    assert trained == ["head/kernel"]
    assert found.frozen_layers == {"stem"}


@pytest.mark.parametrize("pattern", ["b/*", "b/kernel", "*/kernel"])
def test_a_pattern_that_fits_a_borrower_freezes_what_it_shares(pattern: str) -> None:
    tied = dense(D, name="b", tie={"kernel": "a/kernel"})
    found = analyze(dense(D, name="a"), tied, frozen=(pattern,))
    assert not found.variables["a/kernel"].trainable
    assert found.variables["a/bias"].trainable
    assert found.variables["b/bias"].trainable == (pattern != "b/*")


def test_frozen_layers_are_those_wholly_frozen_at_any_depth() -> None:
    block = layers.Sequential.Params(
        name="block", layers=[dense(4, name="a"), layers.Sequential.Params(layers=[dense(4)])]
    )
    found = analyze(block, dense(3), frozen=("block/a/*",))
    assert found.frozen_layers == {"block/a"}
    assert analyze(block, dense(3), frozen=("block/*",)).frozen_layers == {
        "block",
        "block/a",
        "block/sequential",
        "block/sequential/dense",
    }


def test_statistics_are_frozen_with_their_layer_alone() -> None:
    norm = layers.BatchNorm.Params(name="norm")
    whole = ("norm/gamma", "norm/beta", "norm/moving_*")
    assert analyze(dense(4), norm, frozen=whole).frozen_layers == {"norm"}
    text = text_of(errors.LayerError, dense(4), norm, frozen=("norm/moving_*",))
    assert text == (
        "frozen pattern 'norm/moving_*' fits norm/moving_mean, a statistic, which stands still "
        "only where its layer is frozen. Freeze norm/*, or where it has no weights, leave the "
        "pattern out and set trainable=False in its Params"
    )
    bare = layers.BatchNorm.Params(name="norm", center=False, scale=False)
    text = text_of(errors.LayerError, dense(4), bare, frozen=("norm/*",))
    assert "fits norm/moving_mean, a statistic" in text
    block = layers.Sequential.Params(name="block", layers=[dense(4, name="a"), bare])
    still = analyze(block, dense(3), frozen=("block/a/*", "block/norm/*"))
    assert "block" in still.frozen_layers


def test_statistics_cannot_be_tied() -> None:
    norms = [layers.BatchNorm.Params(name=name) for name in ("one", "two")]
    norms[1].tie = {"moving_mean": "one/moving_mean"}
    text = text_of(errors.LayerError, dense(4), *norms)
    assert text.startswith("two/moving_mean is a statistic of its own micro-batches and cannot")


def test_a_frozen_pattern_that_fits_nothing_is_refused() -> None:
    text = text_of(errors.LayerError, dense(4, name="stem"), frozen=("sten/*",))
    assert text == "frozen pattern 'sten/*' fits no variable; nearest stem/bias, stem/kernel"


# --- shapes ---------------------------------------------------------------------------------------


def test_specs_are_those_of_the_largest_micro_batch() -> None:
    found = analyze(dense(4), dense(3), num_micro_batches=3)
    assert found.sizes == (3, 3, 2)
    shapes = {
        (v.name, v.producer): found.specs[v.index].shape.as_list() for v in found.wiring.versions
    }
    assert shapes == {
        ("x", -1): [3, D],
        ("target", -1): [3, 3],
        ("x", 0): [3, 4],
        ("x", 1): [3, 3],
    }


def test_specs_are_in_the_compute_dtype_but_for_integers() -> None:
    own = params(layers.Embedding.Params(vocabulary=5, units=2), dtype="mixed_bfloat16")
    fields = {"x": tf.TensorSpec([N], tf.int32), "y": tf.TensorSpec([N], tf.float64)}
    found = network.analyze(own, fields)
    assert [spec.dtype for spec in found.specs] == [tf.int32, tf.bfloat16, tf.bfloat16]
    assert found.variables["embedding/table"].dtype == tf.float32


def test_another_batch_dimension_is_counted() -> None:
    found = network.analyze(
        params(dense(3), num_micro_batches=2, batch_dim=1), {"x": tf.TensorSpec([5, 7, D])}
    )
    assert found.sizes == (4, 3)
    assert found.specs[0].shape.as_list() == [5, 4, D]


def test_a_layers_error_names_the_layer() -> None:
    text = text_of(errors.LayerError, dense(4), layers.Conv2D.Params(filters=2, name="conv"))
    assert text.startswith("conv (Conv2D): expected ")


def test_a_layer_with_too_few_outputs_for_its_names_is_refused() -> None:
    text = text_of(errors.LayerError, dense(4, name="d", writes=("x", "y")), outputs=("x", "y"))
    assert text == ("d writes 2 names (x, y), but gives 1 output. Write as many names as it gives")


def test_a_layer_with_too_many_outputs_for_its_names_is_refused() -> None:
    three = Tripled.Params(name="t", writes=("x", "y"))
    assert text_of(errors.LayerError, three, outputs=("x", "y")) == (
        "t writes 2 names (x, y), but gives 3 outputs. Write as many names as it gives"
    )


def test_names_without_a_batch_side_are_those_of_fields() -> None:
    assert text_of(errors.InputError, dense(4), unbatched=("tarket",)) == (
        "unbatched names 'tarket', which is no field of the mini-batch; nearest 'target'. Correct "
        "it, or leave it out"
    )


def test_two_thousand_layers_need_no_device_and_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError((args, kwargs))

    for module, name in (
        (tf, "Variable"),
        (tf, "device"),
        (tf.config, "list_logical_devices"),
        (tf.config, "list_physical_devices"),
    ):
        monkeypatch.setattr(module, name, refuse)
    width = 12 * 1024  # 300 billion parameters in all
    found = network.analyze(
        params(*[dense(width) for _ in range(2000)], num_partitions=8, fuse=False),
        {"x": tf.TensorSpec([N, width])},
    )
    assert found.cuts == (250,) * 8
    assert sum(spec.size for spec in found.variables.values()) == 2000 * (width + 1) * width
    assert found.layers[-1].name == "dense_1999"


def test_text_round_trip() -> None:
    own = params(
        dense(4, name="a"),
        error_head(reads=("x", "target")),
        num_partitions=2,
        cuts=(1, 1),
        recompute="full,never",
        frozen=("a/*",),
        unbatched=("gain",),
    )
    assert hyperparams.from_text(own.to_text()) == own
