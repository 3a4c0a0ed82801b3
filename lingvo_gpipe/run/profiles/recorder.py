"""Records when the slots of some steps ran, and writes timelines and breakdowns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe.console import units
from lingvo_gpipe.network import replicas
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.run import summaries
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.run.profiles import clocks, picture, prediction, worker_traces
from lingvo_gpipe.schedule import breakdown, drawing, simulate
from lingvo_gpipe.schedule.slot import Slot

FOLDER = "timeline"
"""Folder of a log directory, for the traces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """One step: a timeline for each replica, and the parts of each device's time.

    Attributes:
        timelines: of each replica; its times are from the start of the step.
        rows: parts of the time of each device, replica after replica.
        simulated: the table of the first replica with the mean times of its slots.
        ahead: number of a worker → its clock, of those that differ from this process's, by
            which all times are.
    """

    timelines: tuple[simulate.Timeline, ...]
    rows: tuple[dict[str, float], ...]
    simulated: simulate.Timeline
    ahead: Mapping[int, clocks.Ahead]


class Recorder:
    """Records steps of a run; none of their numbers changes.

    An update of several mini-batches, or groups of micro-batches, is recorded from the beginning of
    the last one; the others are not in it. TensorFlow's own profiler, which slows a step down,
    records the step after the chosen ones.
    """

    def __init__(
        self,
        chosen: range,
        learner: Learner,
        logdir: Path,
        report: Callable[[str], None],
        planned_s: float | None = None,
    ) -> None:
        """Prepare; the learner has run nothing yet.

        Args:
            chosen: the steps, from 1 on.
            learner: the network in training.
            logdir: log directory of the run.
            report: prints a line for the user.
            planned_s: seconds of a step and its update by measured programs; None: not measured.
        """
        self._planned_s = planned_s
        self.chosen = chosen
        self._learner = learner
        self._logdir = logdir
        self._report = report
        self._stamps = learner.pipe.executor.note_times()
        self._recorded_any = False
        self._traced = False

    @contextlib.contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Let TensorFlow's profiler record what runs inside, if the step follows the chosen ones.

        Args:
            step: number of the step that runs inside.
        """
        if step != self.chosen.stop or not self._recorded_any:
            yield
            return
        self._traced = True
        folder = self._logdir / "train"
        workers = worker_traces.workers_of(self._learner.pipe.executor.devices)
        with (
            worker_traces.traced(workers, self._logdir, self._report) as of_workers,
            tf.profiler.experimental.Profile(str(folder)),
        ):
            yield
        also = f"; of the workers, in {self._logdir}/worker_*" if of_workers else ""
        self._report(
            f"step {step}: profile for TensorBoard's xprof in {folder}/plugins/profile{also}"
        )

    def record(self, step: int, input_s: float, writer: summaries.Writer) -> None:
        """Write the timeline of the step that has just ended, if it was chosen.

        Args:
            step: its number.
            input_s: seconds for which it waited for its mini-batches.
            writer: of the run's curves.
        """
        if step not in self.chosen:
            return
        self._recorded_any = True
        parts = self._learner.num_parts
        # The last of several waits for no input.
        own_input_s = input_s if parts == 1 else 0.0
        around = breakdown.Around(self._learner.last_begun_s, time.time(), own_input_s)
        name = f"step {step}"
        if parts > 1:
            name += f", the last of its {parts} mini-batches or groups"
        recorded = self.last(around)
        labels = self._labels(len(recorded.rows), len(recorded.timelines))
        first = _from_first_slot(recorded.timelines[0])
        folder = self._logdir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for number, timeline in enumerate(recorded.timelines):
            path = folder / f"step_{step}_replica_{number}.json"
            both = {"measured": timeline, "simulated": _simulated_beside(timeline)}
            path.write_text(drawing.chrome_trace(both), encoding="utf-8")
        rows = breakdown.table_of(recorded.rows, labels)
        lines = units.table(rows, "l" + "r" * (len(rows[0]) - 1))
        compared = prediction.line(recorded.timelines[0], recorded.rows)
        if self._planned_s is not None:
            beside = prediction.beside_plan(recorded.timelines[0], recorded.rows, self._planned_s)
            compared = f"{compared}; {beside}"
        writer.png(step, "timeline/measured", drawing.draw(first))
        writer.png(step, "timeline/simulated_from_means", drawing.draw(recorded.simulated))
        writer.png(step, "timeline/breakdown", picture.of_breakdown(recorded.rows, labels))
        text = "\n".join([*lines, compared])
        (folder / f"step_{step}.txt").write_text(text + "\n", encoding="utf-8")
        writer.text(step, "timeline/breakdown", text)
        writer.flush()
        share = recorded.simulated.makespan_s / first.makespan_s
        self._report(
            "\n".join(
                [
                    f"{name}: slots took {1e3 * first.makespan_s:.1f} ms; their table with "
                    f"mean times needs {share:.0%} of that",
                    *lines,
                    f"traces for ui.perfetto.dev: {folder}",
                ]
            )
        )
        self._report(f"{name}: {compared}")
        if recorded.ahead:
            self._report(
                f"{name}: times are corrected, because clocks differ from the chief's: "
                f"{clocks.line(recorded.ahead)}"
            )

    def finish(self, last_step: int) -> None:
        """Report it if none of the chosen steps was computed, or not the one after them.

        Args:
            last_step: number of the run's last step.
        """
        flag = f"--profile_steps={self.chosen.start}:{self.chosen.stop}"
        if not self._recorded_any:
            self._report(
                f"{flag}: this run has computed none of these steps; its last one was {last_step}"
            )
        elif not self._traced:
            self._report(
                f"{flag}: no profile for TensorBoard's xprof, which records step "
                f"{self.chosen.stop}; the run's last one was {last_step}"
            )

    def last(self, around: breakdown.Around) -> Recorded:
        """Return the timelines and the parts of the step that has just ended.

        Args:
            around: when it was begun and ended, in seconds since 1970.
        """
        analysis = self._learner.pipe.analysis
        spans, ahead = self._by_one_clock(self._stamps.read())
        num_replicas = analysis.params.num_replicas
        num_micro_batches = 1 + max(span.slot.micro_batch for span in spans)
        timelines: list[simulate.Timeline] = []
        rows: list[dict[str, float]] = []
        shares = replicas.shares(num_micro_batches, num_replicas)
        for number, share in enumerate(filter(None, shares)):  # the first ones have micro-batches
            table = analysis.training_pass(len(share)).table
            first_device = number * table.num_devices
            mine = [
                simulate.Span(
                    span.device - first_device,
                    dataclasses.replace(span.slot, micro_batch=span.slot.micro_batch - share.start),
                    span.start_s - around.begun_s,
                    span.end_s - around.begun_s,
                )
                for span in spans
                if first_device <= span.device < first_device + table.num_devices
            ]
            timeline = breakdown.with_backwards(table, mine, self._fused)
            timelines.append(timeline)
            length_s = around.ended_s - around.begun_s
            rows += breakdown.of_step(
                timeline,
                breakdown.Around(0.0, length_s, around.input_s),
                functools.partial(self._recomputed, len(share)),
            )
        means = breakdown.mean_seconds(timelines[0])
        simulated = breakdown.simulate_means(timelines[0].table, means)
        return Recorded(tuple(timelines), tuple(rows), simulated, ahead)

    def _by_one_clock(
        self, spans: Sequence[simulate.Span]
    ) -> tuple[list[simulate.Span], dict[int, clocks.Ahead]]:
        """Return spans by this process's clock, and how far the clocks of workers are ahead."""
        hosts = self._stamps.hosts
        workers = worker_traces.workers_of([hosts])
        ahead = clocks.of_workers(workers)
        of_host = {workers[number]: clock.seconds for number, clock in ahead.items()}
        return [span.later(-of_host.get(hosts[span.device], 0.0)) for span in spans], ahead

    @functools.cached_property
    def _times(self) -> list[slot_times.SlotTimes]:
        """Times of the slots of each cell by FLOPs."""
        analysis = self._learner.pipe.analysis
        layers = slot_times.by_flops(analysis)
        return [slot_times.of_cell(analysis, cell, layers) for cell in analysis.cells]

    @property
    def _fused(self) -> float:
        """Share of the forward where it is fused with its backward, by FLOPs."""
        times = self._times[-1]
        return times.forward_s / times.fused_s if times.fused_s else 1 / 3

    def _recomputed(self, num_micro_batches: int, slot: Slot) -> float:
        """Return the share of the recomputation in a slot, by FLOPs."""
        cell = self._learner.pipe.analysis.training_pass(num_micro_batches).cells[slot.cell]
        if slot.micro_batch in cell.kept | cell.early | cell.fused:
            return 0.0
        if slot.phase == "W" and cell.computes("I"):
            return 0.0
        times = self._times[slot.cell]
        whole_s = {
            "B": times.recompute_s + times.fused_s - times.forward_s,  # of one that recomputes
            "I": times.input_gradient_s,
            "W": times.weight_gradient_s,
        }[slot.phase]
        return min(1.0, times.recompute_s / whole_s) if whole_s else 0.0

    def _labels(self, count: int, num_replicas: int) -> list[str]:
        """Return the names of the devices of all replicas that computed."""
        per_replica = count // num_replicas
        if self._learner.pipe.analysis.params.num_replicas == 1:
            return [f"device {number}" for number in range(count)]
        return [f"replica {n // per_replica}, device {n % per_replica}" for n in range(count)]


def _from_first_slot(timeline: simulate.Timeline) -> simulate.Timeline:
    """Return a timeline that begins with its first slot."""
    return _later(timeline, -min(span.start_s for span in timeline.spans))


def _simulated_beside(measured: simulate.Timeline) -> simulate.Timeline:
    """Return what the table needs with the mean times of its slots, from the first slot's start.

    Slots that computed nothing are not in it, as they are not in the measured one.
    """
    simulated = breakdown.simulate_means(measured.table, breakdown.mean_seconds(measured))
    ran = {span.slot for span in measured.spans}
    spans = tuple(span for span in simulated.spans if span.slot in ran)
    first_s = min(span.start_s for span in measured.spans)
    return _later(simulate.Timeline(measured.table, spans), first_s)


def _later(timeline: simulate.Timeline, seconds: float) -> simulate.Timeline:
    """Return a timeline in which every slot is `seconds` later."""
    return simulate.Timeline(timeline.table, tuple(span.later(seconds) for span in timeline.spans))
