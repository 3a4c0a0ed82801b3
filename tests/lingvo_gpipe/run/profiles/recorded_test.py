"""Mini-batches and groups of a step become timelines, and rows that add up to the whole step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.network import replicas
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.run.profiles import prediction, recorded
from lingvo_gpipe.schedule import breakdown, simulate
from tests.tiny_task import tiny_task

BEGUN_S = 1_000.0


def assembled(
    num_replicas: int = 1, layers: Sequence[slot_times.LayerTime] | None = None
) -> recorded.Assembler:
    model = tiny_task().model
    model.set(num_replicas=num_replicas, num_micro_batches=3, schedule="gpipe")
    specs = {"point": tf.TensorSpec([9, 4]), "label": tf.TensorSpec([9], tf.int32)}
    return recorded.Assembler(network.analyze(model, specs), layers)


def part(
    assembler: recorded.Assembler, num_micro_batches: int, begun_s: float, length_s: float
) -> recorded.Part:
    """Return a part whose slots take 1 s and 2 s and begin half a second after it."""
    analysis = assembler.analysis
    spans: list[simulate.Span] = []
    shares = replicas.shares(num_micro_batches, analysis.params.num_replicas)
    for number, share in enumerate(filter(None, shares)):
        table = analysis.training_pass(len(share)).table
        for span in simulate.simulate(table, [1.0] * 2, [2.0] * 2).spans:
            slot = dataclasses.replace(span.slot, micro_batch=span.slot.micro_batch + share.start)
            own = simulate.Span(span.device + 2 * number, slot, span.start_s, span.end_s)
            spans.append(own.later(begun_s + 0.5))
    return recorded.Part(breakdown.Around(begun_s, begun_s + length_s), spans)


def test_parts_follow_each_other_without_what_is_between_them() -> None:
    """Two of three micro-batches, 12 s of slots each, with 7 s between them and 3 s of update."""
    assembler = assembled()
    parts = [part(assembler, 3, BEGUN_S, 13.0), part(assembler, 3, BEGUN_S + 20.0, 15.5)]
    step = assembler.step(parts, 2.0, {})
    assert step.num_parts == 2
    (timelines,) = step.timelines
    assert [timeline.first_s for timeline in timelines] == pytest.approx([0.5, 13.5])
    for row in step.rows:
        assert sum(row.values()) == pytest.approx(2.0 + 13.0 + 15.5)
        assert row["input"] == 2.0
        assert row["start"] == pytest.approx(1.0)
        assert row["update"] == pytest.approx(0.5 + 3.0)
        assert row["forward"] == pytest.approx(6.0)
        assert row["recomputation"] + row["backward"] == pytest.approx(12.0)
        assert row["fill and drain"] == pytest.approx(6.0)


def test_measured_layers_divide_slots() -> None:
    """Of a backward of 2 s, a quarter is recomputed; the last cell recomputes nothing once."""
    layers = [slot_times.LayerTime(1.0, 3.0, 1.0, 4.0)] * 4
    assembler = assembled(layers=layers)
    step = assembler.step([part(assembler, 3, BEGUN_S, 13.0)], 0.0, {})
    first, second = step.rows
    assert first["recomputation"] == pytest.approx(3 * 2.0 / 4)
    assert first["backward"] == pytest.approx(3 * 2.0 * 3 / 4)
    assert second["recomputation"] == pytest.approx(2 * 2.0 / 4)
    by_flops = assembled().step([part(assembler, 3, BEGUN_S, 13.0)], 0.0, {}).rows[0]
    assert by_flops["recomputation"] != pytest.approx(first["recomputation"])


def test_a_forward_that_is_measured_longer_than_the_fused_program_is_all_of_it() -> None:
    """As where another process disturbed one of the two measurements."""
    layers = [slot_times.LayerTime(1.0, 0.1, 1.1, 0.9)] * 4
    assembler = assembled(layers=layers)
    whole = part(assembler, 3, BEGUN_S, 13.0)
    fused = [s for s in whole.spans if str(s.slot) != "1B2"]  # its backward is in its forward
    step = assembler.step([recorded.Part(whole.around, fused)], 0.0, {})
    for row in step.rows:
        assert min(row.values()) >= -1e-9
        assert row["recomputation"] <= 3 * 2.0
    assert prediction.line(step.timelines[0], step.rows).startswith("it took 13000.0 ms")


def test_a_replica_without_micro_batches_waits_for_the_others() -> None:
    assembler = assembled(num_replicas=2)
    parts = [part(assembler, 3, BEGUN_S, 20.0), part(assembler, 1, BEGUN_S + 20.0, 15.0)]
    step = assembler.step(parts, 0.0, {})
    first, second = step.timelines
    assert [len(first), len(second)] == [2, 1]
    assert len(step.rows) == 4
    for row in step.rows:
        assert sum(row.values()) == pytest.approx(35.0)
    assert [row["imbalance"] for row in step.rows] == pytest.approx([0.0, 0.0, 15.0, 15.0])
    assert [row["forward"] for row in step.rows] == pytest.approx([3.0, 3.0, 1.0, 1.0])
