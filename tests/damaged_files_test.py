"""Damaged files from outside end in one line: quickly, without a traceback, in little memory.

Files that this project wrote are damaged at random places: bits flipped, bytes replaced, parts cut
out, doubled, moved or filled with zeros. Each is read as a user's command reads it, and is either
read or refused by a `UserError` of one line.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lingvo_gpipe import errors, hyperparams, registry, schedule, task
from lingvo_gpipe.run import checkpoints, log_directory
from lingvo_gpipe.run.checkpoints import files
from lingvo_gpipe.tasks.mt.text import vocabulary
from tests.tasks.mt import toy_text

WHOLE_COUNT, SHARE = 10_000, 100
MOST_S = 5.0
MOST_BYTES = 500 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file.

    Attributes:
        name: its name in the report.
        whole: content of a whole one.
        read: reads a file as a user's command does.
    """

    name: str
    whole: bytes
    read: Callable[[Path], object]


def read_checkpoint_text(path: Path) -> object:
    """Compare the text beside a checkpoint with the params of a run that continues."""
    directory = path.parent / "checkpoints"
    if not directory.exists():
        directory.mkdir()
        for name in ("ckpt-3.index", "ckpt-3.data-00000-of-00001"):
            (directory / name).write_bytes(b"values")
    path.replace(directory / "ckpt-3.params.txt")
    assert checkpoints.newest(str(directory)) is not None
    return log_directory.check_params(path.parent, recipe(), report=None)


def read_schedule(path: Path) -> object:
    return schedule.make(f"@{path}", 4, 8)


def read_params(path: Path) -> object:
    """Read a text of params, and compare it with another."""
    text = path.read_bytes().decode(errors="replace")
    task.change(text, params_text())
    return hyperparams.from_text(text)


def read_vocabulary(path: Path) -> object:
    made = vocabulary.Vocabulary.load(path)
    return made.hash, made.controls, made.decode(made.encode([SENTENCE]))


@functools.cache
def recipe() -> task.Task.Params:
    return registry.Registry().model("image.digits.MLP")().task()


@functools.cache
def params_text() -> str:
    return recipe().to_text()


SENTENCE = toy_text.sentences(1, 5)[0]


@functools.cache
def kinds() -> tuple[Kind, ...]:
    text = params_text()
    training = vocabulary.VocabularyTraining(size=300, num_threads=1)
    words = vocabulary.train(toy_text.sentences(200, 5), training)
    line = f"{files._checksum_line(text)}\n"
    return (
        Kind("text beside a checkpoint", f"{line}{text}".encode(), read_checkpoint_text),
        Kind("schedule", schedule.make("1f1b", 4, 8).to_text().encode(), read_schedule),
        Kind("text of params", text.encode(), read_params),
        Kind("vocabulary", words.proto, read_vocabulary),
    )


MARKS = (
    b"\xff",
    b"\0",
    b"(" * 999,
    b"\n",
    b"'",
    b": ",
    b"class: ",
    b",",
    b"0F0",
    b"-1",
    b"9" * 400,
)


def damaged(content: bytes, random: np.random.RandomState) -> bytes:
    """Return `content` with one to six changes at random places."""
    for _ in range(random.randint(1, 7)):
        first, second = sorted(random.randint(0, len(content) + 1, 2))
        head, part, tail = content[:first], content[first:second], content[second:]
        few = int(random.choice([1, 4, 64]))
        place = random.randint(0, len(head + tail) + 1)
        mark = MARKS[random.randint(0, len(MARKS))]
        changed = (
            head + bytes([random.randint(0, 256)]) + content[first + 1 :],
            head + random.bytes(few) + content[first + few :],
            head + content[first + few :],
            head,
            head + part[:4096] * random.randint(2, 9) + tail,
            head + bytes(len(part)) + tail,
            (head + tail)[:place] + part + (head + tail)[place:],
            head + mark + content[first:],
        )
        content = changed[random.randint(0, len(changed))]
    return content


def resident_bytes(name: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_begins_here() -> None:
    """Reset the peak of the process's memory."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclasses.dataclass(slots=True)
class Found:
    """What reading some damaged files took."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    most_bytes: int = 0

    def add(self, kind: Kind, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        begun = time.perf_counter()
        refusal = refusal_of(kind, path)
        self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)
        self.read += refusal is None
        self.refused += refusal is not None
        # One line, and below it perhaps a picture or a list.
        first, *details = (refusal or "read").split("\n")
        assert 0 < len(first.strip()) < 2_000
        assert all(line.startswith("    ") for line in details), refusal


def refusal_of(kind: Kind, path: Path) -> str | None:
    """Read a file; return why it is refused, None if it is read."""
    try:
        kind.read(path)
    except errors.UserError as error:
        return str(error)
    return None


def fuzz(kind: Kind, folder: Path, count: int, seed: int) -> Found:
    """Read `count` damaged files of a kind."""
    random = np.random.RandomState(seed)
    found = Found()
    found.add(kind, folder / "file", kind.whole)
    assert found.read == 1, f"the whole {kind.name} is refused"
    found = Found()
    before = resident_bytes()
    peak_begins_here()
    for _ in range(count):
        found.add(kind, folder / "file", damaged(kind.whole, random))
    found.most_bytes = resident_bytes("VmHWM") - before
    return found


def check(found: Found, count: int) -> None:
    assert found.read + found.refused == count
    assert found.refused > 0
    assert found.slowest_s < MOST_S
    assert found.most_bytes < MOST_BYTES


@pytest.mark.parametrize("number", range(4))
def test_damaged_files_are_read_or_refused_in_one_line(number: int, tmp_path: Path) -> None:
    kind = kinds()[number]
    count = SHARE // len(kinds())
    check(fuzz(kind, tmp_path, count, seed=number), count)


@pytest.mark.reliability_full
@pytest.mark.parametrize("number", range(4))
def test_ten_thousand_damaged_files_are_read_or_refused_in_one_line(
    number: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kind = kinds()[number]
    count = WHOLE_COUNT // len(kinds())
    found = fuzz(kind, tmp_path, count, seed=100 + number)
    line = (
        f"{count} damaged files, {kind.name}: {found.read} read, {found.refused} refused; slowest "
        f"{found.slowest_s * 1e3:.0f} ms, {found.most_bytes / 2**20:.0f} MiB more"
    )
    record_property("damaged_files", line)

    check(found, count)
