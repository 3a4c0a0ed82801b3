"""A run with `--profile_steps` writes timelines of these steps, and its numbers are the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, network
from lingvo_gpipe.execution import monitoring
from lingvo_gpipe.network import replicas
from lingvo_gpipe.run import loop, profiles
from lingvo_gpipe.schedule import breakdown, simulate
from tests.support import saved
from tests.tiny_task import tiny_task


def tags(folder: Path) -> set[tuple[str, int]]:
    """Return (tag, step) of everything in TensorBoard's files."""
    found = set()
    for path in folder.glob("events.*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            found |= {(value.tag, event.step) for value in event.summary.value}
    return found


def check_both_timelines(events: list[dict[str, Any]]) -> None:
    """The measured timeline and the simulated one have the same slots and begin together."""
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["measured", "simulated"]
    measured, simulated = (
        {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == process}
        for process in processes.values()
    )
    assert {name: e["tid"] for name, e in measured.items()} == {
        name: e["tid"] for name, e in simulated.items()
    }
    first, other = (min(e["ts"] for e in each.values()) for each in (measured, simulated))
    assert other == pytest.approx(first)
    for cell in ("0F", "0B"):
        mean, *others = [
            statistics.fmean(e["dur"] for name, e in each.items() if name.startswith(cell))
            for each in (measured, simulated)
        ]
        assert others == [pytest.approx(mean)]


@pytest.mark.parametrize(
    ("num_replicas", "accumulate"),
    [(2, 1), (1, 2)],
)
def test_chosen_steps_are_recorded_and_numbers_stay(
    tmp_path: Path, num_replicas: int, accumulate: int
) -> None:
    lines: list[str] = []
    for name, chosen in (("plain", range(0)), ("timed", range(2, 4))):
        task = tiny_task(max_steps=4, accumulate=accumulate)
        task.model.set(num_partitions=2, num_micro_batches=4, num_replicas=num_replicas)
        loop.run(task, tmp_path / name, report=lines.append, profile_steps=chosen)
    saved.check_same(*(saved.newest(tmp_path / name) for name in ("plain", "timed")))
    folder = tmp_path / "timed" / "timeline"
    traces = sorted(path.name for path in folder.glob("*.json"))
    assert traces == [
        f"step_{step}_replica_{replica}.json" for step in (2, 3) for replica in range(num_replicas)
    ]
    trace = json.loads((folder / traces[0]).read_text())
    slots = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slots} == {0, 1}
    assert all(event["dur"] >= 0 for event in slots)
    check_both_timelines(trace["traceEvents"])
    measured = [event for event in slots if event["pid"] == 0]
    count = 4 // num_replicas
    assert {event["args"]["micro_batch"] for event in measured} == set(range(count))
    slot_names = [event["name"] for event in measured]
    assert len(slot_names) == len(set(slot_names)) == count * 2 * 2
    written = tags(tmp_path / "timed" / "train")
    names = ("measured", "simulated_from_means", "breakdown")
    assert {(f"timeline/{name}", step) for name in names for step in (2, 3)} <= written
    assert ("timeline/measured", 4) not in written
    (line, other) = [text for text in lines if "that its table needs" in text]
    several = f", the last of {accumulate} mini-batches" if accumulate > 1 else ""
    names_of = [f"step {step}{several}:" for step in (2, 3)]
    assert [text.splitlines()[0] for text in (line, other)] == names_of
    _, *rows = [row.split("  ") for row in line.splitlines()[1:-1]]
    assert len(rows) == 2 * num_replicas
    for row in rows:
        shares = [float(cell.strip().removesuffix(" %")) for cell in row if cell.endswith("%")]
        assert sum(shares) == pytest.approx(100.0, abs=1.0)


def test_times_of_workers_are_by_the_clock_of_the_chief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device's clock is three seconds ahead, and that of the first is right."""
    ahead_s, read = 3.0, monitoring.Stamps.read
    workers = {0: "/device:CPU:0", 1: "/device:CPU:1"}
    monkeypatch.setattr(
        monitoring.Stamps,
        "read",
        lambda self: [span.later(ahead_s * span.device) for span in read(self)],
    )
    monkeypatch.setattr(profiles, "workers_of", lambda _: workers)
    monkeypatch.setattr(
        profiles, "_time_of", lambda host: time.time() + (ahead_s if host == workers[1] else 0.0)
    )
    task, lines = tiny_task(max_steps=2), list[str]()
    task.model.set(num_micro_batches=4, schedule="interleaved", cells_per_device=2)
    task.model.set(num_partitions=2, devices=tuple(workers.values()))
    loop.run(task, tmp_path, report=lines.append, profile_steps=range(2, 3))
    trace = json.loads((tmp_path / "timeline" / "step_2_replica_0.json").read_text())
    slots = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    ends = {event["name"]: event["ts"] + event["dur"] for event in slots}
    for event in slots:
        if event["name"].startswith("1F"):
            assert 0.0 <= event["ts"] - ends[event["name"].replace("1F", "0F")] < 1e6 * ahead_s
    (line,) = [line for line in lines if "clocks" in line]
    assert "clocks differ from the chief's: worker 0: +0.0 ms, worker 1: +3000.0 ms" in line


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in the way, as a full disk: the run goes on."""
    folder, lines = tmp_path / "timeline", list[str]()
    folder.touch()
    chosen = range(2, 3)
    result = loop.run(tiny_task(max_steps=3), tmp_path, report=lines.append, profile_steps=chosen)
    assert result.step == 3
    assert f"{folder}/step_2_replica_0.json cannot be written: " in caplog.text
    assert any(line.startswith("step 2:") for line in lines)


def test_steps_that_a_run_does_not_reach_are_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    loop.run(tiny_task(max_steps=2), tmp_path, report=lines.append, profile_steps=range(5, 7))
    assert (
        "--profile_steps=5:7: this run has computed none of these steps; its last one was 2"
    ) in lines
    assert not (tmp_path / "timeline").exists()


@pytest.mark.parametrize("text", ["5", "3:3", "4:3", "a:b", "0:2", "-1:2", "1:2:3", ""])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(errors.ParamsError, match="is not a range of steps"):
        profiles.parse_steps(text)


# --- from spans to timelines ----------------------------------------------------------------------

BEGUN_S = 1_000.0


def assembled(num_replicas: int = 1) -> profiles.StepAssembler:
    model = tiny_task().model
    model.set(num_replicas=num_replicas, num_micro_batches=3, schedule="gpipe")
    specs = {"point": tf.TensorSpec([9, 4]), "label": tf.TensorSpec([9], tf.int32)}
    return profiles.StepAssembler(network.analyze(model, specs))


def spans_of(assembler: profiles.StepAssembler, num_micro_batches: int) -> list[simulate.Span]:
    """Return forwards of 1 s and backwards of 2 s; the first begins 0.5 s after BEGUN_S."""
    analysis = assembler.analysis
    spans: list[simulate.Span] = []
    shares = replicas.shares(num_micro_batches, analysis.params.num_replicas)
    for number, share in enumerate(filter(None, shares)):
        table = analysis.training_pass(len(share)).table
        for span in simulate.simulate(table, {"F": 1.0, "B": 2.0}).spans:
            slot = dataclasses.replace(span.slot, micro_batch=span.slot.micro_batch + share.start)
            of_replica = simulate.Span(span.device + 2 * number, slot, span.start_s, span.end_s)
            spans.append(of_replica.later(BEGUN_S + 0.5))
    return spans


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    """12 s of slots, half a second before them and 3 s after them."""
    assembler = assembled()
    around = breakdown.Around(BEGUN_S, BEGUN_S + 15.5, input_s=2.0)
    step = assembler.step(spans_of(assembler, 3), around)
    (timeline,) = step.timelines
    assert timeline.first_s == pytest.approx(0.5)
    for row in step.rows:
        assert sum(row.values()) == pytest.approx(2.0 + 15.5)
        assert row["input"] == 2.0
        assert row["start"] == pytest.approx(0.5)
        assert row["update"] == pytest.approx(3.0)
        assert row["forward"] == pytest.approx(3.0)
        assert row["recomputation"] + row["backward"] == pytest.approx(6.0)
        assert row["fill and drain"] == pytest.approx(3.0)


def test_replicas_have_timelines_of_their_own() -> None:
    assembler = assembled(num_replicas=2)
    around = breakdown.Around(BEGUN_S, BEGUN_S + 20.0)
    for num_micro_batches, counts in ((3, [2, 1]), (1, [1])):
        step = assembler.step(spans_of(assembler, num_micro_batches), around)
        assert [each.table.num_micro_batches for each in step.timelines] == counts
        assert len(step.rows) == 2 * len(counts)
        for row in step.rows:
            assert sum(row.values()) == pytest.approx(20.0)


# --- clocks of workers ----------------------------------------------------------------------------

TODAY_S = 1_795_713_390.123_456
TICK_S = math.ulp(TODAY_S)


@pytest.mark.parametrize("start", range(8))
def test_the_smallest_step_of_a_float_is_no_difference(start: int) -> None:
    """Whether a sum of two times is rounded up or down depends on their last digits."""
    asked_s = TODAY_S + TICK_S * start
    for its, between in itertools.combinations_with_replacement(range(4), 2):
        mine = itertools.cycle([asked_s, asked_s + TICK_S * between])
        answers = itertools.repeat(asked_s + TICK_S * its)
        assert profiles.clock_ahead_s(answers.__next__, mine.__next__) == 0.0, (its, between)


def test_microseconds_that_are_cut_off_are_no_difference() -> None:
    """`tf.timestamp` answers at once, with what is less than a microsecond cut off."""
    now_s = TODAY_S + 0.7e-6
    assert profiles.clock_ahead_s(lambda: math.floor(now_s * 1e6) / 1e6, lambda: now_s) == 0.0


@pytest.mark.parametrize("ahead_s", [3.0, 1e-3, -1e-3, -3.0])
def test_a_clock_that_differs_is_found(ahead_s: float) -> None:
    mine = itertools.count(TODAY_S, 1e-4)
    measured_s = profiles.clock_ahead_s(lambda: next(mine) + ahead_s, mine.__next__)
    assert measured_s == pytest.approx(ahead_s, abs=2e-4)
