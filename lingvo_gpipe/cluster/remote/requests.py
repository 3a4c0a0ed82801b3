"""What a worker does at the requests of the chief: it reads the input, and traces operations."""

from __future__ import annotations

import json
from typing import Any

from lingvo_gpipe.cluster.remote import input_server, tracing


class Server:
    """Answers requests, which are JSON objects that say what to do."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._input = input_server.InputServer()

    def __call__(self, request: bytes) -> list[Any]:
        """Answer a request; see `input_server` and `tracing`."""
        asked = json.loads(request)
        if asked["do"] in tracing.REQUESTS:
            return list(tracing.answer(asked))
        return self._input(asked)
