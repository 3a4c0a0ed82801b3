"""How fast is the same training step of GPT-2 in plain PyTorch, on the same card?

`torch_gpt2` runs by the interpreter that has PyTorch, without the folders of PYTHONPATH in the
loader's path: of libraries that TensorFlow brought there, PyTorch would load some of equal names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.accelerator.question import Answers, Setting


def answers(setting: Setting) -> Answers:
    """Yield the speed of each size, as it is and by `torch.compile`."""
    environment = dict(os.environ)
    sites = environment.pop("PYTHONPATH", "").split(os.pathsep)
    folders = environment.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    own = [folder for folder in folders if not any(s and folder.startswith(s) for s in sites)]
    environment |= {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, own))}
    command = [setting.torch_python, "-m", "benchmarks.accelerator.torch_gpt2"]
    command += ["--cpu"] if setting.cpu else []
    errors = setting.folder / "pytorch.txt"
    with (
        errors.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        for line in process.stdout or ():
            name, value = json.loads(line)
            yield name, value
    if process.returncode != 0:
        text = errors.read_text(encoding="utf-8")
        is_missing = "No module named 'torch'" in text
        yield "PyTorch", {"missing" if is_missing else "error": text[-2000:]}
