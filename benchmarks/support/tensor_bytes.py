"""Bytes of this process and of its tensors on CPUs."""

from __future__ import annotations

import itertools
import pathlib
import tempfile
from collections.abc import Callable

import tensorflow as tf


def peak(step: Callable[[], object]) -> int:
    """Return the most bytes that tensors of a step request at once, by the profiler's events."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    space = xplane_pb2.XSpace()
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options):
            step()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space.ParseFromString(file.read_bytes())
    changes = []
    for plane in space.planes:
        kinds = {number: meta.name for number, meta in plane.event_metadata.items()}
        names = {number: meta.name for number, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(
                    kinds[event.metadata_id]
                )
                if sign is not None:
                    stats = {names[stat.metadata_id]: stat.int64_value for stat in event.stats}
                    when = line.timestamp_ns * 1000 + event.offset_ps
                    changes.append((when, sign * stats["requested_bytes"]))
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def allocated(figure: str) -> int:
    """Return the bytes that the allocator holds, `current` or at their `peak` since the reset."""
    return int(tf.config.experimental.get_memory_info("CPU:0")[figure])


def resident(figure: str) -> int:
    """Return the resident bytes of this process: VmRSS, or VmHWM, the most so far."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{figure}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(figure)
