"""Calls of the trainer with a user's own package of models and modes, for its tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lingvo_gpipe import hyperparams

PACKAGE = "models_of_trainer_test"
hyperparams.register_package("tests")  # of the inputs that the models read
MODELS = """
import keras
import lingvo_gpipe as lg
from tests import tiny_task
from lingvo_gpipe import registry

class Tiny(tiny_task.Tiny):
    pass

class BeginsTensorFlow(Tiny):
    def task(self):
        lg.prepare_logical_cpus(4)
        keras.layers.Dense(2).build((None, 3))
        return super().task()

class Deeper(registry.Model):
    depth = 2

    def task(self):
        task = tiny_task.tiny_task()
        task.model.layers = [*task.model.layers[:1] * self.depth, *task.model.layers[1:]]
        for number in range(1, self.depth):
            task.model.layers[number].set(name=f"deep_{number}", reads=("x",))
        return task
"""
MODES = """
import os, signal
from lingvo_gpipe import hyperparams, registry
from models_of_trainer_test.lab import Deeper, Tiny
from tests import tiny_task

def show(job):
    job.report(job.task.to_text())
    job.report(f"data_dir={getattr(job.task.input, 'data_dir', None)}")
    job.report(f"logdir={job.logdir} checkpoint={job.checkpoint}")

def fail(job):
    raise ZeroDivisionError("a bug")

def end(job):
    job.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)

def leave(job):
    end(job)
    while not job.should_stop():
        pass

registry.add_mode("show", show)
registry.add_mode("end", end)
registry.add_mode("leave", leave)
registry.add_mode("fail", fail)

class Moded(Tiny):
    pass

class Widths(tiny_task.Points):
    asset_names = ("width",)
    width = 5

    class Params(tiny_task.Points.Params):
        pass

    def recall(self, assets):
        self.width = int(assets["width"])

    def complete(self, task_params):
        task_params.model.layers[0].units = self.width

class Wide(Deeper):
    def task(self):
        task = super().task()
        task.input = Widths.Params(batch_size=8)
        return task

class Wrong(registry.Model):
    def task(self):
        return {}

class Placed(Tiny):
    def task(self):
        task = super().task()
        task.model.set(num_partitions=2, devices=("CPU:0", "CPU:1"))
        return task

class Foldered(registry.Model):
    def task(self):
        from lingvo_gpipe.tasks.image import ImageFolder
        task = Tiny().task()
        task.input = ImageFolder.Params(batch_size=4, height=8, width=8)
        return task
"""

Run = Callable[..., "Outcome"]


class Outcome:
    """Exit code and lines of a call of the trainer."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out.splitlines()
        progress = r"step \d+/\d+|evaluating "  # the second on a busy machine
        self.err = [line for line in err.splitlines() if not re.match(progress, line)]


def write_package(folder: Path) -> Path:
    """Write the package below a folder; return what has to be on Python's path."""
    package = folder / "code" / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "lab.py").write_text(MODELS)
    (package / "moded.py").write_text(MODES)
    return package.parent
