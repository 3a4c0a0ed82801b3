"""The process of a worker: it serves its devices to one chief, by TensorFlow's own server.

`python -m lingvo_gpipe.cluster.worker_server`, started by the worker's supervisor. It imports
TensorFlow at once, waits for the supervisor's line with the cluster, opens its port, and ends with
its supervisor.
"""

from __future__ import annotations

import json
import os
import sys

from lingvo_gpipe.cluster import child
from lingvo_gpipe.cluster.worker_supervisor import SERVES
from lingvo_gpipe.console import output


def thread_counts(num_devices: int, cores: int) -> tuple[int, int]:
    """Return what `execution.placement.thread_counts` returns, which this package cannot import."""
    return max(2, min(num_devices, cores)), max(1, cores // num_devices)


def main() -> int:
    """Serve until the supervisor ends; return the exit code."""
    channel = child.channel()
    if channel is None:
        sys.stderr.write("this program is started by a worker: trainer --job=worker\n")
        return 1
    output.quiet_tensorflow("2")
    import tensorflow as tf

    from lingvo_gpipe.cluster.remote import input_server, requests, worker_function

    settings = channel.wait()
    if not settings:
        return 0
    values = json.loads(settings)
    devices = int(values["devices"])
    cores = len(os.sched_getaffinity(0))
    inter_op_threads, intra_op_threads = thread_counts(devices, cores)
    input_server.prepare(values["packages"], intra_op_threads)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=intra_op_threads,
        inter_op_parallelism_threads=inter_op_threads,
        device_count={"CPU": devices},
    )
    # A thread that waits for other workers would take its only core from the cells.
    config.experimental.disable_thread_spinning = True
    config.gpu_options.allow_growth = True
    task = values["task"]
    registered = worker_function.register_first(requests.Server())
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(values["cluster"]),
            task["type"],
            task["index"],
            protocol="grpc",
            config=config,
        )
    except tf.errors.OpError as error:
        channel.write(f"its server does not start: {error.message}")
        return 1
    channel.write(SERVES)
    while channel.wait():
        pass
    del server, registered
    os._exit(0)  # the server has no end of its own


if __name__ == "__main__":
    sys.exit(main())
