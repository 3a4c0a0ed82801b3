"""A worker traces its operations at the chief's request, and says what it could not do."""

from __future__ import annotations

import json
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe.run import worker


def test_a_trace_has_what_ran_between_two_requests(tmp_path: Path) -> None:
    server = worker.Requests()

    def asked(**request: str) -> str | None:
        """Return the text of the error."""
        (answer,) = server(json.dumps(request).encode())
        values = json.loads(answer)
        assert values["host"]
        text: str | None = values.get("error", {}).get("text")
        return text

    assert asked(do="trace", folder=str(tmp_path / "one")) is None
    again = asked(do="trace", folder=str(tmp_path / "other"))
    assert again is not None
    assert "profil" in again.lower()
    tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8])).numpy()
    assert asked(do="end_trace") is None
    (written,) = (tmp_path / "one" / "plugins" / "profile").rglob("*.xplane.pb")
    assert b"MatMul" in written.read_bytes()
    assert not (tmp_path / "other").exists()
    again = asked(do="end_trace")
    assert again is not None
    assert "profil" in again.lower()
