"""TensorFlow's profiler in the process of a worker, at the requests of the chief.

A request is a JSON object, and so is the only value of each answer.

    {"do": "trace", "folder": "/shared/run/worker_0"}   begins to trace all operations
    {"do": "end_trace"}                                 writes them for TensorBoard's xprof
            → {"host": "node17"}; where it could not be done, also "error": its text
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

REQUESTS = ("trace", "end_trace")
"""What requests of this kind ask for."""


def answer(asked: Mapping[str, Any]) -> list[bytes]:
    """Do what a request asks for; raises nothing."""
    found = {"host": socket.gethostname()}
    try:
        if asked["do"] == "trace":
            tf.profiler.experimental.start(asked["folder"])
        else:
            tf.profiler.experimental.stop()
    except Exception as error:  # noqa: BLE001 - the run goes on without a trace.
        found["error"] = str(error).splitlines()[0] if str(error) else repr(error)
    return [json.dumps(found).encode()]
