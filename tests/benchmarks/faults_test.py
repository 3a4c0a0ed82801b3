"""The benchmark of faults: its cases, and which process is which; no run."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

from benchmarks import faults
from lingvo_gpipe import trainer


def test_each_fault_comes_in_each_quarter_of_a_run() -> None:
    cases = faults.cases(quick=False)
    assert len(cases) == len(set(cases)) == 68
    quick = faults.cases(quick=True)
    assert cases[: len(quick)] == quick
    assert collections.Counter(fault for fault, _ in quick) == collections.Counter(faults.FAULTS)
    assert {quarter for _, quarter in quick} == {0, 1, 2, 3}


def test_the_flags_of_a_run_are_those_of_the_trainer() -> None:
    assert trainer.read_flags(faults.FLAGS) is not None


def test_processes_of_a_run_are_found_by_their_mark() -> None:
    mark = f"of this test {os.getpid()}"
    roles = {
        ("lingvo_gpipe.trainer", "--job=worker"): faults.WORKER_SUPERVISOR,
        ("lingvo_gpipe.trainer", "--mode=train"): faults.CHIEF_SUPERVISOR,
        ("lingvo_gpipe.run.worker",): faults.WORKER,
    }
    for words, role in roles.items():
        with subprocess.Popen(
            [sys.executable, "-c", "input()", *words],
            stdin=subprocess.PIPE,
            env={**os.environ, faults._MARK: mark},
        ) as process:
            assert faults.wait(lambda: faults.processes(mark), 5.0)
            assert faults.processes(mark) == [faults.Process(process.pid, role)]
            process.kill()
    assert faults.processes(mark) == []
