"""Django's message catalogues as a corpus: real translations that come inside its wheel.

Under a thousand English messages in some 90 languages: enough to try everything out, not enough to
measure quality. The split depends on the English message: no English sentence of `test` or `valid`
is in `train`, in any language.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Example, Faults, Languages

_ENGLISH = "en"
_MAGIC = 0x950412DE
_CONTEXT = "\x04"
_PLURAL = "\x00"


class Django(Corpus):
    """Messages of Django and its contributed applications, English and some 90 languages."""

    class Params(Corpus.Params):
        """Fields of Django."""

        valid_percent: int = hyperparams.field(
            5, "Percentage of the English messages in split valid."
        )
        test_percent: int = hyperparams.field(
            10, "Percentage of the English messages in split test."
        )

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return "django"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return ("train", "valid", "test")

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, in both directions; one is English."""
        del split
        pairs = [(language, _ENGLISH) for language in self._files]
        return frozenset([*pairs, *(pair[::-1] for pair in pairs)])

    def examples(
        self, split: str, pairs: Collection[Languages], faults: Faults
    ) -> Iterator[Example]:
        """Yield the examples of a split; see `Corpus.examples`."""
        for language in sorted({name for pair in pairs for name in pair} - {_ENGLISH}):
            done = set()
            for path in self._files[language]:
                for number, (message, translation) in enumerate(catalogue(path), 1):
                    # On one line: its line breaks are only layout.
                    pair = (" ".join(message.split()), " ".join(translation.split()))
                    if pair in done or not pair[0] or self._split_of(pair[0]) != split:
                        continue
                    done.add(pair)
                    if pair[0] == pair[1]:
                        faults.record("untranslated", f"{path}:{number}", "is not translated")
                        continue
                    yield f"{path}:{number}", {_ENGLISH: pair[0], language: pair[1]}

    def _split_of(self, english: str) -> str:
        """Return the split of an English sentence."""
        percentile = _percentile(english)
        if percentile < self.params.test_percent:
            return "test"
        held_out = self.params.test_percent + self.params.valid_percent
        return "valid" if percentile < held_out else "train"

    @functools.cached_property
    def _files(self) -> Mapping[str, list[Path]]:
        """Language → its catalogues, without the national variants of English."""
        spec = importlib.util.find_spec("django")
        if spec is None or spec.origin is None:
            raise errors.InputError(
                "Django is not installed; its messages are the corpus. Install it: "
                "pip install 'lingvo-gpipe[mt]'"
            )
        files: dict[str, list[Path]] = {}
        for path in sorted(Path(spec.origin).parent.glob("**/locale/*/LC_MESSAGES/*.mo")):
            language = path.parts[-3].replace("_", "-")
            if language.partition("-")[0] != _ENGLISH and any(map(all, catalogue(path))):
                files.setdefault(language, []).append(path)
        return files


@functools.cache
def catalogue(path: Path) -> tuple[tuple[str, str], ...]:
    """Return (message, translation) of a compiled catalogue; of plural forms, the last.

    Raises:
        InputError: the file is not a catalogue.

    Source: GNU gettext manual, section "The Format of GNU MO Files".
    """
    try:
        content = path.read_bytes()
        order = "<" if content[:4] == struct.pack("<I", _MAGIC) else ">"
        _, _, count, messages, translations = struct.unpack_from(f"{order}5I", content)

        def texts(table: int) -> Iterator[str]:
            for number in range(count):
                length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
                yield content[start : start + length].decode().split(_PLURAL)[-1]

        both = zip(texts(messages), texts(translations), strict=True)
        named = [(message.rpartition(_CONTEXT)[2], translation) for message, translation in both]
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise errors.InputError(
            f"{path} is not a message catalogue: {error}. Install Django again"
        ) from error
    return tuple(pair for pair in named if pair[0])  # an empty message is the catalogue's header


@functools.cache
def _percentile(english: str) -> int:
    """Return 0 to 99 for an English sentence, computed from its letters and digits only."""
    bare = "".join(letter for letter in english.casefold() if letter.isalnum())
    return int.from_bytes(hashlib.sha256(bare.encode()).digest()[:8]) % 100
