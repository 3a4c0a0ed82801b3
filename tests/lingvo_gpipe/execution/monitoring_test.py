"""When slots run is noted on their devices, and changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Slot
from tests.networks import pipelines


def gradients(own: pipelining.PipeliningLayer, rows: int = pipelines.N) -> dict[str, tf.Tensor]:
    fields = {name: value[:rows] for name, value in pipelines.batch().items()}

    @tf.function(autograph=False)
    def step() -> dict[str, tf.Tensor]:
        return own.value_and_gradients(fields).gradients

    found: dict[str, tf.Tensor] = step()
    return found


def check_order(own: pipelining.PipeliningLayer, spans: list[simulate.Span], M: int) -> None:
    """Check that the spans are those of the table, each after what it needs."""
    network_pass = own.analysis.training_pass(M)
    ran = {span.slot: span for span in spans}
    expected = {
        slot
        for slot in network_pass.table
        if not (slot.phase == "B" and slot.micro_batch in network_pass.cells[slot.cell].fused)
    }
    assert ran.keys() == expected
    for slot, span in ran.items():
        assert span.end_s >= span.start_s
        assert span.device == network_pass.table.device_of(slot.cell)
        for need in slot.needs(network_pass.table.num_cells):
            if need in ran and ran[need].device == span.device:
                assert span.start_s >= ran[need].end_s
            elif need in ran:  # the call has returned; its time may be noted a moment later
                assert span.start_s >= ran[need].start_s


@pytest.mark.parametrize("recompute", ["full", "early", "never"])
def test_every_call_is_noted_in_order(recompute: str) -> None:
    plain, own = (pipelines.three(recompute=recompute) for _ in range(2))
    for one in (plain, own):
        one.build(pipelines.batch())
    stamps = own.executor.note_times()
    assert stamps.read() == []
    wanted, found = gradients(plain), gradients(own)
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value)
    check_order(own, stamps.read(), 4)


def test_the_last_pass_is_read_whatever_its_size() -> None:
    own = pipelines.pipe(num_partitions=3, num_micro_batches=4)
    own.build(pipelines.batch())
    stamps = own.executor.note_times()
    for rows in (8, 3, 8):
        gradients(own, rows)
        check_order(own, stamps.read(), min(rows, 4))


def test_slots_of_all_replicas_are_noted() -> None:
    own = pipelines.three(num_replicas=2)
    own.build(pipelines.batch())
    stamps = own.executor.note_times()
    gradients(own)
    spans = stamps.read()
    assert {span.device for span in spans} == set(range(6))
    numbers = [{s.slot.micro_batch for s in spans if (s.device >= 3) == later} for later in (0, 1)]
    assert numbers == [{0, 1}, {2, 3}]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_from_any_point_of_a_pass_the_slot_that_is_named_can_run(num_replicas: int) -> None:
    own = pipelines.three(num_replicas=num_replicas, schedule="zb_h1")
    own.build(pipelines.batch())
    progress = own.executor.follow_progress()
    assert progress.lines()[0].startswith("no slot has begun")
    gradients(own)
    assert progress.lines()[0] == "no slot is running"
    orders = [[slot for _, slot in slots] for slots in progress._passes[0].slots]
    done = [0] * len(orders)
    returned: set[Slot] = set()
    computed = set(itertools.chain(*orders))
    for _ in range(len(computed)):
        for counter, count in zip(progress._counters, done, strict=True):
            counter.assign([0, count])
        first = progress.lines()[0].split()
        slot, device = Slot.parse(first[4]), int(first[7])
        assert slot == orders[device][done[device]]
        assert returned >= computed & set(slot.needs(own.analysis.table.num_cells))
        returned.add(slot)
        done[device] += 1


def test_devices_do_not_wait_for_each_others_notes() -> None:
    """Operations with effects are run in order, over all devices, unless they are freed of it."""
    own = pipelines.three()
    own.build(pipelines.batch())
    own.executor.note_times()
    graph = pipelines.graph_of(lambda: own.value_and_gradients(pipelines.batch()).gradients)
    stamps = [op for op in graph.get_operations() if op.type == "Timestamp"]
    assert len(stamps) == 2 * len(pipelines.calls(graph))
    for op in stamps:
        before = [other for other in op.control_inputs if other.type == "Timestamp"]
        assert all(other.device == op.device for other in before)
