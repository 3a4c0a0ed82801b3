"""The trainer as a program of its own: devices and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.support import trainer_calls
from tests.support.trainer_calls import PACKAGE


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


def test_the_program_makes_its_devices_and_a_signal_saves_and_ends_it(tmp_path: Path) -> None:
    arguments = [f"--logdir={tmp_path / 'run'}", "--num_partitions=4"]
    arguments += ["--max_steps=1000000", "--save_interval_steps=900000"]
    program = command(tmp_path, *arguments, model="lab.BeginsTensorFlow")
    with subprocess.Popen(**program) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        # TensorFlow's own lines come before it.
        assert any(line.startswith("step 1/1000000, loss=") for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    told = re.fullmatch(r"saved step=(\d+) in (\S+); the same command goes on from it", out.strip())
    assert told, out
    assert int(tf.train.load_variable(told[2], "step")) == int(told[1])
