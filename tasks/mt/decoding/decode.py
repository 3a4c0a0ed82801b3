"""`--mode=decode`: translates lines of text, in order, from a file or the standard input.

    python -m lingvo_gpipe.trainer --model=NAME --logdir=FOLDER --mode=decode \
        --params_override=decode.input=text.de --params_override=decode.output=text.en

A file of translations is there when it is whole; to the standard output goes what is done, some
lines at a time, and everything else that is told goes to the standard error. Lines end at line
feeds alone, and there are as many translations as lines: an empty line gives an empty one; a line
with more tokens than `decode.max_length` is split, between words where there are any, and its
parts' translations stand behind each other; bytes that are no UTF-8 become U+FFFD. The last two are
told with their numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import tqdm

from lingvo_gpipe import errors, registry
from lingvo_gpipe.console import output, progress
from lingvo_gpipe.tasks.mt.decoding import translator
from lingvo_gpipe.tasks.mt.text import vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_BOM = b"\xef\xbb\xbf"
_WORD = "\u2581"  # SentencePiece's mark of a space, with which a word begins
# SentencePiece's names of the bytes that go on with a character of UTF-8.
_CONTINUATIONS = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
_SHOWN = 10
_PATIENCE_S = 1.0  # after which a reader that waits asks whether it shall stop


class _StoppedError(Exception):
    """The user asked to stop."""


@dataclasses.dataclass(slots=True)
class Told:
    """What became of the lines.

    Attributes:
        lines: how many were read.
        empty: how many of them hold no text.
        split: numbers of those that were too long.
        replaced: numbers of those that were no UTF-8.
    """

    lines: int = 0
    empty: int = 0
    split: list[int] = dataclasses.field(default_factory=list)
    replaced: list[int] = dataclasses.field(default_factory=list)

    def notes(self, max_length: int) -> Iterator[str]:
        """Yield what is worth a line of its own."""
        for numbers, what in (
            (
                self.split,
                f"longer than {max_length} tokens, split, between words where there are any",
            ),
            (self.replaced, "no UTF-8, bad bytes replaced by U+FFFD"),
        ):
            if numbers:
                first = ", ".join(map(str, numbers[:_SHOWN]))
                more = len(numbers) - _SHOWN
                rest = f" and {more} more" if more > 0 else ""
                word = "line" if len(numbers) == 1 else "lines"
                yield f"{what}: {word} {first}{rest}"

    def counts(self) -> str:
        """Return all counts, `lines=5 empty=1 split=0 replaced=0`."""
        return (
            f"lines={self.lines} empty={self.empty} split={len(self.split)} "
            f"replaced={len(self.replaced)}"
        )


def run(job: registry.Job) -> None:
    """Do what `--mode=decode` asks.

    Raises:
        UserError: there is no checkpoint, no such language or no text, or it cannot be written.
    """
    settings = cast("TranslationTask.Params", job.task).decode
    if job.logdir is None and job.checkpoint is None:
        raise errors.ParamsError(
            "--mode=decode needs --logdir=FOLDER, of the run whose newest checkpoint translates, "
            "or --checkpoint"
        )
    report = output.note if settings.output is None else job.report

    def progress() -> None:
        if job.should_stop():
            raise _StoppedError

    told = Told()
    try:
        with _opened(settings.input, progress) as file, _written(settings.output) as write:
            decoder = translator.Decoder(job.task, logdir=job.logdir, checkpoint=job.checkpoint)
            progress()  # from here on a signal is a wish; before, it ends the process at once
            with _bar(settings.input) as bar:
                lines = Lines(decoder, settings, told, bar.update)
                for translated in lines.translate(file, progress):
                    write("".join(f"{line}\n" for line in translated).encode())
    except _StoppedError:
        left = "is not written" if settings.output else "ends there"
        report(f"stopped after {told.lines} lines: {settings.output or 'the output'} {left}")
        return
    for note in told.notes(decoder.max_length):
        report(note)
    for note in translator.notes(decoder.cut):
        report(note)
    where = "" if settings.output is None else f" to {settings.output}"
    report(f"decode step={decoder.step} {told.counts()}{where}")


class Lines:
    """Lines of text in, translations out, one for each."""

    def __init__(
        self,
        decoder: Any,
        params: translator.Decode,
        told: Told,
        count: Callable[[int], Any] | None = None,
    ) -> None:
        """Take the model.

        Args:
            decoder: a `decoding.Decoder`.
            params: how.
            told: where it is noted what becomes of the lines.
            count: called with the number of lines that are done since the last call.

        Raises:
            UserError: `decode.target` is missing, or none of the vocabulary's.
        """
        self._decoder = decoder
        self._params = params
        self._vocabulary: vocabulary.Vocabulary = decoder.vocabulary
        self._prefix = _target(self._vocabulary, params.target, decoder.target_tokens)
        pieces = self._vocabulary.pieces
        self._begins_word = [piece.startswith(_WORD) for piece in pieces]
        self._goes_on = [piece in _CONTINUATIONS for piece in pieces]
        self._told = told
        self._count = count or (lambda _: None)

    def translate(self, file: BinaryIO, progress: Callable[[], None]) -> Iterator[list[str]]:
        """Yield the translations of some lines after the other, in order.

        Args:
            file: of lines.
            progress: called after every token; what it raises ends the translation.
        """
        while raw := list(itertools.islice(file, self._params.read_ahead)):
            progress()
            texts = [self._text(self._told.lines + n, line) for n, line in enumerate(raw, 1)]
            owners, sources = [], []
            for place, ids in enumerate(self._vocabulary.encode(texts)):
                number = self._told.lines + place + 1
                parts = list(self._parts(ids))
                self._told.empty += not parts
                if len(parts) > 1:
                    self._told.split.append(number)
                owners += [place] * len(parts)
                sources += parts
            left = len(raw)

            def finished(parts: int) -> None:
                nonlocal left
                # A long line is several parts: what remains is told at the end.
                lines = min(parts, left - 1)
                left -= lines
                self._count(lines)
                progress()

            found = self._decoder.translate(sources, finished)
            self._count(left)
            joined: list[list[str]] = [[] for _ in raw]
            for place, text in zip(owners, self._vocabulary.decode(found), strict=True):
                # Bytes can spell any separator, but a translation is one line.
                joined[place].append(" ".join(text.splitlines()))
            self._told.lines += len(raw)
            yield [" ".join(parts) for parts in joined]

    def _text(self, number: int, raw: bytes) -> str:
        """Return the text of a line, without its end."""
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            raw = raw.removeprefix(_BOM)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._told.replaced.append(number)
            return raw.decode(errors="replace")

    def _parts(self, ids: list[int]) -> Iterator[list[int]]:
        """Yield the sources of a line, as long as they may be; none of an empty line."""
        room = max(1, self._decoder.max_length - len(self._prefix) - 1)
        start = 0
        while start < len(ids):
            full = start + room
            end = len(ids)
            if end > full:
                words = (n for n in range(full, start + room // 2, -1) if self._begins_word[ids[n]])
                characters = (n for n in range(full, start, -1) if not self._goes_on[ids[n]])
                # A character of more bytes than there is room is torn.
                end = next(itertools.chain(words, characters), full)
            yield [*self._prefix, *ids[start:end], vocabulary.END]
            start = end


def _target(vocabulary: vocabulary.Vocabulary, language: str | None, wanted: bool) -> list[int]:
    """Return what sources begin with: the token of the target language, if they do so at all.

    Raises:
        UserError: the language is missing, not the vocabulary's, or the model was told of none.
    """
    if not wanted:
        if language is not None:
            raise errors.ParamsError(
                f"decode.target={language}, but the model has one target language, and was trained "
                "without a token for it. Leave it out"
            )
        return []
    if language is None and len(vocabulary.targets) == 1:
        language = vocabulary.targets[0]
    if language is None:
        raise errors.ParamsError(
            f"decode.target is missing: the model translates to {', '.join(vocabulary.targets)}. "
            f"Try --params_override=decode.target={vocabulary.targets[0]}"
        )
    return [vocabulary.target_id(language)]


class _Patient(io.RawIOBase):
    """What is read from a pipe or terminal; while nothing is there, `progress` is called."""

    def __init__(self, descriptor: int, progress: Callable[[], None]) -> None:
        """Take an open file's descriptor, which stays the caller's to close."""
        self._descriptor = descriptor
        self._progress = progress

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes and read them; what `progress` raises ends the wait."""
        ready: list[int] = []
        while not ready:
            self._progress()
            ready, _, _ = select.select([self._descriptor], [], [], _PATIENCE_S)
        return os.readv(self._descriptor, [buffer])


@contextlib.contextmanager
def _opened(path: str | None, progress: Callable[[], None]) -> Iterator[BinaryIO]:
    """Open a file of lines, or the standard input.

    Args:
        path: of the file; None: the standard input.
        progress: called while somebody has yet to write; what it raises ends the wait.

    Raises:
        InputError: it cannot be read.
    """
    if path is None:
        if sys.stdin is None:
            raise errors.InputError("the standard input is closed. Name a file by decode.input")
        yield _patient(sys.stdin.buffer, progress)
        return
    try:
        file = open(os.path.expanduser(path), "rb", opener=_at_once)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise errors.InputError(
            f"decode.input={path} cannot be read: {error.strerror}. Name another file"
        ) from error
    with file:
        os.set_blocking(file.fileno(), True)
        yield _patient(file, progress)


def _at_once(path: str, mode: int) -> int:
    """Open a pipe before anybody writes to it: that is waited for when it is read."""
    return os.open(path, mode | os.O_NONBLOCK)


def _patient(file: BinaryIO, progress: Callable[[], None]) -> BinaryIO:
    """Return what reads `file`: a regular one, or one in memory, keeps nobody waiting."""
    try:
        waits = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:
        waits = False
    return io.BufferedReader(_Patient(file.fileno(), progress)) if waits else file


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[Callable[[bytes], None]]:
    """Give what writes; a file takes its name when the block is left, and only if it is whole.

    Raises:
        InputError: it cannot be written.
    """
    if path is None:
        yield _to_standard_output
        return
    name = os.path.realpath(os.path.expanduser(path))
    if os.path.isdir(name):
        raise errors.InputError(f"decode.output={path} is a folder. Name a file in it")
    # What is no file (a device, a pipe) is written to, and never replaced.
    whole = not os.path.exists(name) or os.path.isfile(name)
    partial = f"{name}.writing" if whole else name
    with _told(path):
        file = open(partial, "wb")  # noqa: SIM115 (closed below)

    def write(lines: bytes) -> None:
        with _told(path):
            file.write(lines)
            file.flush()

    try:
        try:
            yield write
        finally:
            # Closing tries again to write what could not be written.
            with _told(path):
                file.close()
        if whole:
            with _told(path):
                os.replace(partial, name)
    finally:
        if whole:
            with contextlib.suppress(OSError):
                os.remove(partial)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """Make a user's mistake of what cannot be written."""
    try:
        yield
    except OSError as error:
        raise errors.InputError(
            f"decode.output={path} cannot be written: {error.strerror}. Name another file, or "
            "free disk space"
        ) from error


def _to_standard_output(lines: bytes) -> None:
    try:
        with tqdm.tqdm.external_write_mode(file=sys.stdout):  # above a progress bar
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise  # the reader has seen enough
    except OSError as error:
        raise errors.InputError(
            f"the standard output cannot be written: {error.strerror}. Free disk space"
        ) from error


def _bar(path: str | None) -> progress.Count:
    """Return what counts the lines; those of a file are known before."""
    total = None
    # A pipe is read once.
    if path is not None and os.path.isfile(os.path.expanduser(path)):
        with open(os.path.expanduser(path), "rb") as file:
            total = sum(1 for _ in file)
    return progress.Count("translating", "line", total)
