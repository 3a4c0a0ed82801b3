"""The benchmark of faults: its cases, which process is which, its model's notes; no run."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import disturbed, notes, printed, processes, soak
from benchmarks.faults.recipes import digits
from lingvo_gpipe import registry, trainer

_SLEEP = "import time; time.sleep(60)"


def test_each_fault_comes_in_each_phase() -> None:
    cases = faults.cases(quick=False)
    assert len(cases) == len(set(cases)) == 68
    quick = faults.cases(quick=True)
    assert cases[: len(quick)] == quick
    assert collections.Counter(fault for fault, _ in quick) == collections.Counter(disturbed.FAULTS)
    assert {phase for _, phase in quick} == set(disturbed.PHASES)


def test_the_page_s_commands_are_taken_for_two_hosts_and_for_more() -> None:
    page = (printed.ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    two = printed.commands(page)
    assert [command for _, command in printed.for_hosts(two, 2)] == two
    assert [host for host, _ in printed.for_hosts(two, 2)] == [0, 0, 0, 1, 0]
    four = printed.for_hosts(two, 4)
    assert [host for host, _ in four] == [0, 0, 0, 1, 2, 3, 0]
    cluster = json.loads(four[0][1].splitlines()[1])
    assert len(set(cluster["worker"])) == 4
    assert "--task=3" in four[5][1]
    assert "--num_partitions=4" in four[-1][1]


def test_checkpoints_are_the_same_by_their_bits() -> None:
    one = {"a": np.array([0.0, np.nan], np.float32)}
    assert faults.same(one, {"a": one["a"].copy()})
    assert not faults.same(one, {"a": np.array([-0.0, np.nan], np.float32)})
    assert not faults.same(one, {**one, "b": one["a"]})


def test_processes_of_a_run_are_found_by_their_notes(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEP, processes.TRAINER, "--job=worker"],
        env={**os.environ, notes.FILE: str(path)},
    ) as sleeping:
        try:
            (found,) = wait_for_processes(path)
            assert (found.pid, found.parent) == (sleeping.pid, os.getpid())
            assert found.role == processes.WORKER_SUPERVISOR
            assert not processes.is_stopped(found, path)
            sleeping.send_signal(signal.SIGSTOP)
            assert disturbed.wait(lambda: processes.is_stopped(found, path), 5.0)
        finally:
            sleeping.kill()
    assert processes.of_run(path) == []


def test_what_removes_temporary_files_is_not_taken_for_the_parent(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEP], env={**os.environ, notes.FILE: str(path)}
    ) as sleeping:
        try:
            (found,) = wait_for_processes(path)
            assert found.role == processes.REMOVER
        finally:
            sleeping.kill()


def wait_for_processes(path: Path) -> list[processes.Process]:
    end_s = time.monotonic() + 5.0
    while not (found := processes.of_run(path)) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def test_what_should_not_outlive_a_run_is_found(tmp_path: Path) -> None:
    for name in ("ckpt-5.writing", "shared-0123", "ckpt-5.index", "run.lock"):
        (tmp_path / name).write_text("")
    (tmp_path / "ckpt-6_temp").mkdir()
    assert processes.partial_files(tmp_path) == ["ckpt-5.writing", "ckpt-6_temp", "shared-0123"]


def test_the_model_s_input_notes_what_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notes.FILE, str(tmp_path / "notes"))
    task = digits.ConvNet().task()
    source = task.input.instantiate()
    next(iter(source.batches(1)))
    count = sum(1 for _ in source.evaluation("test"))
    found = notes.read(tmp_path / "notes")
    drawn = [notes.TRAINING, *[notes.EVALUATION] * count, notes.EVALUATED]
    assert [what for _, _, what in found] == drawn
    assert {pid for _, pid, _ in found} == {os.getpid()}


def test_memory_that_grows_is_seen() -> None:
    mib = 2**20
    samples: dict[str, soak.Samples] = {
        "chief": {(5, 1): [800 * mib], (1, 2): [100 * mib, 500 * mib]},
        "worker": {(2, 3): [500 * mib], (9, 4): [400 * mib, 510 * mib]},
    }
    found = soak.rows(samples)
    assert found["chief"] == soak.Row(2, 500 * mib, 800 * mib, 800 * mib)
    assert not found["chief"].is_flat
    assert found["worker"].is_flat


def test_the_runs_name_their_model() -> None:
    values = trainer.read_flags(disturbed.FLAGS)
    assert values is not None
    found = registry.Registry(values.params_package).model(values.model)
    assert found is digits.ConvNet
