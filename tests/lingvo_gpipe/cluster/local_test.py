"""Workers on this machine: their network, ports, cores and GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import local
from tests.support import programs

NETWORK = """
import ctypes, os, socket, sys
from lingvo_gpipe.cluster import local
if user := int(sys.argv[1]):
    "a".encode("idna")  # imports what this user may not be able to read
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files in /proc are its own
lines = []
cluster = local.cluster(2, private=True, report=lines.append)
assert bool(lines) is not local.is_private()
print(*lines, *cluster.workers, sep="\\n")
if local.is_private():
    server = socket.create_server(("127.0.0.1", 2222))
    socket.create_connection(("127.0.0.1", 2222)).close()
    try: socket.create_connection(("192.0.2.1", 80), 5)
    except OSError as error: print(error.strerror)
"""


def may_become(user: int) -> bool:
    """Return whether this process may become another user: root, of a namespace that has it."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    users = [(first, first + count) for first, _, count in (map(int, x.split()) for x in lines)]
    return os.geteuid() == 0 and any(first <= user < end for first, end in users)


@pytest.mark.parametrize("user", [0, 12345])
def test_a_private_network_has_nothing_but_its_own_loopback(user: int) -> None:
    if user and not may_become(user):
        pytest.skip("only root, of a namespace that has it, can become another user")
    first, *lines = programs.output(NETWORK, str(user)).splitlines()
    if first.startswith("this system allows no private network"):
        pytest.skip(first)
    assert [first, *lines] == ["127.0.0.1:2223", "127.0.0.1:2224", "Network is unreachable"]


def test_gpus_are_those_of_the_driver_unless_some_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_DRIVER", tmp_path)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert local.gpus({}) == ["0", "1"]
    assert local.gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ["1"]
    assert local.gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr(local, "_DRIVER", tmp_path / "none")
    assert local.gpus({}) == []


def test_cores_are_shared_out() -> None:
    assert local.shares([0, 1], 2) == [[0], [1]]
    assert local.shares([3], 2) == [[3], [3]]
    assert local.shares([0, 1, 2, 3], 3) == [[0], [1], [2, 3]]
