"""Are the times of slots that `--profile_steps` measures those of the card's kernels?

A GPU runs behind the host, and the clock of a slot is the host's. A slot's end is read once what
the device was given before has been done, or else kernels would run after their slot has ended. So
the kernels in the trace of TensorFlow's profiler must lie inside the slots of their device. On a
CPU, which has no kernels, products of matrices stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.accelerator.question import Answers, Setting
from lingvo_gpipe import layers, pipelining

K, M = 2, 4
_Span: TypeAlias = "tuple[float, float]"
"""Start and end in seconds."""


def answers(setting: Setting) -> Answers:
    """Yield how much of the kernels' time lies inside the slots of each device."""
    devices = setting.devices(K)
    units, rows, length = setting.sized((32, 2, 8), (1024, 8, 512))
    block = layers.TransformerLayer.Params(units=units, heads=4, hidden=4 * units)
    pipe = pipelining.PipeliningLayer.Params(
        layers=[*[block] * setting.sized(2, 8), layers.MeanSquaredError.Params()],
        num_partitions=K,
        num_micro_batches=M,
        devices=tuple(devices),
    ).instantiate()
    x = tf.random.stateless_normal([rows * M, length, units], [1, 2])
    batch = {"x": x, "target": tf.zeros_like(x)}
    pipe.build(batch)
    stamps = pipe.executor.note_times()
    for _ in range(3):
        float(pipe.value_and_gradients(batch).loss)
    with tf.profiler.experimental.Profile(str(setting.folder)):
        float(pipe.value_and_gradients(batch).loss)
    (file,) = setting.folder.rglob("*.xplane.pb")
    streams = kernels(file, setting.cpu)
    yield "ms of kernels", {name: 1e3 * sum(map(_length_s, s)) for name, s in streams.items()}
    for number, device in enumerate(devices):
        slots = [(span.start_s, span.end_s) for span in stamps.read() if span.device == number]
        stream = max(streams, key=lambda name: inside_s(streams[name], slots))
        yield (
            device,
            {
                "stream": stream,
                "ms of slots": 1e3 * sum(map(_length_s, slots)),
                "share of kernels inside slots": inside_s(streams[stream], slots)
                / sum(map(_length_s, streams[stream])),
            },
        )


def inside_s(one: Sequence[_Span], other: Sequence[_Span]) -> float:
    """Return for how many seconds spans lie inside others, neither of which overlap."""
    return sum(
        max(0.0, min(a_end, b_end) - max(a_start, b_start))
        for a_start, a_end in one
        for b_start, b_end in other
    )


def kernels(path: Path, on_cpu: bool) -> dict[str, list[_Span]]:
    """Return stream → when each of its kernels ran, in seconds since 1970.

    Args:
        path: a file of TensorFlow's profiler.
        on_cpu: products of matrices by thread, in place of kernels.
    """
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    begun_ns = next(
        stat.uint64_value or stat.int64_value
        for plane in space.planes
        for stat in plane.stats
        if plane.stat_metadata[stat.metadata_id].name == "profile_start_time"
    )
    found: dict[str, list[_Span]] = {}
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU" if on_cpu else "/device:GPU"):
            continue
        for line in plane.lines:
            start_s = 1e-9 * (begun_ns + line.timestamp_ns)
            spans = [
                (
                    start_s + 1e-12 * event.offset_ps,
                    start_s + 1e-12 * (event.offset_ps + event.duration_ps),
                )
                for event in line.events
                if not on_cpu or "MatMul" in plane.event_metadata[event.metadata_id].name
            ]
            if spans and (on_cpu or line.name.startswith("Stream")):
                found[line.name] = spans
    return found


def _length_s(span: _Span) -> float:
    return span[1] - span[0]
