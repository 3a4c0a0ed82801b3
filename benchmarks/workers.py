"""What do worker processes cost, and have they the bits of one process?

`python -m benchmarks.workers --bits`: four networks, 50 updates each, in one process, over 2 and
over 4 workers of this machine; also stopped half-way and continued the other way; and two and four
replicas of two cells, over 4 and over 8 workers. Every tensor of
the last checkpoint and every curve of TensorBoard is compared, and for translation a few sentences
that are translated with the weights of the one process, over workers and in one.

`python -m benchmarks.workers`: processor seconds and wall seconds per update, in one process and
over 2 workers, interleaved rounds on an idle machine; the chief's own share of them. They are
counted from one checkpoint to the next, so that neither start nor end counts, but one checkpoint
does.

`python -m benchmarks.workers --variables`: the same for 8, 32 and 128 layers in two cells, without
checkpoints in between: the time of the chief should not grow with them. Eight wide layers take
longer than 128 narrow ones: what the chief needs to wait, whatever it waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.support import saved, scalars

PACKAGE = "--params_package=benchmarks.worker_models"
CASES = {
    "digits": ("--model=image.digits.ConvNet",),
    "ties": (PACKAGE, "--model=cases.Ties"),
    "AmoebaNet-D": (PACKAGE, "--model=cases.AmoebaNet"),
    "translation": (PACKAGE, "--model=cases.Translation"),
}
# Steps of a few tenths of a second, as long as those of `benchmarks.speedup`.
LONG = {
    "MLP": (PACKAGE, "--model=cases.MLP"),
    "Transformer": (PACKAGE, "--model=cases.Transformer"),
}
STACKS = {f"{n} layers": (PACKAGE, f"--model=cases.Stack{n}") for n in (8, 32, 128)}
WIDE = "8 wide layers"
STACKS[WIDE] = (PACKAGE, "--model=cases.WideStack8")
SHAPES = ((1, 2), (1, 4), (2, 2), (4, 2))  # replicas, partitions
STEPS = 50
MEASURED = {
    "MLP": 100,
    "Transformer": 30,
    "digits": 300,
    "ties": 100,
    "AmoebaNet-D": 100,
    "translation": 50,
    **dict.fromkeys(STACKS, 500),
}
ROUNDS = 5
SENTENCES = (
    "Diese Seite wurde nicht gefunden.",
    "Bitte einen Namen eingeben.",
    "Cette page est introuvable.",
    "",
    "Ja",
    "Wählen Sie mindestens ein Element aus, um die Änderungen an allen diesen zu speichern.",
)
_SUPERVISOR = "supervisor"
_TICKS = os.sysconf("SC_CLK_TCK")


class FailedError(Exception):
    """A run that did not end with 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """What a run has used so far.

    Attributes:
        wall_s: seconds of a clock.
        processor_s: kind of process (chief, worker, supervisor) → processor seconds.
    """

    wall_s: float
    processor_s: dict[str, float]


def run(flags: Sequence[str], log: Path, marks: Sequence[Callable[[], bool]] = ()) -> list[Used]:
    """Run the trainer; return what it had used when each of these became true."""
    command = [sys.executable, "-m", "lingvo_gpipe.trainer", *flags]
    used: list[Used] = []
    kinds: dict[int, str] = {}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if len(used) < len(marks) and marks[len(used)]():
                used.append(_used(process.pid, kinds))
            time.sleep(0.01)
    if process.returncode or len(used) < len(marks):
        raise FailedError(
            f"{' '.join(flags)} ended with {process.returncode}:\n{log.read_text()[-2000:]}"
        )
    return used


def has_row(path: Path, epoch: int) -> bool:
    """Return whether a CSV file of a run has the row of an epoch, or a later one."""
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    return bool(rows) and int(rows[-1].partition(",")[0] or 0) >= epoch


def _used(root: int, kinds: dict[int, str]) -> Used:
    """Return what a process and all that it has started have used; `kinds` is kept for the next."""
    now = time.monotonic()
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
            seconds[int(path.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    total: dict[str, float] = {}
    for pid, used_s in seconds.items():
        ancestor = pid
        while ancestor not in (root, 0):
            ancestor = parents.get(ancestor, 0)
        if ancestor == root:
            kind = kinds.setdefault(pid, _kind(pid))
            total[kind] = total.get(kind, 0.0) + used_s
    return Used(now, total)


def _kind(pid: int) -> str:
    """Return what a process of a run is, by whether it has loaded TensorFlow."""
    try:
        if "libtensorflow" not in Path(f"/proc/{pid}/maps").read_text():
            return _SUPERVISOR
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return _SUPERVISOR
    return "worker" if "lingvo_gpipe.run.worker" in words else "chief"


def curves(folder: Path) -> dict[tuple[str, str, int], float]:
    """Return (folder, tag, step) → value of every curve of a run's numbers.

    Left out are times and traces of a process, and what each start of a run writes again.
    """
    return {
        (part, tag, point.step): point.value
        for part in ("train", "eval")
        for tag, points in scalars.read(folder / part).items()
        if not tag.endswith(("_per_second", "_share", "_s", "/mib", "bubble", "traces"))
        and not tag.startswith(("sampling_share/", "learning_rate_planned"))
        for point in points
    }


def compare(one: Path, other: Path) -> str:
    """Return how two runs differ; empty: in nothing."""
    ours, theirs = saved.values(one), saved.values(other)
    if not ours or ours.keys() != theirs.keys():
        return f"keys: {sorted(ours.keys() ^ theirs.keys())[:3]} of {len(ours)}"
    different = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
    if different:
        return f"{len(different)} of {len(ours)} tensors, such as {different[0]}"
    ours_c, theirs_c = curves(one), curves(other)
    if alone := sorted(ours_c.keys() ^ theirs_c.keys()):
        return f"{len(alone)} points of curves are in one run alone, such as {alone[0]}"
    points = [key for key in ours_c if ours_c[key] != theirs_c[key]]
    return f"{len(points)} points of curves, such as {points[0]}" if points else ""


def bits(names: Sequence[str]) -> int:
    """Compare runs over workers with runs in one process; return how many differ."""
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        data = f"--data_dir={temporary}/data"
        for name in names:
            for replicas, partitions in SHAPES:
                workers, shape = replicas * partitions, f"R={replicas}, K={partitions}"
                flags = [*CASES[name], "--mode=train_eval", f"--num_partitions={partitions}"]
                flags += [f"--num_replicas={replicas}", "--num_micro_batches=4"]
                flags += [data] if name in ("ties", "translation") else []
                flags += [
                    "--save_interval_steps=25",
                    "--params_override=train.log_interval_steps=1",
                ]
                over = f"--workers=local:{workers}"
                parts: dict[str, list[list[str]]] = {
                    "one process": [[]],
                    f"{workers} workers": [[over]],
                }
                if replicas == 1:
                    parts[f"{workers} workers, then one process"] = [[over], []]
                    parts[f"one process, then {workers} workers"] = [[], [over]]
                folders = {}
                for number, (label, starts) in enumerate(parts.items()):
                    folder = Path(temporary, f"{name}{replicas}x{partitions}_{number}")
                    for part, start in enumerate(starts):
                        steps = STEPS if part == len(starts) - 1 else STEPS // 2
                        more = [f"--logdir={folder}", f"--max_steps={steps}", *start]
                        run([*flags, *more], Path(f"{folder}.log"))
                    folders[label] = folder
                if name == "translation" and replicas == 1:
                    wrong += translations(folders["one process"], flags, over)
                first = folders.pop("one process")
                for label, folder in folders.items():
                    difference = compare(first, folder)
                    wrong += bool(difference)
                    count = len(saved.values(first))
                    points = len(curves(first).keys() & curves(folder).keys())
                    print(
                        f"{name}, {shape}, {label}: "
                        f"{difference or f'{count} tensors and {points} points equal'}",
                        flush=True,
                    )
    return wrong


def translations(folder: Path, flags: Sequence[str], over: str) -> int:
    """Translate sentences with a run's weights, in one process and over workers; return 1 or 0."""
    source = folder / "source"
    source.write_text("".join(f"{line}\n" for line in SENTENCES))
    texts = []
    for label, extra in (("one", []), ("workers", [over])):
        target = folder / label
        files = [
            f"--params_override=decode.{k}={v}" for k, v in (("input", source), ("output", target))
        ]
        decode = [flag for flag in flags if not flag.startswith(("--mode=", "--save"))]
        run([*decode, "--mode=decode", f"--logdir={folder}", *files, *extra], Path(f"{target}.log"))
        texts.append(target.read_text())
    is_same = texts[0] == texts[1] and texts[0].count("\n") == len(SENTENCES)
    print(
        f"translation, {over}: {len(SENTENCES)} lines {'equal' if is_same else 'differ'}",
        flush=True,
    )
    return int(not is_same)


def speed(names: Sequence[str], rounds: int) -> dict[str, float]:
    """Print processor and wall seconds per update, in one process and over two workers.

    Returns:
        name → processor seconds of a chief with workers, per update.
    """
    from benchmarks.support import machine

    chiefs: dict[str, float] = {}

    print(machine.describe())
    print(f"{rounds} interleaved rounds; seconds per update, median (least to most)")
    with tempfile.TemporaryDirectory() as temporary:
        data = f"--data_dir={temporary}/data"
        for name in names:
            found: dict[str, list[float]] = {}
            for number in range(rounds):
                for label, extra in (("one", []), ("workers", ["--workers=local:2"])):
                    folder = Path(temporary, f"{name}{label}{number}")
                    count = MEASURED[name]
                    flags = [*(CASES | LONG | STACKS)[name], "--num_partitions=2"]
                    flags += [data] if name in ("ties", "translation", "Transformer") else []
                    flags += [f"--logdir={folder}", *extra]
                    marks: list[Callable[[], bool]]
                    if name in STACKS:
                        flags += ["--params_override=train.callbacks=[callbacks.CSVLogger]"]
                        flags += [f"--max_steps={2 * count + 50}", "--save_interval_steps=100000"]
                        flags += [f"--params_override=eval.interval_steps={count}"]
                        rows = folder / "metrics.csv"
                        marks = [functools.partial(has_row, rows, epoch) for epoch in (0, 1)]
                    else:
                        flags += [f"--max_steps={2 * count}", f"--save_interval_steps={count}"]
                        written = [f"ckpt-{n * count}.params.txt" for n in (1, 2)]
                        marks = [(folder / "checkpoints" / one).exists for one in written]
                    first, last = run(flags, Path(f"{folder}.log"), marks)
                    each = {
                        kind: used_s - first.processor_s.get(kind, 0.0)
                        for kind, used_s in last.processor_s.items()
                    }
                    each["processor"] = sum(each.values())
                    each["wall"] = last.wall_s - first.wall_s
                    for what, seconds in each.items():
                        found.setdefault(f"{label} {what}", []).append(seconds / count)
            print(name)
            for what, values in found.items():
                middle = statistics.median(values)
                print(f"  {what:<18} {middle:.4f} ({min(values):.4f} to {max(values):.4f})")
            ratios = [
                b / a
                for a, b in zip(found["one processor"], found["workers processor"], strict=True)
            ]
            print(f"  workers / one, processor time: {statistics.median(ratios):.3f}", flush=True)
            chiefs[name] = statistics.median(found["workers chief"])
    return chiefs


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", action="store_true", help="compare bits, not times")
    parser.add_argument("--variables", action="store_true", help="by number of variables")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("names", nargs="*", choices=[*LONG, *CASES, []], default=[])
    arguments = parser.parse_args()
    names = arguments.names or list(CASES if arguments.bits else LONG | CASES)
    if arguments.bits:
        return min(1, bits(names))
    if arguments.variables:
        chiefs = speed(list(STACKS), arguments.rounds)
        most = chiefs["128 layers"]
        print(f"chief, 128 layers / 8 layers: {most / chiefs['8 layers']:.2f} (aim 1)")
        print(f"chief, 128 layers / 8 wide layers: {most / chiefs[WIDE]:.2f} (aim 1)")
        return 0
    speed(names, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
