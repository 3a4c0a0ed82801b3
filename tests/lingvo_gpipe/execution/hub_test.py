"""Contract 11: with cells in worker processes, nothing as large as the weights passes the chief.

Two worker processes serve a chief in a process of its own, which counts the bytes of its sockets.
The same program on logical devices of one process is the reference for every bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe.run.checkpoints import SavedValues
from tests.hub.chief import WEIGHT_BYTES
from tests.lingvo_gpipe.cluster.runs import free_addresses
from tests.support import programs

PATIENCE_S = 300.0
PER_VARIABLE = 3 * 2**10
"""Bytes that a step may send for each variable: its handle, and what its calls are made of."""
FIRST = WEIGHT_BYTES / 8
"""Bytes of the graphs that a first call sends, and of eager operations."""
STEP_OF_FEW_VARIABLES = 2**16
"""Bytes that a step of few variables, or an evaluation, may send besides the fields."""
STEPS = ("update", "accumulated update", "evaluation with outputs", "gradients")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a chief has found, and the values that it has saved."""

    found: dict[str, Any]
    folder: Path


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@contextlib.contextmanager
def workers(log: Path) -> Iterator[str]:
    """Run two worker processes; yield their addresses as JSON."""
    addresses = json.dumps(free_addresses(2))
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        started = []
        for index in range(2):
            process = subprocess.Popen(
                command("tests.hub.worker", addresses, str(index)),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=programs.environment(),
            )
            stack.enter_context(process)  # waits for its end
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serving\n", log.read_text()
        yield addresses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Return what a chief of two workers has found, and the same program in one process."""
    folder = tmp_path_factory.mktemp("hub")
    found = []
    with workers(folder / "workers.log") as addresses, contextlib.ExitStack() as stack:
        chiefs = []
        for name, arguments in (("cluster", [addresses]), ("alone", [])):
            (folder / name).mkdir()
            chief = subprocess.Popen(
                command("tests.hub.chief", str(folder / name), *arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=programs.environment(),
                text=True,
            )
            stack.enter_context(chief)
            stack.callback(chief.kill)
            chiefs.append(chief)
        for name, chief in zip(("cluster", "alone"), chiefs, strict=True):
            output, errors = chief.communicate(timeout=PATIENCE_S)
            assert chief.returncode == 0, errors
            found.append(Run(json.loads(output), folder / name))
    return found[0], found[1]


@pytest.mark.slow
def test_a_step_sends_its_mini_batch_and_the_handles_of_variables(runs: tuple[Run, Run]) -> None:
    found = runs[0].found
    limit = found["field bytes"] + PER_VARIABLE * found["variables"]
    assert limit < FIRST
    passed = {name: max(found["traffic"][name]) for name in STEPS}
    assert {name: count for name, count in passed.items() if count > limit} == {}


@pytest.mark.slow
def test_workers_hold_few_variables(runs: tuple[Run, Run]) -> None:
    """Weights, two slots and averages of each, statistics and averages of the second, the step."""
    assert runs[0].found["packs"] == 2 * 4 + 2 + 1
    assert runs[1].found["packs"] == runs[1].found["variables"] > 30


@pytest.mark.slow
def test_no_weight_passes_the_chief(runs: tuple[Run, Run]) -> None:
    """Building, averages, diagnosis, a tape, saving and restoring too."""
    traffic = dict(runs[0].found["traffic"])
    copied = traffic.pop("gradients that an outer function copies")
    assert min(copied) > WEIGHT_BYTES  # such bytes are seen
    assert {name: count for name, count in traffic.items() if max(count) > FIRST} == {}
    assert len(traffic) == 21
    assert not any(map(max, runs[1].found["traffic"].values()))


@pytest.mark.slow
@pytest.mark.parametrize("read", ["read", "read in parts"])
def test_no_mini_batch_passes_the_chief_if_workers_read_it(
    runs: tuple[Run, Run], read: str
) -> None:
    """A line of each worker for each mini-batch does, and what a step sends without fields."""
    found = runs[0].found
    traffic = {name: max(passed) for name, passed in found[f"traffic of {read}"].items()}
    by_chief = traffic.pop("update by a mini-batch of the chief")
    assert by_chief > found[read]["bytes"] == 2**20  # such bytes are seen
    assert {name: passed for name, passed in traffic.items() if passed > FIRST} == {}
    assert len(traffic) == 7
    for name in ("update", "accumulated update", "evaluation"):
        assert traffic[name] < STEP_OF_FEW_VARIABLES


@pytest.mark.slow
def test_results_stay_on_the_device_that_made_them(runs: tuple[Run, Run]) -> None:
    devices = runs[0].found["devices"]
    assert all("/job:worker/" in device for device in devices["outputs"])
    for kind in ("gradients", "tape"):
        assert devices[kind] == devices["weights"]
    assert len(set(devices["weights"].values())) == 2


@pytest.mark.slow
def test_workers_and_one_process_have_equal_bits(runs: tuple[Run, Run]) -> None:
    """Losses, and weights, statistics, slots and averages after updates, and restored."""
    in_cluster, alone = (dict(run.found) for run in runs)
    for found in (in_cluster, alone):
        for name in ("traffic", "devices", "packs", "traffic of read", "traffic of read in parts"):
            del found[name]
    assert in_cluster == alone
    assert len(set(alone["losses"])) == 6
    assert len(alone["matched"]) == 10
    assert alone["not finite"] == "layer d1, variable d1/bias"
    for folder, number in ((".", 6), ("last", 7)):
        one, other = (SavedValues(str(run.folder / folder / f"ckpt-{number}")) for run in runs)
        assert len(one.shapes) == alone["variables"]
        assert one.shapes == other.shapes
        for key in one.shapes:
            assert np.array_equal(one.read(key), other.read(key)), key


@pytest.mark.slow
def test_calls_are_counted_on_the_workers(runs: tuple[Run, Run]) -> None:
    for run in runs:
        for kind, first in (("an evaluation", 2), ("a step", 4)):
            wanted = [f"{count} of {count} calls returned" for count in (first, 2)]
            assert run.found[f"counted after {kind}"] == wanted
