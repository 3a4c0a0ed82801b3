"""Runs over worker processes: the bits of one process, also after a worker was killed.

The mini-batches are read by the first worker; `hub_test` has those of the chief, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from tests.support import programs, saved

LIMIT_S = 240.0


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lingvo_gpipe.trainer", f"--logdir={folder}", *flags]
    errors = open(f"{folder}.err", "w")  # noqa: SIM115 (the process has it)
    with errors:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=programs.environment(),
        )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run; return its output."""
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, out
    return out


def children(pid: int) -> dict[int, list[str]]:
    """Return number → command line of all processes that a process started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == pid:
            found[int(path.name)] = words
            found |= children(int(path.name))
    return found


def shown(folder: Path, *tags: str) -> dict[tuple[str, str, int], Any]:
    """Return (folder, tag, step) → value in TensorBoard, of tags that begin so."""
    found = {}
    for part in sorted({path.parent for path in folder.rglob("events.*")}):
        events = event_accumulator.EventAccumulator(str(part), {"tensors": 0}).Reload()
        for tag in filter(lambda each: each.startswith(tags), events.Tags()["tensors"]):
            for event in events.Tensors(tag):
                found[part.name, tag, event.step] = tf.make_ndarray(event.tensor_proto)
    return found


@pytest.mark.slow
def test_workers_have_the_bits_of_one_process_and_survive_a_kill(tmp_path: Path) -> None:
    flags = (
        "--model=image.digits.ConvNet",
        "--num_partitions=2",
        "--mode=train_eval",
        "--num_micro_batches=4",
    )
    steps = ("--max_steps=30", "--save_interval_steps=10", "--params_override=train.accumulate=2")
    alone = finish(start(tmp_path / "alone", *flags, *steps))

    on_worker = ("--workers=local:2", "--params_override=input.on_worker=True")
    # The chief calls callbacks; a process that is started again continues what they wrote.
    own = ("--params_override=train.callbacks=[callbacks.CSVLogger]", "--profile_steps=3:4")
    run = start(tmp_path / "workers", *flags, *steps, *on_worker, *own)
    whole = tmp_path / "workers" / "checkpoints" / "ckpt-10.params.txt"
    end_s = time.monotonic() + LIMIT_S
    while not whole.exists():
        assert run.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.02)
    started = children(run.pid)
    workers = [pid for pid, words in started.items() if "lingvo_gpipe.run.worker" in words]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    out = finish(run)

    assert "is lost: killed by SIGKILL, at step" in (tmp_path / "workers.err").read_text()
    results = [
        [line for line in each.splitlines() if line.startswith("test ")] for each in (alone, out)
    ]
    assert results[0] == results[1]
    saved.check_same(*(saved.newest(tmp_path / name) for name in ("alone", "workers")))
    trace = json.loads((tmp_path / "workers" / "timeline" / "step_3_replica_0.json").read_text())
    slots = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slots} == {0, 1}
    assert all(event["dur"] > 0 for event in slots)
    rows = (tmp_path / "workers" / "metrics.csv").read_text().splitlines()[1:]
    assert sorted({int(row.partition(",")[0]) for row in rows}) == [0, 1, 2]
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.reliability_full
def test_translations_over_workers_are_those_of_one_process(tmp_path: Path) -> None:
    fields = ("input.max_length=32", "input.batch_size=512", "decode.shown=2")
    flags = [f"--params_override={field}" for field in fields]
    flags += ["--model=mt.django.Tiny", "--data=made", "--mode=train_eval", "--max_steps=2"]
    finish(start(tmp_path / "alone", *flags))
    finish(start(tmp_path / "workers", *flags, "--workers=local:2"))
    expected, found = (shown(tmp_path / name, "translations/") for name in ("alone", "workers"))
    assert expected
    assert expected.keys() == found.keys()
    assert [key for key, value in expected.items() if not np.array_equal(value, found[key])] == []
