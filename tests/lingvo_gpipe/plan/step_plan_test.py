from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network, optim
from lingvo_gpipe.console import units
from lingvo_gpipe.network.traffic import INPUT, Link
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.schedule import breakdown
from tests.lingvo_gpipe.plan.networks import floats, pipe
from tests.networks import sameness_nets
from tests.tiny_task import tiny_task


def skipping(**fields: Any) -> Any:
    """Three layers; only the third reads `skip`, which the first writes."""
    return pipe(
        layers.Dense.Params(name="a", units=6, writes=("skip",)),
        layers.Dense.Params(name="b", units=4),
        layers.Concat.Params(name="c", reads=("x", "skip")),
        layers.MeanSquaredError.Params(name="loss"),
        num_partitions=3,
        cuts=(1, 1, 2),
        **fields,
    )


SKIPPING = {"x": floats(8, 5), "target": floats(8, 10)}
ADAM = optim.Optimizer.Params(name="Adam", learning_rate=0.1)


def regression(depth: int, **fields: Any) -> Any:
    return pipe(
        *(layers.Dense.Params(units=64, activation="relu") for _ in range(depth)),
        layers.MeanSquaredError.Params(),
        **fields,
    )


def points(examples: int) -> dict[str, tf.TensorSpec]:
    return {"x": floats(examples, 64), "target": floats(examples, 64)}


def ends(plan: step_plan.Plan) -> dict[tuple[int, int], Link]:
    return {(link.source, link.target): link for link in plan.links}


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_a_skip_is_charged_straight_and_not_to_the_cells_between(micro_batches: int) -> None:
    """Links carry the whole mini-batch however it is cut."""
    links = ends(step_plan.make(skipping(num_micro_batches=micro_batches), SKIPPING))
    assert links[0, 2] == Link(0, 2, 8 * 6 * 4, 8 * 6 * 4, ("skip",))
    assert links[1, 2] == Link(1, 2, 8 * 4 * 4, 8 * 4 * 4, ("x",))
    assert (0, 1) not in links
    # The fields have no gradient; each goes to the cells that read it.
    assert links[INPUT, 0] == Link(-1, 0, 8 * 5 * 4, 0, ("x",))
    assert links[INPUT, 1] == Link(-1, 1, 8 * 5 * 4, 0, ("x",))
    assert links[INPUT, 2] == Link(-1, 2, 8 * 10 * 4, 0, ("target",))
    assert len(links) == 5


def test_boundaries_travel_in_the_compute_dtype_and_weights_are_copied_into_it() -> None:
    plan = step_plan.make(skipping(dtype="mixed_bfloat16"), SKIPPING)
    assert ends(plan)[0, 2].forward_bytes == 8 * 6 * 2
    assert plan.cells[0].parameter_bytes == (5 * 6 + 6) * 4
    assert plan.cells[0].copy_bytes == (5 * 6 + 6) * 2
    plain = step_plan.make(skipping(), SKIPPING)
    assert [cell.copy_bytes for cell in plain.cells] == [0, 0, 0]


def test_a_tied_weight_goes_to_its_borrower_and_its_gradient_comes_back() -> None:
    plan = step_plan.make(
        pipe(
            layers.Embedding.Params(vocabulary=9, units=4, reads=("ids",)),
            layers.SequenceSoftmax.Params(
                vocabulary=9, reads=("x", "label"), tie={"kernel": "embedding/table"}
            ),
            num_partitions=2,
        ),
        {"ids": tf.TensorSpec([2, 3], tf.int32), "label": tf.TensorSpec([2, 3], tf.int32)},
        optimizer_params=ADAM,
    )
    table, x = 9 * 4 * 4, 2 * 3 * 4 * 4
    link = ends(plan)[0, 1]
    assert (link.forward_bytes, link.backward_bytes) == (table + x, table + x)
    assert link.names == ("x", "embedding/table")
    owner, borrower = plan.cells
    assert (owner.parameter_bytes, borrower.parameter_bytes) == (table, 9 * 4)
    assert (owner.gradient_bytes, borrower.gradient_bytes) == (table, table + 9 * 4)
    assert (owner.slot_bytes, borrower.slot_bytes) == (2 * table, 2 * 9 * 4)
    assert (owner.copy_bytes, borrower.copy_bytes) == (0, table)


def test_weights_gradients_and_slots_are_those_of_the_built_pipeline() -> None:
    params = pipe(
        layers.Dense.Params(units=6),
        layers.BatchNorm.Params(),
        layers.Dense.Params(units=3, trainable=False),
        layers.Dense.Params(units=5),
        layers.MeanSquaredError.Params(),
        num_partitions=3,
        num_micro_batches=2,
    )
    given = {"x": tf.ones([4, 7]), "target": tf.ones([4, 5])}
    fields = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in given.items()}
    plan = step_plan.make(params, fields, optimizer_params=ADAM, averages=True)
    made = params.instantiate()
    made.build(given)
    gradients = made.value_and_gradients(given).gradients
    for k, cell in enumerate(plan.cells):
        own = {
            path: variable.numpy().nbytes
            for path, variable in made.by_path.items()
            if made.analysis.layer_of(path) in cell.layers
        }
        trained = {path: size for path, size in own.items() if path in made.weights}
        averaged = sum(trained.values()) + sum(own[p] for p in own if p in made.state)
        assert cell.parameter_bytes == sum(own.values()), k
        assert cell.gradient_bytes == sum(gradients[path].numpy().nbytes for path in trained), k
        assert cell.slot_bytes == 2 * sum(trained.values()) + averaged, k


def test_a_schedule_that_starts_backwards_early_keeps_fewer_micro_batches() -> None:
    gpipe, early = (
        step_plan.make(
            regression(7, num_partitions=4, num_micro_batches=16, schedule=schedule),
            points(64),
        )
        for schedule in ("gpipe", "1f1b")
    )
    assert [cell.live_micro_batches for cell in gpipe.cells] == [16] * 4
    assert [cell.live_micro_batches for cell in early.cells] == [4, 3, 2, 1]
    for before, after in zip(gpipe.cells[1:-1], early.cells[1:-1], strict=True):
        assert after.activation_bytes < before.activation_bytes
    # What a cell keeps of a micro-batch is its import.
    kept = gpipe.cells[1].activation_bytes - early.cells[1].activation_bytes
    assert kept >= (16 - 3 - 2) * 4 * 64 * 4


def test_recomputation_keeps_imports_alone() -> None:
    full, last, never = (
        step_plan.make(
            regression(8, num_partitions=1, num_micro_batches=8, recompute=policy), points(64)
        )
        .cells[0]
        .activation_bytes
        for policy in ("full", "except_last", "never")
    )
    assert full <= last < never
    one = 8 * 64 * 4
    assert never - full == pytest.approx(7 * 8 * one, rel=0.15)


def test_a_forward_only_table_returns_no_gradient() -> None:
    fields = {"num_partitions": 2, "num_micro_batches": 2, "cuts": (1, 2), "recompute": "full"}
    plan = step_plan.make(regression(2, schedule="0F0,0F1\n1F0,1F1", **fields), points(8))
    one = 4 * 64 * 4
    # The field of both micro-batches, what the second cell receives, and a layer's two tensors.
    assert [cell.activation_bytes for cell in plan.cells] == [(2 + 2) * one, (2 + 2 + 2) * one]


def test_one_partition_of_one_micro_batch_is_the_plain_network() -> None:
    plan = step_plan.make(regression(3), points(16))
    (cell,) = plan.cells
    assert cell.cost_share == 1.0
    assert plan.bubble_share == 0.0
    assert cell.live_micro_batches == 1
    assert [link.source for link in plan.links] == [INPUT]
    assert cell.total_bytes == cell.parameter_bytes + cell.gradient_bytes + cell.activation_bytes


def test_a_stated_cost_moves_the_share_and_the_time() -> None:
    own = [layers.Dense.Params(units=64) for _ in range(4)]
    own[0].cost = 3e9
    plan = step_plan.make(
        pipe(*own, layers.MeanSquaredError.Params(), num_partitions=2, fuse=False), points(64)
    )
    first = plan.cells[0]
    assert first.layers == ("dense",)
    assert first.cost_share > 0.99
    assert plan.timeline.busy_s[0] == pytest.approx(3e9)
    assert plan.timeline.busy_s[1] < plan.timeline.busy_s[0]
    # Of all layers.
    params = regression(2, num_partitions=2, cuts=(1, 2), fuse=False)
    for layer, cost in zip(params.layers, (30.0, 7.0, 3.0), strict=True):
        layer.cost = cost
    plan = step_plan.make(params, points(64))
    assert plan.timeline.busy_s == pytest.approx([30.0, 10.0])
    assert [cell.cost_share for cell in plan.cells] == pytest.approx([0.75, 0.25])


def test_several_mini_batches_hold_old_and_new_sums() -> None:
    task = tiny_task()
    one = step_plan.make_for(task)
    task.train.accumulate = 3
    several = step_plan.make_for(task)
    held = sum(cell.gradient_bytes for cell in one.cells)
    assert held > 0
    assert sum(cell.gradient_bytes for cell in several.cells) == 2 * held
    assert several.step_bytes == one.step_bytes + held


def test_a_device_with_two_cells_holds_both() -> None:
    params = regression(3, num_partitions=4, cuts=(1, 1, 1, 1))
    alone = step_plan.make(params, points(8))
    params.set(num_partitions=2, schedule="0F0,1F0,,,,,1B0,0B0\n,,2F0,3F0,3B0,2B0,,")
    paired = step_plan.make(params, points(8))
    kept = [cell.total_bytes - cell.activation_bytes for cell in paired.cells]
    most = [max(cell.activation_bytes for cell in paired.cells[k : k + 2]) for k in (0, 2)]
    wanted = max(kept[0] + kept[1] + most[0], kept[2] + kept[3] + most[1])
    assert paired.heaviest_bytes == wanted > alone.heaviest_bytes


def test_a_cap_for_two_devices_is_no_limit_for_the_whole_network() -> None:
    # Unequal micro-batches are checked without cuts: in one cell the layers need more.
    capped = regression(6, num_partitions=2, num_micro_batches=3, device_memory="400KiB")
    assert step_plan.make(capped, points(7)).heaviest_bytes <= 400 * 1024


SPLIT = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1"


@pytest.mark.parametrize("recompute", ["full", "never"])
def test_a_split_backward_is_planned(recompute: str) -> None:
    fields = {"x": floats(8, 64), "target": floats(8, 64)}
    shape = {"num_partitions": 2, "num_micro_batches": 2, "cuts": (2, 3), "recompute": recompute}
    kept = recompute == "never"
    whole, split = (
        step_plan.make(regression(4, schedule=schedule, fuse=schedule == SPLIT, **shape), fields)
        for schedule in ("gpipe", SPLIT)
    )
    layer = 2 * 4 * 64 * 64
    found = {
        (span.slot.cell, str(span.slot.phase)): round((span.end_s - span.start_s) / layer, 6)
        for span in split.timeline.spans
    }
    backward = [seconds / layer for seconds in breakdown.mean_seconds(whole.timeline)["B"]]
    assert backward == pytest.approx([6 - 2 * kept] * 2)
    # Cell 0 returns no gradient of inputs; in cell 1 half of the backward computes it, directly
    # after the forward, which is not computed again.
    again = 0 if kept else 2
    wanted = {(0, "I"): 0, (0, "W"): again + 4, (1, "I"): 2, (1, "W"): 2}
    assert {key: found[key] for key in wanted} == wanted


def test_a_cell_without_weights_has_an_empty_w() -> None:
    params = pipe(
        layers.Dense.Params(units=64),
        layers.MultiHeadAttention.Params(name="mid", heads=2, units=64, trainable=False),
        layers.Dense.Params(units=64),
        layers.MeanSquaredError.Params(),
        num_partitions=3,
        cuts=(1, 1, 2),
        schedule="0F0,,,,,0I0,0W0\n,1F0,,,1I0,1W0\n,,2F0,2I0,2W0",
    )
    fields = {"x": floats(2, 4, 64), "target": floats(2, 4, 64)}
    plan = step_plan.make(params, fields)
    times = {str(span.slot): span.end_s - span.start_s for span in plan.timeline.spans}
    assert times["1I0"] > times["1F0"]
    assert 0 < times["1W0"] < 1e-6 * times["1I0"]


def test_early_recomputation_shortens_the_step_and_holds_no_more() -> None:
    fields = {"x": floats(8, 64), "target": floats(8, 64)}
    shape = {"num_partitions": 2, "num_micro_batches": 2, "cuts": (2, 3), "fuse": False}
    late, early = (
        step_plan.make(regression(4, recompute=recompute, **shape), fields)
        for recompute in ("full", "early")
    )
    seconds, of_early = (breakdown.mean_seconds(plan.timeline) for plan in (late, early))
    gain = late.timeline.makespan_s - early.timeline.makespan_s
    assert gain == pytest.approx(seconds["F"][0])
    again = [r + b for r, b in zip(of_early["R"], of_early["B"], strict=True)]
    assert again == pytest.approx(seconds["B"])
    assert early.cells[0].activation_bytes == late.cells[0].activation_bytes


@pytest.mark.parametrize(("recompute", "profile"), [("full", False), ("never", True)])
def test_what_i_leaves_is_held_until_w_has_read_it(recompute: str, profile: bool) -> None:
    def heaviest(last: str) -> int:
        """Return the bytes of the second cell with this order of slots."""
        schedule = f"0F0,0F1,,,,0B0,0B1\n,{last}"
        shape = {"num_partitions": 2, "num_micro_batches": 2, "cuts": (2, 3)}
        params = regression(4, schedule=schedule, recompute=recompute, fuse=False, **shape)
        return step_plan.make(params, points(64), profile=profile).cells[1].activation_bytes

    early, late = heaviest("1F0,1I0,1W0,1F1,1I1,1W1"), heaviest("1F0,1I0,1F1,1I1,1W0,1W1")
    # Two layers: the input of the second one, and the gradients of the outputs of both.
    assert late - early >= 3 * 32 * 64 * 4


def test_a_slot_without_flops_holds_what_it_needs() -> None:
    params = pipe(
        layers.Embedding.Params(vocabulary=3000, units=512, reads=("ids",)),
        *(layers.Dense.Params(units=512) for _ in range(3)),
        layers.MeanSquaredError.Params(),
        num_partitions=2,
        num_micro_batches=2,
        cuts=(1, 4),
    )
    fields = {"ids": tf.TensorSpec([8, 64], tf.int32), "target": floats(8, 64, 512)}
    plan = step_plan.make(params, fields)
    seconds = breakdown.mean_seconds(plan.timeline)["F"]
    assert seconds[0] < 1e-6 * seconds[1]
    assert all(span.end_s > span.start_s for span in plan.timeline.spans)
    # Its backward makes a second gradient of the table.
    assert plan.cells[0].activation_bytes > 3000 * 512 * 4


def test_cells_wait_for_what_they_read_alone() -> None:
    spans = {
        str(span.slot): span
        for span in step_plan.make(skipping(num_micro_batches=2), SKIPPING).timeline.spans
    }
    # Cell 1 reads a field; cell 2 reads of both.
    assert spans["1F0"].start_s == 0.0
    assert spans["2F0"].start_s >= max(spans["0F0"].end_s, spans["1F0"].end_s) > 0.0


def test_a_frozen_first_cell_runs_ahead() -> None:
    params = regression(
        4,
        num_partitions=2,
        num_micro_batches=4,
        cuts=(1, 4),
        schedule="1f1b",
        frozen=("dense/*",),
    )
    plan = step_plan.make(params, points(64))
    spans = {str(span.slot): span for span in plan.timeline.spans}
    assert spans["0F3"].end_s == pytest.approx(4 * spans["0F0"].end_s)
    assert spans["0F3"].end_s < spans["1B0"].end_s


def test_the_update_of_a_large_layer_is_the_most_that_a_device_holds() -> None:
    plans = [
        step_plan.make(
            regression(3, num_partitions=2, cuts=(1, 3)),
            points(4),
            optimizer_params=rule,
            averages=averages,
        )
        for rule, averages in ((None, False), (ADAM, False), (ADAM, True))
    ]
    kernel, bias = 64 * 64 * 4, 64 * 4
    for plan, copies in zip(plans, (0, 3, 4), strict=True):
        # New weights, slots and averages of one layer, and its kernel again at work.
        update = copies * (kernel + bias) + (kernel if copies else 0)
        totals = []
        for cell in plan.cells:
            assert cell.update_bytes == update
            kept = cell.parameter_bytes + cell.gradient_bytes + cell.slot_bytes
            totals.append(kept + max(cell.activation_bytes, update))
            assert cell.total_bytes == totals[-1]
        assert plan.heaviest_bytes == max(totals)
        gradients = sum(cell.gradient_bytes for cell in plan.cells)
        assert plan.step_bytes == max(plans[0].step_bytes, gradients + 2 * update)
    assert plans[2].step_bytes > plans[0].step_bytes
    assert plans[1].cells[0].total_bytes > plans[1].cells[0].activation_bytes


def test_a_frozen_beginning_costs_its_forward_alone() -> None:
    fields = {"x": floats(8, 64), "target": floats(8, 64)}
    shape = {"num_partitions": 2, "num_micro_batches": 2, "fuse": False}
    whole, frozen = (
        step_plan.make(regression(9, frozen=patterns, **shape), fields)
        for patterns in ((), ("dense/*", *(f"dense_{n}/*" for n in range(1, 5))))
    )
    assert len(whole.cells[0].layers) <= 5
    # Five forwards and four layers of four times that: 5 + 4 against 12.
    assert [len(cell.layers) for cell in frozen.cells] == [6, 4]
    assert frozen.cells[0].cost_share == pytest.approx(9 / 21)
    alone = step_plan.make(regression(8, frozen=("dense*",), **shape), fields)
    seconds = breakdown.mean_seconds(alone.timeline)
    assert max(seconds["B"]) < 1e-6 * min(seconds["F"])


def test_a_field_that_all_micro_batches_share_is_sent_once() -> None:
    net = sameness_nets.NETS["skip"]
    own = net.layers()
    given = pipe(*own, num_partitions=2, cuts=(2, len(own) - 2), **net.options)
    fields = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), net.fields())
    links = []
    for count in (1, 2, 4):
        given.num_micro_batches = count
        links.append(step_plan.make(given, fields).links)
        assert any("gain" in link.names for link in links[-1])
    assert links[0] == links[1] == links[2]


def test_a_cut_by_memory_counts_how_long_a_skip_waits() -> None:
    params = pipe(
        layers.Dense.Params(name="first", units=512, writes=("skip",)),
        *(layers.Dense.Params(units=16, reads=("skip",) if n == 0 else ("x",)) for n in range(6)),
        layers.Dense.Params(name="late", units=16, reads=("skip",), writes=("y",)),
        layers.Concat.Params(name="both", reads=("x", "y")),
        layers.MeanSquaredError.Params(name="loss"),
        num_partitions=4,
        num_micro_batches=16,
        schedule="1f1b",
    )
    fields = {"x": floats(4096, 16), "target": floats(4096, 32)}
    assert step_plan.make(params, fields, optimizer_params=ADAM).heaviest_bytes > 3 * 2**20
    # Four micro-batches of it wait in the last cell, which works on only one of them.
    params.device_memory = "3MiB"
    assert step_plan.make(params, fields, optimizer_params=ADAM).heaviest_bytes <= 3 * 2**20
    params.device_memory = "2MiB"
    with pytest.raises(errors.PartitionError, match="but layer late alone needs"):
        step_plan.make(params, fields, optimizer_params=ADAM)


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_cut_by_memory_counts_the_weights_of_the_heaviest_owner(
    num_replicas: int, depth: int
) -> None:
    """One owner of a weight holds its slots and what others send; many weights are shared out."""
    params = pipe(
        *(layers.Dense.Params(units=256, use_bias=False) for _ in range(depth)),
        layers.MeanSquaredError.Params(),
        num_micro_batches=4,
        num_replicas=num_replicas,
    )
    fields = {"x": floats(8, 256), "target": floats(8, 256)}
    needed = step_plan.make(params, fields, optimizer_params=ADAM).heaviest_bytes
    weight = 256 * 256 * 4
    # Owners are counted as balanced up to one weight: its slots, and the gradients of others.
    more = weight * (num_replicas + 1) * (num_replicas - 1) / num_replicas
    params.device_memory = str(round(1.1 * needed + more * (depth > 1)))
    assert step_plan.make(params, fields, optimizer_params=ADAM).heaviest_bytes == needed
    params.device_memory = str(round(0.98 * needed))
    with pytest.raises(errors.PartitionError, match="device_memory="):
        step_plan.make(params, fields, optimizer_params=ADAM)


def test_a_plan_has_the_cut_of_all_replicas() -> None:
    params = pipe(
        *(
            layers.Dense.Params(units=256, use_bias=False, cost=1.0 + 8.0 * (n == 6))
            for n in range(7)
        ),
        layers.MeanSquaredError.Params(cost=0.0),
        num_partitions=2,
        num_micro_batches=4,
        num_replicas=4,
    )
    fields = {"x": floats(8, 256), "target": floats(8, 256)}
    assert step_plan.make(params, fields, optimizer_params=ADAM).analysis.cuts == (6, 2)
    for memory, cuts in (("7.5MiB", (6, 2)), ("7MiB", (5, 3))):
        params.device_memory = memory
        found = step_plan.make(params, fields, optimizer_params=ADAM)
        assert found.analysis.cuts == network.analyze(params, fields).cuts == cuts
        assert found.heaviest_bytes <= units.parse_size(memory)


def test_every_device_of_every_replica_has_its_bytes() -> None:
    """Weights that do not divide evenly: the replicas need different amounts."""
    params = pipe(
        *(layers.Dense.Params(units=units, use_bias=False) for units in (256, 64, 256, 256)),
        layers.MeanSquaredError.Params(),
        num_partitions=2,
        cuts=(2, 3),
        num_micro_batches=4,
        num_replicas=2,
    )
    fields = {"x": floats(8, 256), "target": floats(8, 256)}
    found = step_plan.make(params, fields, optimizer_params=ADAM)
    assert len(found.device_bytes) == 4
    assert found.heaviest_bytes == max(found.device_bytes)
    owned = [[0, 0], [0, 0]]
    for path, owner in found.exchange.owners.items():
        owned[owner][found.analysis.owner_cell(path)] += found.analysis.variables[path].size_bytes
    # Beside activations and the step's gradients: a weight, two slots, the gradient of the other
    # replica; or the copy of a weight that the other one owns.
    for replica in range(2):
        for k, cell in enumerate(found.cells):
            elsewhere = owned[1 - replica][k]
            gradients = owned[replica][k] + elsewhere
            kept = 4 * owned[replica][k] + gradients
            beside = found.device_bytes[2 * replica + k] - kept
            assert beside >= cell.activation_bytes + elsewhere
            assert beside <= max(
                cell.activation_bytes + elsewhere, 3 * owned[replica][k] + 256 * 256 * 4
            )


def test_the_gradient_of_a_table_is_counted_by_the_rows_that_are_sent() -> None:
    """An owner of 4,096 rows receives those of 3 micro-batches with 4 ids each."""
    params = pipe(
        layers.Embedding.Params(vocabulary=4096, units=8),
        layers.Dense.Params(units=8, use_bias=False),
        layers.MeanSquaredError.Params(),
        num_micro_batches=6,
        num_replicas=2,
    )
    fields = {"x": tf.TensorSpec([12, 2], tf.int32), "target": floats(12, 2, 8)}
    found = step_plan.make(params, fields, optimizer_params=ADAM)
    table, kernel = 4096 * 8 * 4, 8 * 8 * 4
    rows = 3 * 2 * 2 * (8 * 4 + 8)
    (cell,) = found.cells  # of the table's owner; the other replica owns the kernel
    assert cell.gradient_bytes == table + kernel + rows
    received = [one.size for one in found.exchange.gradients]
    assert sorted(received) == sorted([rows, kernel])
    # The sum of earlier mini-batches is at the owner alone.
    several = step_plan.make(params, fields, optimizer_params=ADAM, accumulate=2)
    assert several.cells[0].gradient_bytes == cell.gradient_bytes + table
