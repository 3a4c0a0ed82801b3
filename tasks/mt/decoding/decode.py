"""`--mode=decode`: translates lines of text, in order, from a file or the standard input.

    python -m lingvo_gpipe.trainer --model=NAME --logdir=FOLDER --mode=decode \
        --params_override=decode.input=text.de --params_override=decode.output=text.en

A file of translations appears when it is complete. The standard output receives translations a few
lines at a time; in that case all other messages go to the standard error. Only line feeds end
lines. Each line has one translation, that of an empty line is empty. A line with more tokens than
`decode.max_length` is split, between words if possible, and the translations of its parts are
joined. Bytes that are not UTF-8 become U+FFFD. Split and changed lines are counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import tqdm

from lingvo_gpipe import errors, registry
from lingvo_gpipe.console import output
from lingvo_gpipe.console.progress import Count
from lingvo_gpipe.tasks.mt.decoding import translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_BOM = b"\xef\xbb\xbf"
_WORD = "\u2581"  # SentencePiece's mark of a space, with which a word begins
# SentencePiece's names of UTF-8 continuation bytes.
_CONTINUATIONS = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))


@dataclasses.dataclass(slots=True)
class LineCounts:
    """How many lines were read, and how many of them were empty, split or not UTF-8."""

    lines: int = 0
    empty: int = 0
    split: int = 0
    replaced: int = 0


def run(job: registry.Job) -> None:
    """Run `--mode=decode`.

    Raises:
        UserError: there is no checkpoint, no such language or no text, or it cannot be written.
    """
    params = cast("TranslationTask.Params", job.task)
    settings = params.decode
    if job.logdir is None and job.checkpoint is None:
        raise errors.ParamsError(
            "--mode=decode needs --logdir=FOLDER, of the run whose newest checkpoint translates, "
            "or --checkpoint"
        )
    with (
        _reading(settings.input) as file,
        _writing(settings.output) as write,
        Count("translating", "line", _number_of_lines(file)) as bar,  # reading weights takes time
    ):
        decoder = translator.Decoder(params, logdir=job.logdir, checkpoint=job.checkpoint)
        lines = LineTranslator(decoder, settings, bar.update)
        for translated in lines.translate(file):
            write("".join(f"{line}\n" for line in translated).encode())
    report = output.note if settings.output is None else job.report
    for note in translator.notes(decoder.cut):
        report(note)
    counts = " ".join(f"{name}={count}" for name, count in dataclasses.asdict(lines.counts).items())
    where = "" if settings.output is None else f" to {settings.output}"
    report(f"decode step={decoder.step} {counts}{where}")


@contextlib.contextmanager
def _reading(path: str | None) -> Iterator[BinaryIO]:
    """Open a file of lines, or the standard input."""
    if path is None:
        yield sys.stdin.buffer
        return
    try:
        file = open(os.path.expanduser(path), "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise errors.InputError(
            f"decode.input={path} cannot be read: {error.strerror}. Name another file"
        ) from error
    with file:
        yield file


def _number_of_lines(file: BinaryIO) -> int | None:
    """Return the lines of a file; None for a pipe, which can be read only once."""
    if not file.seekable():
        return None
    start = file.tell()
    count = sum(1 for _ in file)
    file.seek(start)
    return count


@contextlib.contextmanager
def _writing(path: str | None) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to a file, or to the standard output.

    The file gets its name when the block ends, and only if nothing was raised. Devices and pipes
    are written to directly.
    """
    if path is None:
        yield _write_to_standard_output
        return
    name = os.path.realpath(os.path.expanduser(path))
    is_file = os.path.isfile(name) or not os.path.exists(name)
    partial = f"{name}.writing" if is_file else name
    try:
        file = open(partial, "wb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise errors.InputError(
            f"decode.output={path} cannot be written: {error.strerror}. Name another file"
        ) from error
    with file:
        yield file.write
    if is_file:
        os.replace(partial, name)


def _write_to_standard_output(lines: bytes) -> None:
    with tqdm.tqdm.external_write_mode(file=sys.stdout):  # above a progress bar
        sys.stdout.buffer.write(lines)
        sys.stdout.buffer.flush()


class TokenTranslator(Protocol):
    """The part of `translator.Decoder` that `LineTranslator` needs."""

    vocabulary: Vocabulary
    target_tokens: bool
    max_length: int

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        """See `translator.Translator.translate`."""


class LineTranslator:
    """Translates lines of text, one translation for each line.

    Attributes:
        counts: of the lines so far.
    """

    def __init__(
        self,
        decoder: TokenTranslator,
        params: Decode,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Check the target language.

        Args:
            decoder: translates ids.
            params: settings.
            progress: called with the number of lines translated since the last call.

        Raises:
            UserError: `decode.target` is missing, or is not in the vocabulary.
        """
        self.counts = LineCounts()
        self._decoder = decoder
        self._params = params
        self._progress = progress
        self._vocabulary = decoder.vocabulary
        self._prefix = _target_prefix(self._vocabulary, params.target, decoder.target_tokens)
        pieces = self._vocabulary.pieces
        self._begins_word = [piece.startswith(_WORD) for piece in pieces]
        self._continues = [piece in _CONTINUATIONS for piece in pieces]

    def translate(self, file: BinaryIO) -> Iterator[list[str]]:
        """Yield the translations of consecutive blocks of lines of a file."""
        while block := list(itertools.islice(file, self._params.read_ahead)):
            if not self.counts.lines:
                block[0] = block[0].removeprefix(_BOM)
            self.counts.lines += len(block)
            owners, sources = [], []
            for place, ids in enumerate(self._vocabulary.encode(list(map(self._text, block)))):
                parts = list(self._parts(ids))
                self.counts.empty += not parts
                self.counts.split += len(parts) > 1
                owners += [place] * len(parts)
                sources += parts
            left = len(block)

            def finished(parts: int) -> None:
                nonlocal left
                # A long line has several parts: the last line is counted at the end of the block.
                lines = min(parts, left - 1)
                left -= lines
                self._progress(lines)

            translations = self._decoder.translate(sources, finished)
            self._progress(left)
            joined: list[list[str]] = [[] for _ in block]
            for place, text in zip(owners, self._vocabulary.decode(translations), strict=True):
                # Byte pieces may form line separators, but a translation is one line.
                joined[place].append(" ".join(text.splitlines()))
            yield [" ".join(parts) for parts in joined]

    def _text(self, line: bytes) -> str:
        """Return the text of a line, without its line ending."""
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.counts.replaced += 1
            return line.decode(errors="replace")

    def _parts(self, ids: list[int]) -> Iterator[list[int]]:
        """Yield the sources of a line, each as long as allowed; an empty line has none."""
        room = max(1, self._decoder.max_length - len(self._prefix) - 1)
        start = 0
        while start < len(ids):
            full = start + room
            end = len(ids)
            if end > full:
                words = (n for n in range(full, start + room // 2, -1) if self._begins_word[ids[n]])
                characters = (n for n in range(full, start, -1) if not self._continues[ids[n]])
                # A character with more bytes than allowed is split.
                end = next(itertools.chain(words, characters), full)
            yield [*self._prefix, *ids[start:end], END]
            start = end


def _target_prefix(vocabulary: Vocabulary, language: str | None, target_tokens: bool) -> list[int]:
    """Return the first ids of sources: the token of the target language if `target_tokens` is set.

    Raises:
        UserError: the language is missing, is not in the vocabulary, or the model has no such
            tokens.
    """
    if not target_tokens:
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
