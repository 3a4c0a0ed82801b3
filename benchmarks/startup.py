"""How long does the trainer need to answer what needs no TensorFlow: help, mistakes, missing data?

`python -m benchmarks.startup [--quick]`: processor seconds (user and system) of the whole process,
in interleaved rounds. Bytecode is cached: each command runs once before it counts.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

from benchmarks.support import machine, processes

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


def cpu_s(arguments: list[str], answer: str) -> dict[str, float]:
    """Return the processor seconds of a call of the trainer, which must answer as expected."""
    load = machine.Load()
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
    taken_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"s": taken_s, "other_load": load.stop()}


def main() -> None:
    """Measure every command, and print a table."""
    options = processes.parser(__doc__, measures=False).parse_args()
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(count + 1):
            for name, (flags, answer) in COMMANDS.items():
                taken = cpu_s([flag.replace("FOLDER", folder) for flag in flags], answer)
                if turn > 0:
                    found[name].append(taken)
    print(f"{count} rounds; processor seconds: median, spread")
    worst = 0.0
    for name, runs in found.items():
        quiet = processes.quiet(runs)
        median = processes.median(quiet, "s")
        worst = max(worst, median)
        print(f"{name:<14} {median:5.2f}  {processes.spread(quiet, 's')}")
    processes.conclude("startup", f"largest median {worst:.2f} s", f"at most {AIM_S:g} s", found)


if __name__ == "__main__":
    main()
