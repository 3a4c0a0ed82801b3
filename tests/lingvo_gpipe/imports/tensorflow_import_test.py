"""TensorFlow is imported when it is first used, and a mistake is shown without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from benchmarks import startup
from lingvo_gpipe import layers, pipelining
from lingvo_gpipe.imports import tensorflow_import

CALLS = """
import json, sys
from lingvo_gpipe import trainer
from lingvo_gpipe.imports import tensorflow_import

answers = []
for arguments in json.load(sys.stdin):
    code = trainer.run(arguments)
    answers.append([code, tensorflow_import.is_deferred() or "tensorflow" not in sys.modules])
    print("END", flush=True)
    print("END", file=sys.stderr, flush=True)
print(json.dumps(answers))
"""
LATE = """
import gc, sys
from lingvo_gpipe.imports import tensorflow_import

tensorflow_import.defer()
import keras, tensorflow as tf
from lingvo_gpipe import layers, packing, pipelining

class Mine(layers.Dense):
    pass

assert tensorflow_import.is_deferred()
with tensorflow_import.hidden():
    assert "tensorflow" not in sys.modules
assert sys.modules["tensorflow"] is tf
visits = []
gc.callbacks.append(lambda phase, info: visits.append(info))
keras.layers.Dense  # imports TensorFlow on its way
assert len(visits) < 10, len(visits)  # more than a thousand otherwise
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert not tensorflow_import.is_deferred()
assert issubclass(Mine, tf.Module) and issubclass(pipelining.PipeliningLayer, tf.Module)
assert keras.Layer in keras.layers.Dense.__mro__
pipe = pipelining.PipeliningLayer.Params(layers=[Mine.Params(units=2)]).instantiate()
assert pipe(tf.ones([4, 3])).shape == (4, 2)
assert len(pipe.trainable_variables) == 2
"""
BESIDE = """
import sys
from lingvo_gpipe.imports import tensorflow_import

tensorflow_import.defer()
from lingvo_gpipe import layers
with tensorflow_import.hidden():
    import tensorflow as tf
assert sys.modules["tensorflow"] is tf and not tensorflow_import.is_deferred()
assert issubclass(layers.Layer, tf.Module)
from lingvo_gpipe.layers import base
assert base.tf.Tensor is tf.Tensor and base.keras.Layer
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool, str]]:
    """Return command → exit code, whether TensorFlow was not loaded, and what was printed."""
    folder = str(tmp_path_factory.mktemp("empty"))
    calls = [
        [flag.replace("FOLDER", folder) for flag in flags] for flags, _ in startup.COMMANDS.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=True,
    )
    out, err = done.stdout.split("END\n"), done.stderr.split("END\n")
    codes = json.loads(out[-1])
    return {
        name: (*codes[number], out[number] + err[number])
        for number, name in enumerate(startup.COMMANDS)
    }


@pytest.mark.parametrize("command", startup.COMMANDS)
def test_the_trainer_answers_without_tensorflow(
    answers: dict[str, tuple[int, bool, str]], command: str
) -> None:
    code, without_tensorflow, printed = answers[command]
    assert startup.COMMANDS[command][1] in printed
    assert code == (0 if command.startswith("--") else 1)
    assert without_tensorflow
    assert "Traceback" not in printed


@pytest.mark.parametrize("code", [LATE, BESIDE])
def test_what_is_deferred_is_complete_when_it_is_used(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_layers_and_pipelines_are_modules_of_tensorflow() -> None:
    tensorflow_import.defer()  # nothing: it is imported
    assert not tensorflow_import.is_deferred()
    assert sys.modules["tensorflow"] is tf
    assert sys.modules["keras"] is keras
    pipe = pipelining.PipeliningLayer.Params(layers=[layers.Dense.Params(units=2)]).instantiate()
    assert isinstance(pipe, tf.Module)
    assert all(isinstance(layer, tf.Module) for layer in pipe.layers)


def test_the_benchmark_ends_with_its_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def taken(arguments: list[str], _: str) -> dict[str, float]:
        return {"s": 0.25 * len(arguments), "other_load": 0.0}

    monkeypatch.setattr(startup, "cpu_s", taken)
    monkeypatch.setattr(sys, "argv", ["startup", "--quick"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    startup.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "startup: largest median 0.75 s (aim at most 1 s)"
    assert len(lines) == 4 + len(startup.COMMANDS)
