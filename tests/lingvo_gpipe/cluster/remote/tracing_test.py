"""A worker traces its operations at the chief's request, and says what it could not do."""

from __future__ import annotations

import json
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe.cluster.remote import requests


def test_a_trace_has_what_ran_between_two_requests(tmp_path: Path) -> None:
    server = requests.Server()

    def asked(**request: str) -> dict[str, str]:
        (answer,) = server(json.dumps(request).encode())
        found: dict[str, str] = json.loads(answer)
        assert found.pop("host")
        return found

    assert asked(do="trace", folder=str(tmp_path / "one")) == {}
    again = asked(do="trace", folder=str(tmp_path / "other"))
    assert "profil" in again["error"].lower()
    tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8])).numpy()
    assert asked(do="end_trace") == {}
    (written,) = (tmp_path / "one" / "plugins" / "profile").rglob("*.xplane.pb")
    assert b"MatMul" in written.read_bytes()
    assert not (tmp_path / "other").exists()
    assert "profil" in asked(do="end_trace")["error"].lower()
