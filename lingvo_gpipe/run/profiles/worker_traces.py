"""Traces of TensorFlow's profiler by the workers of a run, each in a folder of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from lingvo_gpipe import packing
from lingvo_gpipe.execution import placement
from lingvo_gpipe.run import worker


def workers_of(devices: Sequence[Sequence[str]]) -> dict[int, str]:
    """Return number of a worker → its CPU, of the workers with these devices of all replicas."""
    hosts = {packing.host(name) for of_replica in devices for name in of_replica}
    return {
        tf.DeviceSpec.from_string(host).task or 0: host
        for host in sorted(hosts)
        if placement.is_on_worker(host)
    }


@contextlib.contextmanager
def traced(
    workers: dict[int, str], logdir: Path, report: Callable[[str], None]
) -> Iterator[list[Path]]:
    """Let workers trace what runs inside.

    Args:
        workers: number → device.
        logdir: log directory of the run, which workers reach under the same path.
        report: receives a line for each worker that cannot.

    Yields:
        The folders of those that do: `worker_0`, below the log directory.
    """
    begun: dict[int, Path] = {}
    for number, device in workers.items():
        folder = logdir.absolute() / f"worker_{number}"
        fault = _ask(device, {"do": "trace", "folder": str(folder)})
        if fault is None:
            begun[number] = folder
        else:
            report(f"worker {number} records no profile: {fault}")
    try:
        yield list(begun.values())
    finally:
        for number in begun:
            with contextlib.suppress(tf.errors.OpError):  # the step that failed says why
                fault = _ask(workers[number], {"do": "end_trace"})
                if fault is not None:
                    report(f"worker {number} has written no profile: {fault}")


def _ask(device: str, asked: dict[str, Any]) -> str | None:
    """Ask a worker; return what it could not do, as text."""
    with tf.device(device):
        request = tf.constant(json.dumps(asked))
    (answer,) = worker.call(device, request)
    values: dict[str, Any] = json.loads(answer.numpy())
    if "error" not in values:
        return None
    return f"{values['error']['text'].splitlines()[0]} (on {values['host']})"
