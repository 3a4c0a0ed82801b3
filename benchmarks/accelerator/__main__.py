"""Does the library do on an accelerator what it does on CPUs, how fast, and in how much memory?

`python -m benchmarks.accelerator --output=FOLDER [--minutes=9] [--only=NAMES]`: one
GPU is split into logical devices, and each question is asked in processes of its own. Answers are
printed and written to FOLDER/results.json as soon as they are known, everything else that a
question prints to FOLDER/log.txt. What fails leaves its traceback. It ends within the minutes:
questions that do not fit are recorded as left out. Questions that measure neither time nor memory
are asked beside each other.

With `--cpu`, everything runs at toy size on logical CPU devices, which shows that the questions
themselves work. `docs/measurements.md` has the answers of one card.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accelerator.question import Setting
from benchmarks.support import processes


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question of the benchmark.

    Attributes:
        name: name of its module.
        seconds: most that it may take.
        processes: how many processes share its cases.
        measures: whether it measures time or memory, so that no other may run beside it.
    """

    name: str
    seconds: int
    processes: int = 1
    measures: bool = False


# The most valuable first.
QUESTIONS = (
    Question("card", 60),
    Question("sameness", 100, processes=6),
    Question("memory", 80, processes=4, measures=True),
    Question("largest", 280, measures=True),
    Question("speed", 280, measures=True),
    Question("pytorch", 90, measures=True),
    Question("calls", 40, measures=True),
    Question("timeline", 40, measures=True),
    Question("fit", 100),
    Question("placement", 60),
    Question("out_of_memory", 60),
    Question("nonfinite", 60),
    Question("strings", 60),
    Question("repetition", 60, processes=2),
    Question("checkpoint", 60),
    Question("workers", 90),
)
_ENVIRONMENT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    # With the libraries of TensorFlow 2.21, one product compiles by Triton for two minutes.
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
}
_ANSWER = "ANSWER "
_LEAST_S = 20  # of a question: TensorFlow and the card take half of it to begin
_SHOWN = 300  # characters of an answer on the screen


class Record:
    """Answers and lines so far, in the folder of the results."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.json"
        self._log = folder / "log.txt"
        self._lock = threading.Lock()
        self._begun_s = time.monotonic()
        self._questions: dict[str, dict[str, Any]] = {}

    def note(self, question: str, name: str, value: Any) -> None:
        """Print an answer, or how a process ended, and write the file of results."""
        text = json.dumps(value)
        if isinstance(value, dict) and "error" in value:
            text = f"FAILED {value['error'].strip().splitlines()[-1]}"
        with self._lock:
            self._questions.setdefault(question, {})[name] = value
            after_s = time.monotonic() - self._begun_s
            print(f"{after_s:4.0f} s {question}: {name}: {text}"[:_SHOWN], flush=True)
            partial = self.path.with_suffix(".writing")
            partial.write_text(json.dumps(self._questions, indent=1), encoding="utf-8")
            partial.replace(self.path)

    def line(self, question: str, line: str) -> None:
        """Write a line that a question printed."""
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            file.write(f"{question}: {line}")


def ask(
    question: Question, part: int, arguments: Sequence[str], ends_s: float, record: Record
) -> None:
    """Ask a question in a process, and end that when its time is over.

    Args:
        question: the question.
        part: number of the process.
        arguments: of the process.
        ends_s: when all must have ended, by `time.monotonic`.
        record: receives the answers.
    """
    begun_s = time.monotonic()
    seconds = min(question.seconds, ends_s - begun_s)
    ended = f"process {part} ended"
    if seconds < _LEAST_S:
        record.note(question.name, ended, "left out")
        return
    command = [sys.executable, "-m", "benchmarks.accelerator", *arguments]
    with subprocess.Popen(
        [*command, f"--ask={question.name}", f"--part={part}/{question.processes}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=_ENVIRONMENT | os.environ,
    ) as process:
        timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        for line in process.stdout or ():
            if line.startswith(_ANSWER):
                record.note(question.name, *json.loads(line.removeprefix(_ANSWER)))
            else:
                record.line(question.name, line)
        code = process.wait()
        timer.cancel()
    why = {0: "answered", -signal.SIGKILL: "out of time"}.get(code, f"failed with {code}")
    record.note(question.name, ended, f"{why} after {time.monotonic() - begun_s:.0f} s")


def ask_all(
    questions: Sequence[Question], arguments: Sequence[str], ends_s: float, record: Record
) -> None:
    """Ask questions in their order, those that measure nothing beside each other; see `ask`."""
    for batch in batches(questions):
        processes = [(question, part) for question in batch for part in range(question.processes)]
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            asked = [pool.submit(ask, *each, arguments, ends_s, record) for each in processes]
            for each in asked:
                each.result()


def batches(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Yield the questions that are asked at one time."""
    batch: list[Question] = []
    for question in questions:
        if batch and (question.measures or batch[-1].measures):
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def print_answers(name: str, setting: Setting) -> None:
    """Print each answer of a question when it is known, and the traceback with which it fails."""
    try:
        for answer in importlib.import_module(f"{__package__}.{name}").answers(setting):
            print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)
    except Exception:  # noqa: BLE001 (recorded with the answers)
        failure = {"error": traceback.format_exc()}
        print(f"\n{_ANSWER}{json.dumps(['failure', failure])}", flush=True)
        sys.exit(1)


def main() -> None:
    """Ask the questions, or one of them in this process."""
    by_name = {question.name: question for question in QUESTIONS}
    parser = processes.parser(__doc__, list(by_name))
    parser.add_argument("--output", type=Path, help="folder of the results; a new one if not given")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it has ended")
    parser.add_argument("--cpu", action="store_true", help="toy sizes on logical CPU devices")
    parser.add_argument("--python", default="python3", help="an interpreter that has PyTorch")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        part, parts = map(int, options.part.split("/"))
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(options.cpu, Path(folder), part, parts, options.python)
            print_answers(options.ask, setting)
        return
    ends_s = time.monotonic() + 60.0 * options.minutes
    questions = [by_name[name] for name in options.only]
    record = Record(options.output or Path(tempfile.mkdtemp(prefix="accelerator_")))
    arguments = [f"--python={options.python}"]
    if options.cpu:  # where a question takes as long as the machine is busy
        arguments.append("--cpu")
        questions = [dataclasses.replace(question, seconds=3600) for question in questions]
    ask_all(questions, arguments, ends_s, record)
    print(f"results: {record.path}")


if __name__ == "__main__":
    main()
