"""One recorded step: timelines of its slots, and where the time of each device went."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from lingvo_gpipe.network import analysis, replicas
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.run.profiles import clocks
from lingvo_gpipe.schedule import breakdown, simulate
from lingvo_gpipe.schedule.slot import Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """When the slots of one mini-batch, or group of micro-batches, ran.

    Attributes:
        around: when it began and ended, in seconds since 1970.
        spans: its calls, by the same clock; a device is that of its replica, replica after replica.
    """

    around: breakdown.Around
    spans: Sequence[simulate.Span]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """One step: timelines of each replica, and the parts of each device's time.

    Attributes:
        timelines: of each replica, of each mini-batch or group that it computed; times are from
            the start of the step.
        rows: parts of the time of each device, replica after replica, over the whole step.
        num_parts: number of mini-batches or groups.
        ahead: number of a worker → its clock, of those that differ from this process's, by
            which all times are.
    """

    timelines: tuple[tuple[simulate.Timeline, ...], ...]
    rows: tuple[dict[str, float], ...]
    num_parts: int
    ahead: Mapping[int, clocks.Ahead]


class Assembler:
    """Makes timelines and breakdowns of steps from when the slots of their parts ran.

    Attributes:
        analysis: the network that runs each part.
    """

    def __init__(
        self,
        analyzed: analysis.Analysis,
        layers: Sequence[slot_times.LayerTime] | None = None,
    ) -> None:
        """Prepare.

        Args:
            analyzed: see `analysis`.
            layers: times of each layer, which divide a slot into recomputation and backward, or a
                fused one into forward and backward; None: by FLOPs.
        """
        self.analysis = analyzed
        self._layers = layers

    def step(
        self, parts: Sequence[Part], input_s: float, ahead: Mapping[int, clocks.Ahead]
    ) -> Recorded:
        """Return what was recorded of a step.

        Args:
            parts: its mini-batches or groups, in order. What is between two of them does not
                belong to the step.
            input_s: seconds for which it waited for its mini-batches.
            ahead: see `Recorded`.
        """
        timelines: list[list[simulate.Timeline]] = []
        rows: list[dict[str, float]] = []
        begun_s = 0.0
        for number, part in enumerate(parts):
            length_s = part.around.ended_s - part.around.begun_s
            around = breakdown.Around(begun_s, begun_s + length_s, input_s if number == 0 else 0.0)
            own = self._timelines(part.spans, begun_s - part.around.begun_s)
            timelines += [[] for _ in own[len(timelines) :]]
            own_rows: list[dict[str, float]] = []
            for of_replica, timeline in zip(timelines, own, strict=False):
                of_replica.append(timeline)
                recomputed = functools.partial(self._recomputed, timeline.table.num_micro_batches)
                own_rows += breakdown.of_step(timeline, around, recomputed)
            rows = breakdown.added(rows, own_rows)
            begun_s += length_s
        return Recorded(tuple(map(tuple, timelines)), tuple(rows), len(parts), ahead)

    def _timelines(self, spans: Sequence[simulate.Span], later_s: float) -> list[simulate.Timeline]:
        """Return the timeline of each replica that has micro-batches of a part."""
        num_micro_batches = 1 + max(span.slot.micro_batch for span in spans)
        shares = replicas.shares(num_micro_batches, self.analysis.params.num_replicas)
        found = []
        for number, share in enumerate(filter(None, shares)):  # the first ones have micro-batches
            table = self.analysis.training_pass(len(share)).table
            first_device = number * table.num_devices
            mine = [
                simulate.Span(
                    span.device - first_device,
                    dataclasses.replace(span.slot, micro_batch=span.slot.micro_batch - share.start),
                    span.start_s + later_s,
                    span.end_s + later_s,
                )
                for span in spans
                if first_device <= span.device < first_device + table.num_devices
            ]
            found.append(breakdown.with_backwards(table, mine, self._fused))
        return found

    @functools.cached_property
    def _times(self) -> Sequence[slot_times.LayerTime]:
        """Times of the layers."""
        return self._layers or slot_times.by_flops(self.analysis)

    @functools.cached_property
    def _fused(self) -> float:
        """Share of the forward where it is fused with its backward."""
        times = slot_times.program_times(self.analysis, self.analysis.cells[-1], self._times)
        # Measured apart, a forward may take longer than both together.
        return min(1.0, times["F"] / times["FB"]) if times["FB"] else 1 / 3

    def _recomputed(self, num_micro_batches: int, slot: Slot) -> float:
        """Return the share of the recomputation in a slot."""
        cell = self.analysis.training_pass(num_micro_batches).cells[slot.cell]
        name = cell.program(slot.phase, slot.micro_batch)
        if name not in ("B", "I"):
            return 0.0
        times = slot_times.program_times(self.analysis, cell, self._times)
        return times["R"] / times[name] if times[name] else 0.0
