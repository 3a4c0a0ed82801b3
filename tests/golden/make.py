"""Makes a set of golden files with the code of this checkout; README.md explains when.

    python -m tests.golden.make NAME

Run it from the top of the checkout, so that paths in texts are relative. An existing set is
refused.
"""

from __future__ import annotations

import importlib
import json
import lzma
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import lingvo_gpipe
from lingvo_gpipe import hyperparams, registry, task
from lingvo_gpipe.execution import placement
from lingvo_gpipe.run import eval_mode, export
from tests.golden import recipes
from tests.tasks.mt import toy_text

Array = np.ndarray[Any, Any]

GOLDEN = Path("tests/golden")
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# What TensorFlow adds to a checkpoint.
OTHERS = ("save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH")
PACKAGES = ("tensorflow", "keras", "numpy", "sentencepiece")

README = """\
# {name}

Made by `python -m tests.golden.make {name}` with the code of commit {commit},
on {cores} cores, with {versions}.

It ran these commands from the top of the checkout, after `export P=tests/golden/{name}`:

```
{commands}
```

Metrics and exports were made by `eval_mode.run` and `export.run` in the process of `make.py`.
"""


def tensors(prefix: str) -> dict[str, Array]:
    """Return the tensors of a checkpoint, read only by TensorFlow, by TensorFlow's keys."""
    reader = tf.train.load_checkpoint(prefix)
    keys = (key.removesuffix(SUFFIX) for key in reader.get_variable_to_shape_map())
    return {key: reader.get_tensor(key + SUFFIX) for key in sorted(keys) if key not in OTHERS}


def prefixes(folder: Path) -> list[str]:
    """Return the prefixes of the checkpoints in a run's folder, oldest first."""
    found = [str(path.with_suffix("")) for path in folder.glob("*/ckpt-*.index")]
    return sorted(found, key=lambda prefix: (int(prefix.rpartition("-")[2]), prefix))


def kept_task(prefix: str, data: Path) -> task.Task.Params:
    """Return the task of a checkpoint's params text, on the data in this folder if there is any."""
    params = task.Task.Params.from_text(Path(f"{prefix}.params.txt").read_text())
    if data.is_dir():
        params.set_path("input.data_dir", str(data))
    return params


class Maker:
    """Makes one set.

    Attributes:
        commands: those that were run.
    """

    def __init__(self, folder: Path) -> None:
        """Start in a new folder."""
        self.folder = folder
        self.commands: list[str] = []

    def make(self, name: str, model: type[registry.Model], inputs: dict[str, Array] | None) -> None:
        """Train, evaluate and export one recipe.

        Args:
            name: of its folder.
            model: the recipe.
            inputs: arguments of the exported model; None: it cannot be exported.
        """
        home = self.folder / name
        home.mkdir(parents=True)
        flags = [f"--model=recipes.{model.__name__}"]
        if write := {"translation": _write_text, "language_model": _write_ids}.get(name):
            flags += write(home)
        run = home / "run"
        self._train(*flags, "--mode=train_eval", f"--logdir={run}")
        with tempfile.TemporaryDirectory() as temporary:
            self._train(*flags, "--mode=train", "--max_steps=0", f"--logdir={temporary}")
            (initial,) = prefixes(Path(temporary))
            # Any: mypy confuses the arrays with other arguments of savez.
            saved: dict[str, Any] = {f"initial:{k}": v for k, v in tensors(initial).items()}
        metrics = {}
        for prefix in prefixes(run):
            checkpoint = str(Path(prefix).relative_to(run))
            saved |= {f"{checkpoint}:{key}": value for key, value in tensors(prefix).items()}
            evaluated = eval_mode.run(kept_task(prefix, home / "data"), None, which=prefix)
            metrics[checkpoint] = dict(evaluated.values) if evaluated else {}
        np.savez_compressed(home / "tensors.npz", **saved)
        (home / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        if inputs is not None:
            newest = prefixes(run)[-1]
            made = export.run(kept_task(newest, home / "data"), run, which=newest)
            made.rename(home / "export")
            served = tf.saved_model.load(str(home / "export")).signatures["serving_default"]
            outputs = served(**{key: tf.constant(value) for key, value in inputs.items()})
            saved = {f"input:{key}": value for key, value in inputs.items()}
            saved |= {f"output:{key}": value for key, value in outputs.items()}
            np.savez(home / "served.npz", **saved)
        self._clean(home)

    def write_texts(self) -> None:
        """Write the params of all registered models, and of every class with its defaults."""
        models = registry.Registry()
        texts = {name: models.model(name)().task().to_text() for name in models.names()}
        joined = "".join(f"### {name}\n{text}" for name, text in texts.items())
        (self.folder / "registered.txt.xz").write_bytes(lzma.compress(joined.encode(), preset=9))
        of_classes = {kind.class_name(): kind().to_text() for kind in classes()}
        joined = "".join(f"### {name}\n{text}" for name, text in sorted(of_classes.items()))
        (self.folder / "classes.txt").write_text(joined)

    def _train(self, *flags: str) -> None:
        flags = ("-m", "lingvo_gpipe.trainer", "--params_package=tests.golden", *flags)
        subprocess.run([sys.executable, *flags], check=True)
        shown = " ".join(f"'{flag}'" if "[" in flag else flag for flag in flags)
        shown = re.sub(rf"{tempfile.gettempdir()}/\w+", "$INITIAL", shown)
        shown = shown.replace(str(self.folder), "$P")
        self.commands.append(f"python {shown}")

    def _clean(self, home: Path) -> None:
        """Keep only files that are restored; equal files become links to one file."""
        for folder in ("run/train", "run/eval", "run/export", "text"):
            shutil.rmtree(home / folder, ignore_errors=True)
        for name in ("run.lock", "result.json"):
            (home / "run" / name).unlink()
        vocabulary = home / "data" / "vocabulary.model"
        for copy in sorted(home.rglob(vocabulary.name)):
            if copy != vocabulary:
                copy.unlink()
                copy.symlink_to(os.path.relpath(vocabulary, copy.parent))


def classes() -> Iterator[type[hyperparams.Params]]:
    """Yield the Params of every public class of the package."""
    for module in pkgutil.walk_packages(lingvo_gpipe.__path__, "lingvo_gpipe."):
        importlib.import_module(module.name)
    waiting: list[type[hyperparams.Params]] = [hyperparams.Params]
    seen: set[str] = set()
    while waiting:
        params = waiting.pop()
        waiting += params.__subclasses__()
        if params.owner is None and params.__subclasses__():
            continue  # a base class that is never instantiated
        kind = params.owner or params
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith("lingvo_gpipe.") and not re.search(r"\._|<", name) and name not in seen:
            seen.add(name)
            yield params


def _write_text(home: Path) -> list[str]:
    toy_text.write_folder(home / "text", {"de": 90, "sw": 20}, held_out=4)
    corpus = f"input.preparation.corpora[0].folder={home / 'text'}"
    return [f"--data_dir={home / 'data'}", f"--params_override={corpus}"]


def _write_ids(home: Path) -> list[str]:
    (home / "data").mkdir()
    ids = np.cumsum(np.random.RandomState(0).randint(0, 3, 300)) % 16
    for split, chosen in (("train", ids[:200]), ("test", ids[200:])):
        np.save(home / "data" / f"{split}.npy", chosen.astype(np.uint8))
    return [f"--data_dir={home / 'data'}"]


def _sources() -> Array:
    """Return sentences of ids: three arbitrary ids each, ending in </s>, then padding."""
    random = np.random.RandomState(0)
    ids = np.zeros((3, 8), np.int32)
    for row, length in zip(ids, (7, 2, 4), strict=True):
        row[:length] = random.randint(10, 320, length)
        row[length] = END
    return ids


END = 3  # the id of </s>


def main(name: str) -> None:
    """Make the set `name`."""
    folder = GOLDEN / name
    if folder.exists():
        raise SystemExit(f"{folder} is there already, and no set is ever rewritten")
    code = ("lingvo_gpipe", "params", "tasks")
    if changed := _git("status", "--porcelain", "--", *code):
        raise SystemExit(f"commit the code first:\n{changed}")
    if not Path(lingvo_gpipe.__path__[0]).samefile("lingvo_gpipe"):
        raise SystemExit(f"{lingvo_gpipe.__path__[0]} is not the code of this checkout")
    placement.prepare_logical_cpus(2)
    made = Maker(folder)
    pixels = np.random.RandomState(1).randint(0, 17, (5, 8, 8, 1)).astype(np.float32) / 16.0
    made.make("image", recipes.Image, {"image": pixels})
    made.make("translation", recipes.Translation, {"source": _sources()})
    made.make("language_model", recipes.LanguageModel, None)
    made.make("amoeba_net", recipes.AmoebaNet, None)
    made.write_texts()
    text = README.format(
        name=name,
        commit=_git("rev-parse", "HEAD"),
        cores=len(os.sched_getaffinity(0)),
        versions=", ".join(f"{package} {metadata.version(package)}" for package in PACKAGES),
        commands="\n".join(made.commands),
    )
    (folder / "README.md").write_text(text)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
