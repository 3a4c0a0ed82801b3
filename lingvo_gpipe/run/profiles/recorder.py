"""Records when the slots of some steps ran, and writes timelines and breakdowns."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tensorflow as tf
from absl import logging

from lingvo_gpipe.console import units
from lingvo_gpipe.run import summaries
from lingvo_gpipe.run.learner import Learner
from lingvo_gpipe.run.profiles import clocks, picture, prediction, recorded, worker_traces
from lingvo_gpipe.schedule import breakdown, drawing, simulate

FOLDER = "timeline"
"""Folder of a log directory, for the traces."""


class Recorder:
    """Records steps of a run; none of their numbers changes.

    Where an update has several mini-batches, or groups of micro-batches, times are read after each:
    all of them are in the breakdown and in the trace; the pictures show the last one. TensorFlow's
    own profiler, which slows a step down, records the step after the chosen ones.
    """

    def __init__(
        self,
        chosen: range,
        learner: Learner,
        logdir: Path,
        report: Callable[[str], None],
        planned: prediction.Planned | None = None,
    ) -> None:
        """Prepare; the learner has run nothing yet.

        Args:
            chosen: the steps, from 1 on.
            learner: the network in training.
            logdir: log directory of the run.
            report: prints a line for the user.
            planned: seconds of a step and its update by measured programs; None: not measured.
        """
        self._planned = planned
        self.chosen = chosen
        self._learner = learner
        self._logdir = logdir
        self._report = report
        self._stamps = learner.pipe.executor.note_times()
        layers = None if planned is None else planned.layers
        self._assembler = recorded.Assembler(learner.pipe.analysis, layers)
        self._parts: list[recorded.Part] = []
        self._ahead: dict[int, clocks.Ahead] = {}
        self._reading_s: list[float] = []  # after each part
        self._num_traces = 0  # before the step
        self._recorded_any = False
        self._traced = False

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Note the times of the step that runs inside, if it was chosen.

        TensorFlow's profiler records it, if it follows the chosen ones.

        Args:
            step: its number.
        """
        if step in self.chosen:
            with self.noting():
                yield
        elif step == self.chosen.stop and self._recorded_any:
            with self._traced_by_tensorflow(step):
                yield
        else:
            yield

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the times of the step that runs inside."""
        self._parts, self._ahead, self._reading_s = [], {}, []
        self._learner.after_part = self._note
        self._num_traces = self._learner.num_traces
        try:
            yield
        finally:
            self._learner.after_part = None

    @contextlib.contextmanager
    def _traced_by_tensorflow(self, step: int) -> Iterator[None]:
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

    def record(self, step: int, input_s: float, writer: summaries.Writer) -> float:
        """Write the timeline of the step that has just ended, if it was chosen.

        Args:
            step: its number.
            input_s: seconds for which it waited for its mini-batches.
            writer: of the run's curves.

        Returns:
            The seconds of the step in which its times were read.
        """
        if step not in self.chosen:
            return 0.0
        self._recorded_any = True
        found = self.last(input_s)
        name = f"step {step}"
        if found.num_parts > 1:
            name += f", {found.num_parts} mini-batches or groups"
        measured = found.timelines[0]
        labels = self._labels(len(found.rows), len(found.timelines))
        folder = self._logdir / FOLDER
        for number, timelines in enumerate(found.timelines):
            path = folder / f"step_{step}_replica_{number}.json"
            both = {"measured": timelines, "simulated": list(map(_simulated_beside, timelines))}
            joined = {key: simulate.joined(each) for key, each in both.items()}
            _write(path, drawing.chrome_trace(joined))
        rows = breakdown.table_of(found.rows, labels)
        lines = units.table(rows, "l" + "r" * (len(rows[0]) - 1))
        builds = self._learner.num_traces > self._num_traces
        compared = prediction.line(measured, found.rows, builds=builds)
        if self._planned is not None:
            beside = prediction.beside_plan(measured, found.rows, self._planned)
            compared = f"{compared}; {beside}"
        last = measured[-1]
        simulated = list(map(_simulated, measured))
        writer.png(step, "timeline/measured", drawing.draw(last.later(-last.first_s)))
        writer.png(step, "timeline/simulated_from_means", drawing.draw(simulated[-1]))
        writer.png(step, "timeline/breakdown", picture.of_breakdown(found.rows, labels))
        text = "\n".join([*lines, compared])
        _write(folder / f"step_{step}.txt", text + "\n")
        writer.text(step, "timeline/breakdown", text)
        writer.flush()
        slots_s = sum(timeline.length_s for timeline in measured)
        share = sum(timeline.makespan_s for timeline in simulated) / slots_s
        self._report(
            "\n".join(
                [
                    f"{name}: slots took {1e3 * slots_s:.1f} ms; their table with mean times "
                    f"needs {share:.0%} of that",
                    *lines,
                    f"traces for ui.perfetto.dev: {folder}",
                ]
            )
        )
        self._report(f"{name}: {compared}")
        if found.ahead:
            self._report(
                f"{name}: times are corrected, because clocks differ from the chief's: "
                f"{clocks.line(found.ahead)}"
            )
        return sum(self._reading_s)

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

    def last(self, input_s: float = 0.0) -> recorded.Recorded:
        """Return the timelines and the parts of the step that has just ended.

        Args:
            input_s: seconds for which it waited for its mini-batches.
        """
        *parts, last = self._parts
        # The update of the weights follows the reading of the last part's times.
        around = dataclasses.replace(last.around, ended_s=time.time() - self._reading_s[-1])
        parts.append(dataclasses.replace(last, around=around))
        return self._assembler.step(parts, input_s, self._ahead)

    def _note(self, begun_s: float) -> None:
        """Read the times of the mini-batch or group that has just ended."""
        ended_s = time.time()
        spans, ahead = self._by_one_clock(self._stamps.read())
        self._parts.append(recorded.Part(breakdown.Around(begun_s, ended_s), spans))
        self._ahead |= ahead
        self._reading_s.append(time.time() - ended_s)

    def _by_one_clock(
        self, spans: Sequence[simulate.Span]
    ) -> tuple[list[simulate.Span], dict[int, clocks.Ahead]]:
        """Return spans by this process's clock, and how far the clocks of workers are ahead."""
        hosts = self._stamps.hosts
        workers = worker_traces.workers_of([hosts])
        ahead = clocks.of_workers(workers)
        of_host = {workers[number]: clock.seconds for number, clock in ahead.items()}
        return [span.later(-of_host.get(hosts[span.device], 0.0)) for span in spans], ahead

    def _labels(self, count: int, num_replicas: int) -> list[str]:
        """Return the names of the devices of all replicas that computed."""
        per_replica = count // num_replicas
        if self._learner.pipe.analysis.params.num_replicas == 1:
            return [f"device {number}" for number in range(count)]
        return [f"replica {n // per_replica}, device {n % per_replica}" for n in range(count)]


def _write(path: Path, text: str) -> None:
    """Write a file whole, or warn: the run does not need it."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        logging.warning("%s cannot be written: %s", path, error.strerror)


def _simulated(measured: simulate.Timeline) -> simulate.Timeline:
    """Return what the table needs with the mean times of its slots."""
    return breakdown.simulate_means(measured.table, breakdown.mean_seconds(measured))


def _simulated_beside(measured: simulate.Timeline) -> simulate.Timeline:
    """Return the same from the measured first slot's start.

    Slots that computed nothing are not in it, as they are not in the measured one.
    """
    simulated = _simulated(measured)
    ran = {span.slot for span in measured.spans}
    spans = tuple(span for span in simulated.spans if span.slot in ran)
    return simulate.Timeline(measured.table, spans).later(measured.first_s)
