"""Supervisors, and fakes of the chief and of workers that need no TensorFlow.

    python fakes.py supervisor-of-worker FOLDER CLUSTER INDEX
    python fakes.py supervisor-of-chief FOLDER CLUSTER STEPS
    python fakes.py worker FOLDER INDEX
    python fakes.py chief FOLDER STEPS

Every process writes its number to FOLDER/NAME.pid, and every line for the user to standard error.
The chief goes on from the step that FOLDER/step holds, one step in 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import (
    chief_supervisor,
    child,
    lease,
    local,
    members,
    worker_supervisor,
)

TOKEN = "the secret of these tests"
STEP_S = 0.02


def report(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def note_pid(folder: Path, name: str) -> None:
    partial = folder / f"{name}.writing"
    partial.write_text(str(os.getpid()))
    partial.replace(folder / f"{name}.pid")


def note_gpus(folder: Path, name: str) -> None:
    (folder / f"{name}.gpus").write_text(os.environ.get(chief_supervisor.GPUS, "all"))


def command(*words: object) -> tuple[str, ...]:
    return (sys.executable, __file__, *map(str, words))


def worker(folder: Path, index: str) -> int:
    channel = child.channel()
    assert channel is not None
    note_pid(folder, f"worker{index}")
    note_gpus(folder, f"worker{index}")
    settings = json.loads(channel.wait())
    assert settings["devices"] == 3
    assert settings["task"] == {"type": "worker", "index": int(index)}
    channel.write(worker_supervisor.SERVES)
    channel.wait()
    return 0


def chief(folder: Path, steps: str) -> int:
    channel = child.channel()
    assert channel is not None
    note_pid(folder, "chief")
    tempfile.mkstemp()  # removed by nobody else
    while "GATED" in os.environ and not (folder / "gate").exists():
        time.sleep(0.01)
    channel.write(chief_supervisor.NEEDS + json.dumps({"devices": 3}))
    if channel.wait() != chief_supervisor.GO:
        return os.EX_TEMPFAIL
    (folder / "went").write_text(os.environ[members.VARIABLE])
    note_gpus(folder, "chief")
    if steps == "hangs":
        time.sleep(60.0)
    channel.write(chief_supervisor.CONNECTED)
    if steps.startswith("exit"):
        return int(steps.removeprefix("exit"))
    done = folder / "step"
    for step in range(int(done.read_text()) if done.exists() else 0, int(steps)):
        channel.write(f"{chief_supervisor.STEP}{step}")
        time.sleep(STEP_S)
        partial = folder / "step.writing"
        partial.write_text(str(step + 1))
        partial.replace(done)
    return 0


def supervisor_of_worker(folder: Path, cluster: members.Cluster, index: str) -> int:
    note_pid(folder, f"supervisor{index}")
    token = os.environ.get("TOKEN", TOKEN)
    program = command("worker", folder, index)
    return asyncio.run(worker_supervisor.run(cluster, int(index), token, report, program))


def supervisor_of_chief(folder: Path, cluster: members.Cluster, steps: str) -> int:
    note_pid(folder, "supervisor")

    def link(index: int) -> Awaitable[chief_supervisor.Link]:
        if "LOCAL" in os.environ:
            return local.start_worker(cluster, index, command("worker", folder, index))
        return lease.take(cluster, TOKEN, index)

    options = chief_supervisor.Options(
        cluster,
        command("chief", folder, steps),
        dict(os.environ),
        report,
        link,
        start_timeout_s=float(os.environ.get("START_TIMEOUT_S", "20")),
    )
    return asyncio.run(chief_supervisor.run(options))


def main(what: str, folder: str, *rest: str) -> int:
    members.PORT_TIMEOUT_S = float(os.environ.get("PORT_TIMEOUT_S", "0"))
    if "VERSION" in os.environ:
        major, minor = os.environ["VERSION"].split(".")
        platform.python_version_tuple = lambda: (major, minor, "0")
    if not what.startswith("supervisor"):
        return {"worker": worker, "chief": chief}[what](Path(folder), *rest)
    addresses = json.loads(rest[0])
    cluster = members.Cluster(addresses[0], tuple(addresses[1:]))
    supervisor = {
        "supervisor-of-worker": supervisor_of_worker,
        "supervisor-of-chief": supervisor_of_chief,
    }[what]
    try:
        return supervisor(Path(folder), cluster, rest[1])
    except errors.DeviceError as error:
        report(f"DeviceError: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
