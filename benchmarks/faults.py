"""Does a run on workers end with the same bits, whichever process is killed, stopped or cut off?

`python -m benchmarks.faults`, as root, with the programs `ip` and `taskset`: 68 runs of a small
network on two workers, with `--workers=local:2` and on hosts, which are network namespaces. In
each, one process is killed or stopped, or a link is cut, at a random instant between its start and
its end. If it is a command, it is started again, as an orchestrator does. The last checkpoint must
have the bits of the undisturbed run, and nothing may be left behind: else the exit code is 1.
`--quick` does each fault once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.support import hosts, machine
from lingvo_gpipe.cluster import local

FLAGS = (
    "--model=image.digits.ConvNet",
    "--num_partitions=2",
    "--mode=train_eval",
    "--max_steps=60",
    "--save_interval_steps=5",
    "--params_override=eval.interval_steps=10",
)
CHIEF_SUPERVISOR, CHIEF = "chief's supervisor", "chief"
WORKER_SUPERVISOR, WORKER = "worker's supervisor", "worker"
KILLED, STOPPED = "killed", "stopped"
CUT, CUT_FOR_GOOD = "cut off for 5 s", "cut off for good"
APART = "cut off from the other one for 5 s"
NUM_WORKERS = 2
_QUARTERS = 4
_HEALED_AFTER_S = 5.0
_LIMIT_S = 240.0
_PORT = 2222
_MARK = "LINGVO_GPIPE_FAULTS"  # of the processes of a run
# Of the supervisor that starts the run again, and of a worker's, if the chief's supervisor is lost.
_LOSS = re.compile(r": restart \d+$|^worker \d+ lost its chief: ")
# Files that are there while something is written, and never after a run.
_PARTIAL = re.compile(r".*(\.writing|_temp|\.tmp|\.part)|shared-.*")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which process.

    Attributes:
        role: the process.
        kind: `KILLED`, `STOPPED`, `CUT`, `CUT_FOR_GOOD`, or `APART`: two workers from each other.
        on_hosts: whether each process runs on a host of its own; else `--workers=local:2`.
    """

    role: str
    kind: str
    on_hosts: bool = True

    def __str__(self) -> str:
        return f"{self.role} {self.kind}{', hosts' if self.on_hosts else ''}"


FAULTS = (
    *(
        Fault(role, kind, on_hosts=False)
        for role in (WORKER, CHIEF, CHIEF_SUPERVISOR)
        for kind in (KILLED, STOPPED)
    ),
    *(
        Fault(role, kind)
        for role in (WORKER, CHIEF, CHIEF_SUPERVISOR)
        for kind in (KILLED, STOPPED, CUT)
        if (role, kind) != (CHIEF, CUT)  # it is on the host of its supervisor
    ),
    Fault(WORKER_SUPERVISOR, KILLED),
    Fault(WORKER, CUT_FOR_GOOD),
    Fault(WORKER, APART),
)


def cases(quick: bool) -> list[tuple[Fault, int]]:
    """Return (fault, quarter of the run in which it happens); the first are those of `quick`."""
    return [
        (fault, (number + turn) % _QUARTERS)
        for turn in range(1 if quick else _QUARTERS)
        for number, fault in enumerate(FAULTS)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A process of a run, as seen in /proc.

    Attributes:
        pid: its number.
        role: what it is in the run.
    """

    pid: int
    role: str


def processes(mark: str) -> list[Process]:
    """Return the processes whose environment has a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{_MARK}={mark}".encode() not in environment:
            continue
        if b"lingvo_gpipe.run.worker" in words:
            role = WORKER
        elif any(entry.startswith(b"LINGVO_GPIPE_SUPERVISOR=") for entry in environment):
            role = CHIEF
        else:
            role = WORKER_SUPERVISOR if b"--job=worker" in words else CHIEF_SUPERVISOR
        found.append(Process(int(path.name), role))
    return found


class Command:
    """A command of a run.

    Attributes:
        lines: its lines with the times at which they came.
        process: the command's process.
    """

    def __init__(self, words: Sequence[str], environment: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            list(words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip("\n")))


class Run:
    """The processes of one run.

    Attributes:
        folder: holds the run's folder (`run`) and its temporary files.
        commands: role and number → the command that was started last.
        every_command: those before them, too.
    """

    def __init__(self, folder: Path, net: hosts.Hosts | None) -> None:
        self.folder = folder
        self.commands: dict[tuple[str, int], Command] = {}
        self.every_command: list[Command] = []
        self._net = net
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        self._environment = {**os.environ, "TMPDIR": str(temporary), _MARK: str(folder)}
        if net is not None:
            chief, *workers = (f"{host}:{_PORT}" for host in net.addresses[: NUM_WORKERS + 1])
            (folder / "token").write_text(f"secret of {folder.name}\n", encoding="utf-8")
            cluster = json.dumps({"chief": [chief], "worker": workers})
            (folder / "cluster.json").write_text(cluster, encoding="utf-8")

    def start(self) -> None:
        """Start everything."""
        if self._net is not None:
            for index in range(NUM_WORKERS):
                self.start_worker(index, host=index + 1)
        self.start_chief()

    def start_chief(self) -> None:
        """Start the command that trains."""
        words = [*FLAGS, f"--logdir={self.folder / 'run'}"]
        if self._net is None:
            self._start((CHIEF_SUPERVISOR, 0), [], [*words, f"--workers=local:{NUM_WORKERS}"])
        else:
            self._start((CHIEF_SUPERVISOR, 0), self._net.command(0), [*words, *self._cluster()])

    def start_worker(self, index: int, host: int) -> None:
        """Start the command that serves a worker, on a host."""
        if self._net is None:
            return
        cores = local.shares(sorted(os.sched_getaffinity(0)), NUM_WORKERS)[index]
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))]  # as of `local:2`
        words = ["--job=worker", f"--task={index}", *self._cluster()]
        self._start((WORKER_SUPERVISOR, index), [*self._net.command(host), *pinned], words)

    def _cluster(self) -> list[str]:
        return [f"--cluster={self.folder}/cluster.json", f"--token_file={self.folder}/token"]

    def _start(self, name: tuple[str, int], before: list[str], words: list[str]) -> None:
        program = [sys.executable, "-m", "lingvo_gpipe.trainer"]
        command = Command([*before, *program, *words], self._environment)
        self.commands[name] = command
        self.every_command.append(command)

    def processes(self) -> list[Process]:
        """Return its processes."""
        return processes(str(self.folder))

    def losses(self) -> list[float]:
        """Return when lines came that say what is lost."""
        lines = (line for command in self.every_command for line in command.lines)
        return sorted(time_s for time_s, line in lines if _LOSS.search(line))

    def has_ended(self) -> bool:
        """Return whether all current commands have ended."""
        return all(command.process.poll() is not None for command in self.commands.values())

    def end(self) -> list[str]:
        """Wait until all processes are gone; kill what is left, and return its roles."""
        wait(lambda: not self.processes(), 5.0)
        left = [process.role for process in self.processes()]
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for command in self.every_command:
            command.process.kill()
            command.process.wait()
        return left

    def text(self) -> str:
        """Return everything that its commands have printed."""
        return "\n".join(
            f"    {line}" for command in self.every_command for _, line in command.lines
        )


def wait(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait for a condition; return whether it came in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def undisturbed(folder: Path) -> float:
    """Do the run without a fault in `folder`; return how many seconds it takes."""
    run = Run(folder, None)
    began_s = time.monotonic()
    run.start()
    try:
        if not wait(run.has_ended, _LIMIT_S) or any(
            c.process.returncode for c in run.every_command
        ):
            sys.exit(f"the undisturbed run does not end as it should:\n{run.text()}")
    finally:
        run.end()
    return time.monotonic() - began_s


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run with a fault went.

    Attributes:
        found_s: from the fault to the supervisor's line; None: nothing had to be started again.
        all_s: from the start to the end of the run.
        wrong: what went wrong or was left behind; empty: nothing.
        text: what the commands have printed.
    """

    found_s: float | None
    all_s: float
    wrong: Sequence[str]
    text: str


def disturbed(fault: Fault, folder: Path, after_s: float, expected: Path) -> Outcome:
    """Do a run with a fault.

    Args:
        fault: what happens.
        folder: for the run; must not exist.
        after_s: when.
        expected: folder of the undisturbed run.
    """
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(hosts.Hosts(NUM_WORKERS + 1)) if fault.on_hosts else None
        run = Run(folder, net)
        wrong, began_s = [], time.monotonic()
        at_s = began_s
        try:
            run.start()
            time.sleep(after_s)
            at_s = _strike(run, fault, net)
            if not wait(run.has_ended, _LIMIT_S):
                wrong.append(f"no end in {_LIMIT_S:.0f} s")
            all_s = time.monotonic() - began_s
            codes = [command.process.poll() for command in run.commands.values()]
            wrong += [f"exit codes {codes}"] if any(codes) else []
        finally:
            wrong += run.end()
            wrong += net.open_ports() if net is not None else []
        ours, theirs = _saved(run.folder / "run"), _saved(expected / "run")
        if ours != theirs:
            wrong.append("OTHER BITS")
        wrong += [
            path.name for path in (run.folder / "run").rglob("*") if _PARTIAL.fullmatch(path.name)
        ]
        if (fault.role, fault.kind) != (CHIEF_SUPERVISOR, KILLED):  # who removes them
            wrong += [path.name for path in (run.folder / "temporary").iterdir()]
    wrong += net.left() if net is not None else []
    losses = [time_s for time_s in run.losses() if time_s > at_s]
    return Outcome(losses[0] - at_s if losses else None, all_s, wrong, run.text())


def _saved(folder: Path) -> dict[str, bytes]:
    """Return the bits of all values of a run's last checkpoint by key; empty without one."""
    from lingvo_gpipe.run import checkpoints

    prefix = checkpoints.newest(str(folder / "checkpoints"))
    if prefix is None:
        return {}
    saved = checkpoints.SavedValues(prefix)
    return {key: saved.read(key).tobytes() for key in saved.shapes}


def _strike(run: Run, fault: Fault, net: hosts.Hosts | None) -> float:
    """Let the fault happen; return when it was. Then do what an orchestrator or time does."""
    if net is not None and fault.kind not in (KILLED, STOPPED):
        return _cut(run, fault, net)
    victims: list[Process] = []

    def are_there() -> bool:
        victims[:] = [process for process in run.processes() if process.role == fault.role]
        return len(victims) >= (NUM_WORKERS if "worker" in fault.role else 1)

    wait(lambda: are_there() or run.has_ended(), _LIMIT_S)
    if not victims:
        return time.monotonic()
    victim = random.choice(victims).pid
    os.kill(victim, signal.SIGKILL if fault.kind == KILLED else signal.SIGSTOP)
    at_s = time.monotonic()
    if fault.kind == STOPPED:
        time.sleep(_HEALED_AFTER_S)
        with contextlib.suppress(ProcessLookupError):  # its supervisor has ended it
            os.kill(victim, signal.SIGCONT)
        return at_s
    for (role, index), command in list(run.commands.items()):
        if command.process.pid == victim:
            command.process.wait()
            if role == WORKER_SUPERVISOR:
                run.start_worker(index, host=index + 1)
            else:
                run.start_chief()
    return at_s


def _cut(run: Run, fault: Fault, net: hosts.Hosts) -> float:
    # A worker's link is cut at the last host, whose replacement has the next number.
    host = 0 if fault.role == CHIEF_SUPERVISOR else NUM_WORKERS
    if fault.kind == APART:
        net.part(1, NUM_WORKERS)
    else:
        net.cut(host)
    at_s = time.monotonic()
    time.sleep(_HEALED_AFTER_S)
    if fault.kind == APART:
        net.rejoin(1, NUM_WORKERS)
    elif fault.kind == CUT:
        net.join(host)
    else:
        abandoned = run.commands[WORKER_SUPERVISOR, NUM_WORKERS - 1]
        net.join(NUM_WORKERS + 1)
        run.start_worker(NUM_WORKERS - 1, host=NUM_WORKERS + 1)
        abandoned.process.terminate()
    return at_s


def _seconds(values: Sequence[float | None]) -> str:
    """Return the median and the largest of some times."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    return f"median {statistics.median(known):.2f} s, worst {max(known):.2f} s, of {len(known)}"


def main() -> int:
    """Do the runs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each fault once")
    parser.add_argument("--only", default="", help="only faults with this text")
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the runs, too
    random.seed(options.seed)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(machine.describe())
    load = machine.Load()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="lingvo_gpipe_faults_") as temporary:
        expected = Path(temporary, "undisturbed")
        whole_s = undisturbed(expected)
        print(f"undisturbed: {whole_s:.0f} s")
        print(f"{'fault':<46} {'after s':>7} {'found s':>7} {'longer':>7}  wrong or left behind")
        for number, (fault, quarter) in enumerate(cases(options.quick)):
            after_s = (quarter + random.random()) / _QUARTERS * whole_s
            if options.only not in str(fault):
                continue
            outcome = disturbed(fault, Path(temporary, str(number)), after_s, expected)
            outcomes.append(outcome)
            times = (
                "-" if value is None else f"{value:.2f}"
                for value in (after_s, outcome.found_s, outcome.all_s - whole_s)
            )
            figures = " ".join(f"{text:>7}" for text in times)
            print(f"{fault!s:<46} {figures}  {', '.join(outcome.wrong) or 'nothing'}", flush=True)
            if outcome.wrong:
                print(outcome.text, flush=True)
    right = sum(not outcome.wrong for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} as they should; other load {load.stop():.2f} cores")
    print(f"found: {_seconds([outcome.found_s for outcome in outcomes])}")
    print(f"longer than undisturbed: {_seconds([each.all_s - whole_s for each in outcomes])}")
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
