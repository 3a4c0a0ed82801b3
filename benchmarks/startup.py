"""How long does the trainer need to answer what needs no TensorFlow: help, mistakes, missing data?

`python -m benchmarks.startup [--quick]`: processor seconds (user and system) of the whole process,
in interleaved rounds. Bytecode is cached: each command runs once before it counts.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile

ROUNDS, QUICK_ROUNDS = 10, 2
AIM_S = 1.0
# name → flags, and a part of the answer; FOLDER is an empty one.
COMMANDS = {
    "--help": (["--help"], "--params_override"),
    "--list_models": (["--list_models"], "image.digits.ConvNet"),
    "--mode=params": (["--mode=params", "--model=image.digits.ConvNet"], "train.optimizer.name"),
    "wrong flag": (["--modle=image.digits.ConvNet"], "unknown flag --modle"),
    "wrong model": (["--model=image.digits.ConvNe"], "no model"),
    "wrong field": (
        ["--model=image.digits.ConvNet", "--params_override=input.batchsize=3"],
        "has no field",
    ),
    "wrong value": (
        ["--model=mt.multilingual.T6x8192x16", "--params_override=input.batch_size=x"],
        "must be int",
    ),
    "no images": (
        ["--model=image.folder.AmoebaNetSmall", "--logdir=FOLDER/run", "--data_dir=FOLDER/none"],
        "does not exist",
    ),
    "no ImageNet": (
        ["--model=image.imagenet.AmoebaNetD18x256", "--logdir=FOLDER/run", "--data_dir=FOLDER"],
        "downloaded by hand",
    ),
    "no records": (
        ["--model=mt.multilingual.T6x8192x16", "--logdir=FOLDER/run", "--data_dir=FOLDER/none"],
        "holds no prepared text",
    ),
    "no ids": (
        ["--model=lm.transformer.L3", "--logdir=FOLDER/run", "--data_dir=FOLDER/none"],
        "has no .npy file",
    ),
}


def cpu_s(arguments: list[str], answer: str) -> float:
    """Return the processor seconds of a call of the trainer, which must answer as expected."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "lingvo_gpipe.trainer", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if answer not in done.stdout + done.stderr:
        sys.exit(f"{' '.join(arguments)} answered:\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure every command, and print a table."""
    from benchmarks.support import machine

    count = QUICK_ROUNDS if "--quick" in sys.argv else ROUNDS
    print(machine.describe())
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        load = machine.Load()
        for turn in range(count + 1):
            for name, (flags, answer) in COMMANDS.items():
                taken = cpu_s([flag.replace("FOLDER", folder) for flag in flags], answer)
                if turn > 0:
                    found[name].append(taken)
        other = load.stop()
    print(f"{count} rounds; processor seconds: median, spread; other load {other:.2f} cores")
    for name, runs in found.items():
        print(f"{name:<14} {statistics.median(runs):5.2f}  {min(runs):.2f} to {max(runs):.2f}")
    worst = max(statistics.median(runs) for runs in found.values())
    print(f"startup: largest median {worst:.2f} s (aim {AIM_S:g} s)")


if __name__ == "__main__":
    main()
