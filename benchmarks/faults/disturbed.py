"""One run of the trainer on workers, with one fault at a random instant of one phase."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults import hosts, notes, processes
from lingvo_gpipe.cluster import local

START, STEP, CHECKPOINT, EVALUATION = "start", "step", "checkpoint", "evaluation"
PHASES = (START, STEP, CHECKPOINT, EVALUATION)
KILLED, STOPPED = "killed", "stopped"
CUT, CUT_FOR_GOOD = "cut off for 5 s", "cut off for good"
APART = "cut off from the other one for 5 s"
NUM_WORKERS = 2
_HEALED_AFTER_S = 5.0
_LIMIT_S = 240.0
_GONE_WITHIN_S = 5.0
_TICK_S = 0.002
_SLOW_TICK_S = 0.05
_PORT = 2222
# Of the supervisor that starts the run again, and of a worker's, if the chief's supervisor is lost.
_FOUND = re.compile(r": restart \d+ of |^worker \d+ lost its chief: ")
FLAGS = (
    "--params_package=benchmarks.faults.recipes",
    "--model=digits.ConvNet",
    "--num_partitions=2",
    "--mode=train_eval",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which process.

    Attributes:
        role: the process; see `processes`.
        kind: `KILLED`, `STOPPED`, `CUT`, `CUT_FOR_GOOD`, or `APART`: two workers from each other.
        on_hosts: whether each process runs on a host of its own; else `--workers=local:2`.
    """

    role: str
    kind: str
    on_hosts: bool = False

    def __str__(self) -> str:
        return f"{self.role} {self.kind}{', hosts' if self.on_hosts else ''}"


FAULTS = (
    *(
        Fault(role, kind)
        for role in (processes.WORKER, processes.CHIEF, processes.CHIEF_SUPERVISOR)
        for kind in (KILLED, STOPPED)
    ),
    Fault(processes.WORKER, CUT, on_hosts=True),
    Fault(processes.WORKER, CUT_FOR_GOOD, on_hosts=True),
    Fault(processes.WORKER, APART, on_hosts=True),
    Fault(processes.WORKER, KILLED, on_hosts=True),
    Fault(processes.WORKER, STOPPED, on_hosts=True),
    Fault(processes.WORKER_SUPERVISOR, KILLED, on_hosts=True),
    Fault(processes.CHIEF, KILLED, on_hosts=True),
    Fault(processes.CHIEF, STOPPED, on_hosts=True),
    Fault(processes.CHIEF_SUPERVISOR, STOPPED, on_hosts=True),
    Fault(processes.CHIEF_SUPERVISOR, KILLED, on_hosts=True),
    Fault(processes.CHIEF_SUPERVISOR, CUT, on_hosts=True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run with a fault went.

    Attributes:
        detection_s: from the fault to the supervisor's line; None: nothing had to be started again.
        next_step_s: from the fault to the next mini-batch; None: there was none.
        equal: whether the last checkpoint is that of the undisturbed run.
        left: what is left of the run: processes, files, ports, networks.
        wrong: what went wrong otherwise; empty: nothing.
    """

    detection_s: float | None
    next_step_s: float | None
    equal: bool
    left: Sequence[str]
    wrong: str

    @property
    def right(self) -> bool:
        """Whether the run ended as it should."""
        return self.equal and not self.left and not self.wrong


class Command:
    """A command of a run, whose lines are kept with the times at which they came."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        self._process.send_signal(number)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip("\n")))


class Run:
    """The processes of one run, and what is seen of them from outside.

    Attributes:
        folder: holds the run's folder (`run`), its notes and its temporary files.
        commands: role and number → the command that was started last; all in `all_commands`.
    """

    def __init__(self, folder: Path, net: hosts.Hosts | None) -> None:
        self.folder = folder
        self.commands: dict[tuple[str, int], Command] = {}
        self.all_commands: list[Command] = []
        self._net = net
        self.notes_file = folder / "notes"
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        self._environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            notes.FILE: str(self.notes_file),
        }
        if net is not None:
            (folder / "token").write_text(f"secret of {folder.name}\n", encoding="utf-8")
            addresses = [f"{address}:{_PORT}" for address in net.addresses[: NUM_WORKERS + 1]]
            text = (
                f'{{"chief": ["{addresses[0]}"], "worker": ["{addresses[1]}", "{addresses[2]}"]}}'
            )
            (folder / "cluster.json").write_text(text, encoding="utf-8")

    def start(self, flags: Sequence[str] = ()) -> None:
        """Start everything."""
        if self._net is not None:
            for index in range(NUM_WORKERS):
                self.start_worker(index, host=index + 1)
        self.start_chief(flags)

    def start_chief(self, flags: Sequence[str] = ()) -> None:
        """Start the command that trains."""
        words = [*FLAGS, f"--logdir={self.folder / 'run'}", *flags]
        if self._net is None:
            self._start(
                (processes.CHIEF_SUPERVISOR, 0), [*words, f"--workers=local:{NUM_WORKERS}"], None
            )
        else:
            self._start((processes.CHIEF_SUPERVISOR, 0), [*words, *self._cluster()], 0)

    def start_worker(self, index: int, host: int) -> None:
        """Start the command that serves a worker, on a host."""
        words = ["--job=worker", f"--task={index}", *self._cluster()]
        self._start((processes.WORKER_SUPERVISOR, index), words, host)

    def _cluster(self) -> list[str]:
        return [
            f"--cluster={self.folder / 'cluster.json'}",
            f"--token_file={self.folder / 'token'}",
        ]

    def _start(self, name: tuple[str, int], words: Sequence[str], host: int | None) -> None:
        before = [] if host is None or self._net is None else self._net.command(host)
        role, index = name
        if role == processes.WORKER_SUPERVISOR:  # the bits depend on the number of cores
            cores = local.shares(sorted(os.sched_getaffinity(0)), NUM_WORKERS)[index]
            before = [*before, "taskset", "--cpu-list", ",".join(map(str, cores))]
        command = Command(
            [*before, sys.executable, "-m", "lingvo_gpipe.trainer", *words], self._environment
        )
        self.commands[name] = command
        self.all_commands.append(command)

    def processes(self) -> list[processes.Process]:
        """Return its processes."""
        return processes.of_run(self.notes_file)

    def notes(self) -> list[tuple[float, int, str]]:
        """Return (time, process, what) of all notes."""
        return notes.read(self.notes_file)

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written."""
        try:
            names = os.listdir(self.folder / "run" / "checkpoints")
        except OSError:
            return False
        return any(name.endswith(".writing") for name in names)

    def losses(self) -> list[float]:
        """Return the times of the lines that say what is lost."""
        lines = (line for command in self.all_commands for line in command.lines)
        return sorted(time_s for time_s, line in lines if _FOUND.search(line))

    def has_ended(self) -> bool:
        """Return whether all current commands have ended."""
        return all(command.code is not None for command in self.commands.values())

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes():
            os.kill(process.pid, signal.SIGKILL)
        for command in self.all_commands:
            if command.code is None:
                command.signal(signal.SIGKILL)
        wait(lambda: all(command.code is not None for command in self.all_commands), 10.0)

    def text(self) -> str:
        """Return everything that its commands have printed."""
        lines = sorted(line for command in self.all_commands for line in command.lines)
        return "\n".join(line for _, line in lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """How long the phases of the undisturbed run take, in seconds."""

    start_s: float
    step_s: float
    checkpoint_s: float
    evaluation_s: float


def undisturbed(folder: Path) -> Timings:
    """Do the run without a fault in `folder`; return how long its phases take."""
    run = Run(folder, None)
    began = time.monotonic()
    run.start()
    written, since = [], None
    try:
        while not run.has_ended():
            now = time.monotonic()
            if now - began > _LIMIT_S:
                sys.exit(f"the undisturbed run does not end:\n{run.text()}")
            if run.is_writing():
                since = since or now
            elif since is not None:
                written.append(now - since)
                since = None
            time.sleep(_TICK_S)
    finally:
        run.end()
    if any(command.code for command in run.all_commands):
        sys.exit(f"the undisturbed run failed:\n{run.text()}")
    drawn = run.notes()
    pairs = list(itertools.pairwise(drawn))
    steps = [b[0] - a[0] for a, b in pairs if a[2] == b[2] == notes.TRAINING]
    begins = [b[0] for a, b in pairs if (a[2], b[2]) == (notes.TRAINING, notes.EVALUATION)]
    ends = [time_s for time_s, _, what in drawn if what == notes.EVALUATED]
    evaluations = [b - a for a, b in zip(begins, ends, strict=True)]
    return Timings(
        start_s=drawn[0][0] - began,
        step_s=_middle(steps),
        checkpoint_s=_middle(written),
        evaluation_s=_middle(evaluations),
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def disturbed(
    fault: Fault,
    phase: str,
    folder: Path,
    timings: Timings,
    random_numbers: random.Random,
    is_equal: Callable[[Path], bool],
) -> Outcome:
    """Do a run with a fault.

    Args:
        fault: what happens.
        phase: when, one of `PHASES`.
        folder: for the run; must not exist.
        timings: of the undisturbed run.
        random_numbers: choose instant and worker.
        is_equal: compares a run's folder with the undisturbed run's.
    """
    if not fault.on_hosts:
        return _Disturbed(Run(folder, None), None, fault, random_numbers).outcome(
            phase, timings, is_equal
        )
    with hosts.Hosts(NUM_WORKERS + 1) as net:
        outcome = _Disturbed(Run(folder, net), net, fault, random_numbers).outcome(
            phase, timings, is_equal
        )
    return dataclasses.replace(outcome, left=[*outcome.left, *net.left()])


class _FailedError(Exception):
    """The run did not go on."""


class _Disturbed:
    """A run with a fault."""

    def __init__(
        self, run: Run, net: hosts.Hosts | None, fault: Fault, random_numbers: random.Random
    ) -> None:
        self._run = run
        self._net = net
        self._fault = fault
        self._random = random_numbers
        self._given_up: set[Command] = set()
        # A worker's link is cut at the last host, whose replacement has the next number.
        self._cut_host = 0 if fault.role == processes.CHIEF_SUPERVISOR else NUM_WORKERS
        self._index = self._random.randrange(NUM_WORKERS)
        if fault.kind in (CUT, CUT_FOR_GOOD):
            self._index = NUM_WORKERS - 1

    def outcome(self, phase: str, timings: Timings, is_equal: Callable[[Path], bool]) -> Outcome:
        """Do it."""
        with contextlib.ExitStack() as stack:
            return self._outcome(phase, timings, is_equal, stack)

    def _outcome(
        self,
        phase: str,
        timings: Timings,
        is_equal: Callable[[Path], bool],
        stack: contextlib.ExitStack,
    ) -> Outcome:
        run, wrong = self._run, ""
        at_s, networks, left = time.monotonic(), set[str](), list[str]()
        try:
            run.start()
            self._wait_for(phase, timings)
            networks = stack.enter_context(processes.networks(run.processes()))
            at_s = self._strike()
            self._heal(at_s)
            self._until(run.has_ended, "the end")
            codes = [c.code for c in run.commands.values() if c not in self._given_up]
            if any(codes):
                wrong = f"exit codes {codes}"
        except _FailedError as error:
            wrong = str(error)
        finally:
            wait(lambda: not run.processes(), _GONE_WITHIN_S)
            left += [f"{process.role} {process.pid}" for process in run.processes()]
            if self._net is not None:
                left += self._net.open_ports()
            run.end()
            (run.folder / "printed").write_text(run.text(), encoding="utf-8")
        left += sorted(networks & processes.other_networks()) if self._net is None else []
        left += processes.partial_files(run.folder / "run")
        left += [path.name for path in (run.folder / "temporary").iterdir()]
        equal = not wrong and is_equal(run.folder / "run")
        losses = [time_s for time_s in run.losses() if time_s > at_s]
        again = losses[0] if losses else at_s
        steps = [t for t, _, what in run.notes() if t > again and what == notes.TRAINING]
        return Outcome(
            detection_s=losses[0] - at_s if losses else None,
            next_step_s=steps[0] - at_s if steps else None,
            equal=equal,
            left=left,
            wrong=wrong,
        )

    def _until(
        self, condition: Callable[[], object], what: str, tick_s: float = _SLOW_TICK_S
    ) -> None:
        if not wait(condition, _LIMIT_S, tick_s):
            raise _FailedError(f"{what} did not come in {_LIMIT_S:.0f} s")

    def _wait_for(self, phase: str, timings: Timings) -> None:
        """Wait for a random instant of a phase."""
        run, share = self._run, self._random.random()
        if phase == START:
            time.sleep(share * timings.start_s)
            return
        first = self._random.randrange(2, notes.STEPS * 3 // 4)
        self._until(lambda: _count(run) >= first, "the step")
        if phase == STEP:
            self._until(
                lambda: _last(run) == notes.TRAINING and not run.is_writing(), "a step", _TICK_S
            )
            time.sleep(share * timings.step_s)
        elif phase == CHECKPOINT:
            self._until(lambda: not run.is_writing(), "a step", _TICK_S)
            self._until(run.is_writing, "a checkpoint", _TICK_S)
            time.sleep(share * timings.checkpoint_s)
        else:
            self._until(lambda: _last(run) != notes.EVALUATION, "a step", _TICK_S)
            self._until(lambda: _last(run) == notes.EVALUATION, "an evaluation", _TICK_S)
            time.sleep(share * timings.evaluation_s)

    def _strike(self) -> float:
        """Let the fault happen; return when."""
        fault = self._fault
        if fault.kind in (CUT, CUT_FOR_GOOD, APART):
            if self._net is None:
                raise _FailedError("there is no link")
            if fault.kind == APART:
                self._net.part(1, NUM_WORKERS)
            else:
                self._net.cut(self._cut_host)
            return time.monotonic()
        found: list[processes.Process] = []

        def is_there() -> bool:
            found[:] = [each for each in self._run.processes() if each.role == fault.role]
            return len(found) >= (NUM_WORKERS if "worker" in fault.role else 1)

        self._until(is_there, f"the {fault.role}")
        self._struck = found[self._index % len(found)]
        number = signal.SIGKILL if fault.kind == KILLED else signal.SIGSTOP
        os.kill(self._struck.pid, number)
        return time.monotonic()

    def _heal(self, at_s: float) -> None:
        """Do what a user, an orchestrator or time does after the fault."""
        run, fault = self._run, self._fault
        if fault.kind == KILLED:
            for (role, index), command in list(run.commands.items()):
                if command.pid == self._struck.pid:
                    self._until(functools.partial(_has_ended, command), "its end")
                    if role == processes.WORKER_SUPERVISOR:
                        run.start_worker(index, host=index + 1)
                    else:
                        run.start_chief()
            return
        time.sleep(max(0.0, at_s + _HEALED_AFTER_S - time.monotonic()))
        if fault.kind == STOPPED:
            if processes.is_stopped(self._struck, run.notes_file):
                os.kill(self._struck.pid, signal.SIGCONT)
        elif self._net is not None:
            if fault.kind == APART:
                self._net.rejoin(1, NUM_WORKERS)
                return
            if fault.kind == CUT:
                self._net.join(self._cut_host)
                return
            old = run.commands[processes.WORKER_SUPERVISOR, NUM_WORKERS - 1]
            self._net.join(NUM_WORKERS + 1)
            run.start_worker(NUM_WORKERS - 1, host=NUM_WORKERS + 1)
            old.signal(signal.SIGTERM)  # its orchestrator abandons it


def wait(condition: Callable[[], object], limit_s: float, tick_s: float = _SLOW_TICK_S) -> bool:
    """Wait for a condition, asking every `tick_s` seconds; return whether it came in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(tick_s)
    return True


def _count(run: Run) -> int:
    return sum(what == notes.TRAINING for _, _, what in run.notes())


def _has_ended(command: Command) -> bool:
    return command.code is not None


def _last(run: Run) -> str | None:
    drawn = run.notes()
    return drawn[-1][2] if drawn else None
