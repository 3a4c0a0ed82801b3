"""The trainer as a program of its own: devices, signals, a reader that leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support import trainer_calls
from tests.support.trainer_calls import PACKAGE


@pytest.mark.parametrize("arguments", [["--help"], ["--model=image.digits.MLP", "--mode=describe"]])
def test_a_reader_that_leaves_is_not_a_fault(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "lingvo_gpipe.trainer", *arguments]
    found = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert found.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in found.stderr
    assert "Broken" not in found.stderr


def command(tmp_path: Path, *arguments: str, model: str = "lab.Tiny") -> Any:
    """Return the arguments of `subprocess` for the trainer with a user's package."""
    folder = str(trainer_calls.write_package(tmp_path))
    path = os.pathsep.join([folder, *(entry for entry in sys.path if entry)])
    return {
        "args": [
            sys.executable,
            "-m",
            "lingvo_gpipe.trainer",
            f"--params_package={PACKAGE}",
            f"--model={model}",
            *arguments,
        ],
        "env": {**os.environ, "PYTHONPATH": path},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def test_the_program_makes_its_devices_and_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    arguments = [f"--logdir={tmp_path / 'run'}", "--num_partitions=4"]
    arguments += ["--max_steps=1000000", "--save_interval_steps=900000"]
    program = command(tmp_path, *arguments, model="lab.BeginsTensorFlow")
    with subprocess.Popen(**program) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        # TensorFlow's own lines come before it.
        assert any(line.startswith("step 1/1000000  loss ") for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    told = re.fullmatch(r"saved step=(\d+) in (\S+); the same command goes on from it", out.strip())
    assert told, out
    assert int(tf.train.load_variable(told[2], "step")) == int(told[1])


@pytest.mark.parametrize(
    ("start", "code"),
    [
        ("import runpy; runpy.run_module('lingvo_gpipe.trainer', run_name='__main__')", "quiet"),
        ("sys.argv[0] = '/bin/lingvo-gpipe'; import lingvo_gpipe.trainer", "quiet"),
        ("import lingvo_gpipe.trainer", "KeyboardInterrupt"),  # another program imports it
    ],
)
def test_an_interrupt_while_the_program_is_imported_shows_no_traceback(
    start: str, code: str
) -> None:
    interrupting = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lingvo_gpipe.errors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    command = [sys.executable, "-c", interrupting + start]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT  # 130 in a shell
    assert (ended.stderr.splitlines() or ["quiet"])[-1] == code
