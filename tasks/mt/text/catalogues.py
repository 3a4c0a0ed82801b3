"""Django's message catalogues as a corpus: real translations that come inside its wheel.

Under a thousand English messages in some 90 languages: enough to try everything out, no evidence of
quality. Split by the English message, so that no English sentence of `test` or `valid` is in
`train`, in whatever language.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.text import corpus

_ENGLISH = "en"
_MAGIC = 0x950412DE
_CONTEXT = "\x04"
_PLURAL = "\x00"


class Django(corpus.Corpus):
    """Messages of Django and its contributed applications, English and some 90 languages."""

    class Params(corpus.Corpus.Params):
        """Fields of Django."""

        valid_percent: int = hyperparams.field(5, "Of the English messages, in split valid.")
        test_percent: int = hyperparams.field(10, "Of the English messages, in split test.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        held = params.valid_percent + params.test_percent
        if min(params.valid_percent, params.test_percent) < 0 or held >= 100:
            raise errors.InputError(
                f"valid_percent={params.valid_percent} and test_percent={params.test_percent} "
                "leave nothing to train on. Use 0 or more each, together under 100"
            )

    @property
    def name(self) -> str:
        """What it is called in manifests and messages."""
        return "django"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return ("train", "valid", "test")

    def pairs(self, split: str) -> frozenset[corpus.Languages]:
        """Return the pairs of languages of a split, each both ways round; one side is English."""
        del split
        return frozenset(
            pair
            for language in self._files
            for pair in ((language, _ENGLISH), (_ENGLISH, language))
        )

    def sides(
        self, split: str, wanted: Mapping[corpus.Languages, corpus.Faults]
    ) -> Iterator[tuple[corpus.Languages, corpus.Pair]]:
        """Yield the pairs of sentences of a split; see `Corpus.sides`."""
        for languages, faults in wanted.items():
            source, target = languages
            for texts, where in self._translated(
                split, source if target == _ENGLISH else target, faults
            ):
                yield languages, corpus.Pair(*(texts if source == _ENGLISH else texts[::-1]), where)

    def _translated(
        self, split: str, foreign: str, faults: corpus.Faults
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield English and the other language of each message of a split, and its place."""
        done = set()
        for path in self._files[foreign]:
            for number, (message, translation) in enumerate(catalogue(path), 1):
                where = f"{path}:{number}"
                pair = (_sentence(message), _sentence(translation))
                if pair in done or not pair[0] or self._split_of(pair[0]) != split:
                    continue
                done.add(pair)
                if pair[0] == pair[1]:
                    faults.found("untranslated", where, "message is not translated")
                    continue
                texts = faults.texts(pair, (where, where))
                if texts is not None:
                    yield texts, where

    def _split_of(self, english: str) -> str:
        """Return the split of an English sentence."""
        place = _place(english)
        if place < self.params.test_percent:
            return "test"
        held = self.params.test_percent + self.params.valid_percent
        return "valid" if place < held else "train"

    @functools.cached_property
    def _files(self) -> Mapping[str, tuple[Path, ...]]:
        """Language → its catalogues; national variants of English left out."""
        found = importlib.util.find_spec("django")
        if found is None or found.origin is None:
            raise errors.InputError(
                "Django is not installed, whose messages are the corpus. Install it: "
                "pip install 'lingvo-gpipe[mt]'"
            )
        files: dict[str, list[Path]] = {}
        for path in sorted(Path(found.origin).parent.glob("**/locale/*/LC_MESSAGES/*.mo")):
            language = path.parts[-3].replace("_", "-")
            if language.partition("-")[0] != _ENGLISH:
                files.setdefault(language, []).append(path)
        return {
            language: tuple(paths)
            for language, paths in sorted(files.items())
            if any(
                message and translation
                for path in paths
                for message, translation in catalogue(path)
            )
        }


@functools.cache
def catalogue(path: Path) -> tuple[tuple[str, str], ...]:
    """Return (message, translation) of a compiled catalogue; of plurals, the last form of each.

    Raises:
        InputError: the file is none, or torn.

    Source: GNU gettext manual, section "The Format of GNU MO Files".
    """
    content = path.read_bytes()
    try:
        order = "<" if content[:4] == struct.pack("<I", _MAGIC) else ">"
        magic, _, count, messages, translations = struct.unpack_from(f"{order}5I", content)
        if magic != _MAGIC:
            raise ValueError("its first bytes are no catalogue's")
        found = []
        for number in range(count):
            texts = []
            for table in (messages, translations):
                length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
                if start + length > len(content):
                    raise ValueError(f"message {number + 1} ends behind its end")
                texts.append(content[start : start + length].decode("utf-8"))
            message = texts[0].rpartition(_CONTEXT)[2]
            if message:  # that without one is the catalogue's header
                found.append((message.split(_PLURAL)[-1], texts[1].split(_PLURAL)[-1]))
    except (struct.error, ValueError) as error:
        raise errors.InputError(
            f"{path} is no message catalogue: {error}. Install it anew"
        ) from error
    return tuple(found)


@functools.cache
def _place(english: str) -> int:
    """Return 0 to 99 for an English sentence, by its letters and digits alone."""
    bare = "".join(letter for letter in english.casefold() if letter.isalnum())
    return int.from_bytes(hashlib.sha256(bare.encode()).digest()[:8]) % 100


def _sentence(text: str) -> str:
    """Return a message on one line: line breaks in it are layout."""
    return " ".join(text.split())
