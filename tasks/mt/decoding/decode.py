"""`--mode=decode`: translates lines of text, in order, from a file or the standard input.

    python -m lingvo_gpipe.trainer --model=NAME --logdir=FOLDER --mode=decode \
        --params_override=decode.input=text.de --params_override=decode.output=text.en

A file of translations appears when it is complete. The standard output receives translations a few
lines at a time; in that case all other messages go to the standard error. Only line feeds end
lines. Each line has one translation, that of an empty line is empty. A line with more tokens than
`decode.max_length` is split, between words if possible, and the translations of its parts are
joined. Bytes that are not UTF-8 become U+FFFD. Split and changed lines are reported by number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from lingvo_gpipe import errors, registry
from lingvo_gpipe.console import output
from lingvo_gpipe.tasks.mt.decoding import text_streams, translator
from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_BOM = b"\xef\xbb\xbf"
_WORD = "\u2581"  # SentencePiece's mark of a space, with which a word begins
# SentencePiece's names of UTF-8 continuation bytes.
_CONTINUATIONS = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
_MAX_SHOWN = 10


@dataclasses.dataclass(slots=True)
class LineCounts:
    """Counts of lines, by what was done with them.

    Attributes:
        lines: number of lines read.
        empty: number of lines without text.
        split: numbers of the lines that were too long.
        replaced: numbers of the lines that were not UTF-8.
    """

    lines: int = 0
    empty: int = 0
    split: list[int] = dataclasses.field(default_factory=list)
    replaced: list[int] = dataclasses.field(default_factory=list)

    def notes(self, max_length: int) -> Iterator[str]:
        """Yield a line for each kind of line that was changed."""
        for numbers, what in (
            (
                self.split,
                f"longer than {max_length} tokens, split, between words where there are any",
            ),
            (self.replaced, "not UTF-8, bad bytes replaced by U+FFFD"),
        ):
            if numbers:
                first = ", ".join(map(str, numbers[:_MAX_SHOWN]))
                more = len(numbers) - _MAX_SHOWN
                rest = f" and {more} more" if more > 0 else ""
                word = "line" if len(numbers) == 1 else "lines"
                yield f"{what}: {word} {first}{rest}"

    def summary(self) -> str:
        """Return all counts, `lines=5 empty=1 split=0 replaced=0`."""
        return (
            f"lines={self.lines} empty={self.empty} split={len(self.split)} "
            f"replaced={len(self.replaced)}"
        )


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
    report = output.note if settings.output is None else job.report

    def poll() -> None:
        if job.should_stop():
            raise translator.StoppedError

    counts = LineCounts()
    reading = text_streams.reading(settings.input, poll)
    try:
        with (
            reading as file,
            text_streams.writing(settings.output) as write,
            text_streams.line_counter(settings.input) as bar,  # reading the weights takes time
        ):
            decoder = translator.Decoder(params, logdir=job.logdir, checkpoint=job.checkpoint)
            poll()  # from now on signals are only polled; until now they end the process at once
            lines = LineTranslator(decoder, settings, counts, bar.update)
            for translated in lines.translate(file, poll):
                write("".join(f"{line}\n" for line in translated).encode())
    except translator.StoppedError:
        left = "is not written" if settings.output else "ends there"
        report(f"stopped after {counts.lines} lines: {settings.output or 'the output'} {left}")
        return
    for note in counts.notes(decoder.max_length):
        report(note)
    for note in translator.notes(decoder.cut):
        report(note)
    where = "" if settings.output is None else f" to {settings.output}"
    report(f"decode step={decoder.step} {counts.summary()}{where}")


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
    """Translates lines of text, one translation for each line."""

    def __init__(
        self,
        decoder: TokenTranslator,
        params: Decode,
        counts: LineCounts,
        count: Callable[[int], object] | None = None,
    ) -> None:
        """Check the target language.

        Args:
            decoder: translates ids.
            params: settings.
            counts: updated as lines are translated.
            count: called with the number of lines translated since the last call.

        Raises:
            UserError: `decode.target` is missing, or is not in the vocabulary.
        """
        self._decoder = decoder
        self._params = params
        self._vocabulary = decoder.vocabulary
        self._prefix = _target_prefix(self._vocabulary, params.target, decoder.target_tokens)
        pieces = self._vocabulary.pieces
        self._begins_word = [piece.startswith(_WORD) for piece in pieces]
        self._continues = [piece in _CONTINUATIONS for piece in pieces]
        self._counts = counts
        self._count = count or (lambda _: None)

    def translate(self, file: BinaryIO, poll: Callable[[], None]) -> Iterator[list[str]]:
        """Yield the translations of consecutive blocks of lines.

        Args:
            file: file of lines.
            poll: called after every token; its exception ends the translation.
        """
        while raw := list(itertools.islice(file, self._params.read_ahead)):
            poll()
            texts = [self._text(self._counts.lines + n, line) for n, line in enumerate(raw, 1)]
            owners, sources = [], []
            for place, ids in enumerate(self._vocabulary.encode(texts)):
                number = self._counts.lines + place + 1
                parts = list(self._parts(ids))
                self._counts.empty += not parts
                if len(parts) > 1:
                    self._counts.split.append(number)
                owners += [place] * len(parts)
                sources += parts
            left = len(raw)

            def finished(parts: int) -> None:
                nonlocal left
                # A long line has several parts: the last line is counted at the end of the block.
                lines = min(parts, left - 1)
                left -= lines
                self._count(lines)
                poll()

            translations = self._decoder.translate(sources, finished)
            self._count(left)
            joined: list[list[str]] = [[] for _ in raw]
            for place, text in zip(owners, self._vocabulary.decode(translations), strict=True):
                # Byte pieces may form line separators, but a translation is one line.
                joined[place].append(" ".join(text.splitlines()))
            self._counts.lines += len(raw)
            yield [" ".join(parts) for parts in joined]

    def _text(self, number: int, raw: bytes) -> str:
        """Return the text of a line, without its line ending."""
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            raw = raw.removeprefix(_BOM)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._counts.replaced.append(number)
            return raw.decode(errors="replace")

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
