"""However a run ends, the same call continues from its last whole checkpoint with the same bits.

Runs are separate processes, forked from one that has imported everything, and killed by SIGKILL
while they start, restore, update, evaluate or save.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import optim
from lingvo_gpipe.run import checkpoints, log_directory, loop
from tests.support import programs, saved
from tests.tiny_task import tiny_task

STEPS = 30
SAVED_EVERY = 2
# Questions until the second checkpoint has begun, which waits for the first; an evaluation asks
# twice.
FIRST_IS_WHOLE = 2 * SAVED_EVERY + 2 + 1
PATIENCE_S = 300.0


def params() -> Any:
    """Return a task with all that checkpoints must hold: slots, averages, statistics, position."""
    task = tiny_task(
        max_steps=STEPS,
        save_interval_steps=SAVED_EVERY,
        accumulate=2,
        average=optim.Average.Params(decay=0.9),
        clip_norm=1.0,
    )
    task.eval.set(best="accuracy", interval_steps=3)
    return task


def train(folder: str, told: Connection) -> None:
    """Train in a separate process, sending each line and each question; then the result.

    A question is a call of `should_stop`, before each update and each mini-batch of an evaluation.
    """
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)

    def should_stop() -> bool:
        told.send("asked")
        return False

    result = loop.run(params(), folder, evaluate=True, report=told.send, should_stop=should_stop)
    told.send(result)


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Forks processes that have imported everything and started nothing."""
    with pytest.MonkeyPatch.context() as patch:
        # The address of a socket has 107 bytes, fewer than a test's own folder in Bazel.
        patch.setattr(tempfile, "tempdir", "/tmp")
        multiprocessing.util.get_temp_dir()
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["lingvo_gpipe.run.loop", "tests.tiny_task"])
    return found


@dataclasses.dataclass
class Life:
    """One process of a run, and what it sent before it ended."""

    process: BaseProcess
    told: Connection

    @classmethod
    def begin(cls, context: ForkServerContext, folder: Path) -> Life:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(str(folder), there))
        process.start()
        there.close()
        return cls(process, here)

    def lines(self) -> Iterator[Any]:
        """Yield what it sends, until it ends."""
        try:
            while self.told.poll(PATIENCE_S):
                yield self.told.recv()
        except EOFError:
            return

    def kill(self, asked: int, delay_s: float) -> list[Any]:
        """Kill it some seconds after some questions; return what it had sent."""
        found = []
        for line in self.lines() if asked else ():
            found.append(line)
            if found.count("asked") == asked:
                break
        # Whatever it sends meanwhile is read below.
        self.process.join(delay_s)
        self.process.kill()
        self.process.join()
        return [*found, *self.lines()]


@pytest.fixture(scope="module")
def undisturbed(
    context: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> loop.Result:
    """The result of an uninterrupted run."""
    found = list(Life.begin(context, tmp_path_factory.mktemp("whole")).lines())[-1]
    assert isinstance(found, loop.Result)
    return found


def killed_and_resumed(
    context: ForkServerContext, folder: Path, instants: list[tuple[int, float]]
) -> loop.Result:
    """Kill a run at each instant (questions, seconds after), let it end; check each restart."""
    whole_before = 0
    restored = []
    for asked, delay_s in instants:
        told = Life.begin(context, folder).kill(asked, delay_s)
        starts = [line for line in told if str(line).startswith("restored")]
        if whole_before and (asked or starts):
            (line,) = starts
            restored.append(int(line.removeprefix("restored step=")))
            assert restored[-1] == whole_before
        whole = checkpoints.find(str(folder / log_directory.CHECKPOINTS))
        now = checkpoints.step_of(whole[-1]) if whole else 0
        assert now >= whole_before
        whole_before = now
    assert restored, "no run was killed after its first checkpoint"
    told = list(Life.begin(context, folder).lines())
    assert isinstance(told[-1], loop.Result)
    return told[-1]


def test_a_run_killed_three_times_ends_with_the_same_bits(
    context: ForkServerContext, undisturbed: loop.Result, tmp_path: Path
) -> None:
    instants = [(FIRST_IS_WHOLE, 0.0), (4, 0.02), (3, 0.15)]
    result = killed_and_resumed(context, tmp_path, instants)
    assert (result.step, result.ended) == (STEPS, "max_steps")
    saved.check_same(undisturbed.checkpoint, result.checkpoint)
    assert result.metrics == undisturbed.metrics


@pytest.mark.reliability_full
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_eight_times_at_random_instants_ends_with_the_same_bits(
    context: ForkServerContext, undisturbed: loop.Result, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    # Some before their first question, while the process builds and restores.
    instants = [
        (draw.choice([0, 1, 2, 3, 4]), draw.choice([0.0, 0.01, 0.1, 2.0]) * draw.random())
        for _ in range(8)
    ]
    instants[2] = (max(instants[2][0], FIRST_IS_WHOLE), instants[2][1])
    instants[3] = (max(instants[3][0], SAVED_EVERY + 1), instants[3][1])
    result = killed_and_resumed(context, tmp_path, instants)
    saved.check_same(undisturbed.checkpoint, result.checkpoint)
    assert result.metrics == undisturbed.metrics


FULL_DISK = """
import os, shutil, sys
from tests import reliability_test
from lingvo_gpipe import errors
from lingvo_gpipe.run import checkpoints, log_directory, loop, process

disk, kept = sys.argv[1:]
params = reliability_test.params()
try:
    loop.run(params, disk, evaluate=True)
except errors.CheckpointError as error:
    print("full:", error)
print("whole:", *checkpoints.find(os.path.join(disk, log_directory.CHECKPOINTS)))
shutil.copytree(disk, kept)
"""


@pytest.mark.reliability_full
@pytest.mark.parametrize("size_kib", [104, 112, 128, 144])
def test_a_disk_that_fills_up_keeps_its_whole_checkpoints(
    context: ForkServerContext, undisturbed: loop.Result, tmp_path: Path, size_kib: int
) -> None:
    """A small separate disk, in a mount namespace that ends with the process."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={size_kib}k none {disk} && exec "$0" -c "$1" {disk} {kept}'
    found = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, FULL_DISK],
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    out = dict(line.split(":", 1) for line in found.stdout.splitlines())
    assert "No space left on device" in out["full"]
    assert "the last whole one is" in out["full"]
    assert "start the same command again" in out["full"]
    whole = checkpoints.find(str(kept / log_directory.CHECKPOINTS))
    assert [Path(p).name for p in whole] == [Path(p).name for p in out["whole"].split()]
    assert whole
    told = list(Life.begin(context, kept).lines())
    assert told[0] == f"restored step={checkpoints.step_of(whole[-1])}"
    saved.check_same(undisturbed.checkpoint, told[-1].checkpoint)
    shutil.rmtree(kept)
