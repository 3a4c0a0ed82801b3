"""A worker process of a cluster on this machine: `python -m tests.hub.worker ADDRESSES INDEX`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


def main(addresses: str, index: str) -> None:
    """Serve the devices of a worker until the process is killed."""
    import tensorflow as tf

    from lingvo_gpipe import hyperparams
    from lingvo_gpipe.run import worker

    hyperparams.register_package("tests")
    registered = worker.register(worker.Requests())
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    spec = tf.train.ClusterSpec({"worker": json.loads(addresses)})
    server = tf.distribute.Server(spec, "worker", int(index), protocol="grpc", config=config)
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    server.join()
    del registered


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
