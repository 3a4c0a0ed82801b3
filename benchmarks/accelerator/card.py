"""Which card is it, what do TensorFlow and the library see of it, and does `make train` learn?"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt, card
from benchmarks.support import machine
from lingvo_gpipe import trainer
from lingvo_gpipe.execution import placement


def answers(setting: Setting) -> Answers:
    """Yield the machine, the card, and the accuracy of a training on two logical devices."""
    yield "machine", machine.describe()
    if not setting.cpu:
        yield "card", attempt(card, "name,memory.total,driver_version")
        gpu = tf.config.list_physical_devices("GPU")[0]
        yield "details", str(tf.config.experimental.get_device_details(gpu))
    yield "build", {key: str(value) for key, value in tf.sysconfig.get_build_info().items()}
    yield "devices", setting.devices(2)
    yield "placement of two cells", attempt(lambda: placement.place(2))
    yield "image.digits.ConvNet", attempt(_train, setting)


def _train(setting: Setting) -> dict[str, Any]:
    """Train as `make train` does, K=2; return what the trainer prints."""
    arguments = ["--model=image.digits.ConvNet", "--mode=train_eval", f"--logdir={setting.folder}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = trainer.run([*arguments, *setting.sized(["--max_steps=20"], [])])
    return {"exit code": code, "printed": printed.getvalue().splitlines()[-3:]}
