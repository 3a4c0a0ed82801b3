"""Recorded steps of a run: when each slot ran, and where the time of each device went.

`--profile_steps=A:B` times the slots of these steps; none of their numbers changes. Each becomes a
trace for Perfetto, beside what its table needs by simulation, and pictures and a breakdown in
TensorBoard.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.console import units
from lingvo_gpipe.execution import placement
from lingvo_gpipe.network import analysis, replicas
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.run import tensorboard
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.schedule import breakdown, drawing, simulate
from lingvo_gpipe.schedule.slot import Slot

FOLDER = "timeline"
"""Folder of a log directory, for the traces."""
_STEPS = re.compile(r"([0-9]{1,12}):([0-9]{1,12})", re.ASCII)


def parse_steps(text: str) -> range:
    """Return the steps that `--profile_steps` names; the first update of a run is step 1.

    Raises:
        ParamsError: the text is not A:B with 1 <= A < B.

    >>> parse_steps("10:12")
    range(10, 12)
    """
    match = _STEPS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        raise errors.ParamsError(
            f"--profile_steps={text[:40]} is not a range of steps, the first of which is 1. Write "
            "the first one and the one after the last, such as 10:12 for the steps 10 and 11"
        )
    return range(int(match[1]), int(match[2]))


# --- clocks of workers ----------------------------------------------------------------------------


def clock_ahead_s(
    ask: Callable[[], float], clock: Callable[[], float] = time.time, *, tries: int = 10
) -> float:
    """Measure how far a clock is ahead, as the Network Time Protocol does; 0 if it may be right.

    Of several answers, the one that came back soonest counts. Its time lies between question and
    answer, so the error is at most half of the time between the two, and the microsecond in which
    TensorFlow counts.

    Args:
        ask: returns its time in seconds since 1970.
        clock: returns the time of this process in seconds since 1970.
        tries: number of questions.

    >>> answers, mine = iter([8.0, 9.5] * 5), iter([3.0, 5.0, 5.0, 6.0] * 5)
    >>> clock_ahead_s(answers.__next__, mine.__next__)
    4.0
    """
    measured = []
    for _ in range(tries):
        asked_s, its_s, answered_s = clock(), ask(), clock()
        # Differences first: today's seconds since 1970 are exact to 0.2 µs, their sum to 0.5 µs.
        half_s = (answered_s - asked_s) / 2
        measured.append((half_s + 1e-6, (its_s - asked_s) - half_s))
    error_s, ahead_s = min(measured)
    return ahead_s if abs(ahead_s) > error_s else 0.0


def _time_of(host: str) -> float:
    with tf.device(host):
        return float(tf.timestamp())


# --- from spans of slots to timelines -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step: timelines of each replica, and the parts of each device's time.

    Attributes:
        timelines: of each replica that computed; times are from the start of the step.
        rows: parts of the time of each device, replica after replica.
    """

    timelines: tuple[simulate.Timeline, ...]
    rows: tuple[dict[str, float], ...]


class StepAssembler:
    """Makes timelines and breakdowns of steps from when their slots ran.

    Attributes:
        analysis: the network that runs them.
    """

    def __init__(self, analyzed: analysis.Analysis) -> None:
        """Prepare.

        Args:
            analyzed: its FLOPs divide a slot into recomputation and backward, or a fused one into
                forward and backward.
        """
        self.analysis = analyzed
        self._times = slot_times.by_flops(analyzed)

    def step(self, spans: Sequence[simulate.Span], around: breakdown.Around) -> RecordedStep:
        """Return what was recorded of a step.

        Args:
            spans: its calls, in seconds since 1970; a device is that of its replica, replica after
                replica.
            around: when it began and ended, by the same clock, and how long it waited for its
                mini-batches.
        """
        timelines = self._timelines(spans, -around.begun_s)
        around = breakdown.Around(0.0, around.ended_s - around.begun_s, around.input_s)
        rows: list[dict[str, float]] = []
        for timeline in timelines:
            recomputed = functools.partial(self._recomputed, timeline.table.num_micro_batches)
            rows += breakdown.of_step(timeline, around, recomputed)
        return RecordedStep(tuple(timelines), tuple(rows))

    def _timelines(self, spans: Sequence[simulate.Span], later_s: float) -> list[simulate.Timeline]:
        """Return the timeline of each replica that has micro-batches."""
        num_micro_batches = 1 + max(span.slot.micro_batch for span in spans)
        shares = replicas.shares(num_micro_batches, self.analysis.params.num_replicas)
        timelines = []
        for number, share in enumerate(filter(None, shares)):  # the first ones have micro-batches
            table = self.analysis.training_pass(len(share)).table
            first_device = number * table.num_devices
            of_replica = [
                simulate.Span(
                    span.device - first_device,
                    dataclasses.replace(span.slot, micro_batch=span.slot.micro_batch - share.start),
                    span.start_s + later_s,
                    span.end_s + later_s,
                )
                for span in spans
                if first_device <= span.device < first_device + table.num_devices
            ]
            timelines.append(breakdown.with_backwards(table, of_replica, self._fused))
        return timelines

    @functools.cached_property
    def _fused(self) -> float:
        """Share of the forward where it is fused with its backward."""
        times = slot_times.program_times(self.analysis, self.analysis.cells[-1], self._times)
        return times["F"] / times["FB"] if times["FB"] else 1 / 3

    def _recomputed(self, num_micro_batches: int, slot: Slot) -> float:
        """Return the share of the recomputation in a slot."""
        cell = self.analysis.training_pass(num_micro_batches).cells[slot.cell]
        name = cell.program(slot.phase, slot.micro_batch)
        if name not in ("B", "I"):
            return 0.0
        times = slot_times.program_times(self.analysis, cell, self._times)
        return times["R"] / times[name] if times[name] else 0.0


# --- recording ------------------------------------------------------------------------------------


class Recorder:
    """Records steps of a run.

    Of an update of several mini-batches, it records the last one.
    """

    def __init__(
        self,
        chosen: range,
        learner: Learner,
        logdir: Path,
        report: Callable[[str], None],
    ) -> None:
        """Prepare; the learner has run nothing yet.

        Args:
            chosen: the steps, from 1 on.
            learner: the network in training.
            logdir: log directory of the run.
            report: prints a line for the user.
        """
        self._chosen = chosen
        self._learner = learner
        self._folder = logdir / FOLDER
        self._report = report
        self._stamps = learner.pipe.executor.note_times()
        self._assembler = StepAssembler(learner.pipe.analysis)
        self._has_recorded = False

    def record(self, step: int, input_s: float, writer: tensorboard.Writer) -> None:
        """Write the timeline of the step that has just ended, if it was chosen.

        Args:
            step: its number.
            input_s: seconds for which it waited for its mini-batches.
            writer: writer of the run's curves.
        """
        ended_s = time.time()
        if step not in self._chosen:
            return
        self._has_recorded = True
        last = self._learner.last_batch
        hosts = self._stamps.hosts
        workers = workers_of(hosts)
        ahead_s = {
            host: clock_ahead_s(functools.partial(_time_of, host)) for host in workers.values()
        }
        spans = [span.later(-ahead_s.get(hosts[span.device], 0.0)) for span in self._stamps.read()]
        recorded = self._assembler.step(spans, breakdown.Around(last.begun_s, ended_s, input_s))
        for number, measured in enumerate(recorded.timelines):
            both = {"measured": measured, "simulated": _simulated_beside(measured)}
            path = self._folder / f"step_{step}_replica_{number}.json"
            tensorboard.write_text(path, drawing.chrome_trace(both))
        table = breakdown.table_of(recorded.rows, self._labels(recorded))
        lines = [*units.table(table, "l" + "r" * (len(table[0]) - 1)), _compared(recorded)]
        first = recorded.timelines[0]
        writer.png(step, "timeline/measured", drawing.draw(first.later(-first.first_s)))
        writer.png(step, "timeline/simulated_from_means", drawing.draw(_simulated(first)))
        writer.text(step, "timeline/breakdown", "\n".join(lines))
        writer.flush()
        count = last.num_batches
        which = f", the last of {count} mini-batches" if count > 1 else ""
        self._report("\n".join([f"step {step}{which}:", *lines]))
        self._report(f"traces for ui.perfetto.dev: {self._folder}")
        if any(ahead_s.values()):
            differences = ", ".join(
                f"worker {number}: {1e3 * ahead_s[host]:+.1f} ms"
                for number, host in sorted(workers.items())
            )
            self._report(
                f"times are corrected, because clocks differ from the chief's: {differences}"
            )

    def finish(self, last_step: int) -> None:
        """Report it if none of the chosen steps was computed.

        Args:
            last_step: number of the run's last step.
        """
        if not self._has_recorded:
            self._report(
                f"--profile_steps={self._chosen.start}:{self._chosen.stop}: this run has computed "
                f"none of these steps; its last one was {last_step}"
            )

    def _labels(self, recorded: RecordedStep) -> list[str]:
        """Return the names of the devices of all replicas that computed."""
        count = len(recorded.rows)
        per_replica = count // len(recorded.timelines)
        if self._assembler.analysis.params.num_replicas == 1:
            return [f"device {number}" for number in range(count)]
        return [f"replica {n // per_replica}, device {n % per_replica}" for n in range(count)]


def workers_of(devices: Sequence[str]) -> dict[int, str]:
    """Return number of a worker → its CPU, of the workers with these devices."""
    return {
        tf.DeviceSpec.from_string(host).task or 0: host
        for host in sorted(set(map(packing.host, devices)))
        if placement.is_on_worker(host)
    }


def _compared(recorded: RecordedStep) -> str:
    """Return one line that compares a step with its table.

    The table has the median time of its slots, which leaves out what disturbs a few of them.
    """
    measured = recorded.timelines[0]
    medians = breakdown.mean_seconds(measured, statistics.median)
    needed_s = simulate.simulate(measured.table, medians).makespan_s
    measured_s = sum(recorded.rows[0].values())
    return (
        f"it took {1e3 * measured_s:.1f} ms, {measured_s / needed_s:.2f} times the "
        f"{1e3 * needed_s:.1f} ms that its table needs with the median time of each slot"
    )


def _simulated(measured: simulate.Timeline) -> simulate.Timeline:
    """Return what the table needs with the mean times of its slots."""
    return simulate.simulate(measured.table, breakdown.mean_seconds(measured))


def _simulated_beside(measured: simulate.Timeline) -> simulate.Timeline:
    """Return the same from the measured first slot's start.

    Slots that computed nothing are not in it, as they are not in the measured one.
    """
    simulated = _simulated(measured)
    ran = {span.slot for span in measured.spans}
    spans = tuple(span for span in simulated.spans if span.slot in ran)
    return simulate.Timeline(measured.table, spans).later(measured.first_s)
