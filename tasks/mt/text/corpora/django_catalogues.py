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
from collections.abc import Iterator, Mapping
from pathlib import Path

from lingvo_gpipe import errors, hyperparams, regular_files
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages
from lingvo_gpipe.tasks.mt.text.corpora.faults import Faults, SentencePair

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

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        held = params.valid_percent + params.test_percent
        if min(params.valid_percent, params.test_percent) < 0 or held >= 100:
            raise errors.InputError(
                f"valid_percent={params.valid_percent} and test_percent={params.test_percent} "
                "leave nothing to train on. Use 0 or more each, together under 100"
            )

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
        return frozenset(
            pair
            for language in self._files
            for pair in ((language, _ENGLISH), (_ENGLISH, language))
        )

    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split; see `Corpus.sentence_pairs`."""
        for languages, faults in wanted.items():
            from_english = languages[0] == _ENGLISH
            foreign = languages[1] if from_english else languages[0]
            for texts, where in self._translated(split, foreign, faults):
                yield languages, SentencePair(*(texts if from_english else texts[::-1]), where)

    def _translated(
        self, split: str, foreign: str, faults: Faults
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield the English and the foreign text of each message of a split, and its place."""
        done = set()
        for path in self._files[foreign]:
            for number, (message, translation) in enumerate(catalogue(path), 1):
                where = f"{path}:{number}"
                pair = (_sentence(message), _sentence(translation))
                if pair in done or not pair[0] or self._split_of(pair[0]) != split:
                    continue
                done.add(pair)
                if pair[0] == pair[1]:
                    faults.record("untranslated", where, "message is not translated")
                    continue
                texts = faults.texts(pair, (where, where))
                if texts is not None:
                    yield texts, where

    def _split_of(self, english: str) -> str:
        """Return the split of an English sentence."""
        percentile = _percentile(english)
        if percentile < self.params.test_percent:
            return "test"
        held = self.params.test_percent + self.params.valid_percent
        return "valid" if percentile < held else "train"

    @functools.cached_property
    def _files(self) -> Mapping[str, tuple[Path, ...]]:
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
    """Return (message, translation) of a compiled catalogue; of plural forms, the last.

    Raises:
        InputError: the file is not a catalogue, or is damaged.

    Source: GNU gettext manual, section "The Format of GNU MO Files".
    """
    try:
        content = regular_files.read(path)
        order = "<" if content[:4] == struct.pack("<I", _MAGIC) else ">"
        magic, _, count, messages, translations = struct.unpack_from(f"{order}5I", content)
        if magic != _MAGIC:
            raise ValueError("its first bytes are not those of a catalogue")
        entries = []
        for number in range(count):
            texts = []
            for table in (messages, translations):
                length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
                if start + length > len(content):
                    raise ValueError(f"message {number + 1} exceeds the file")
                texts.append(content[start : start + length].decode("utf-8"))
            message = texts[0].rpartition(_CONTEXT)[2]
            if message:  # an empty one is the catalogue's header
                entries.append((message.split(_PLURAL)[-1], texts[1].split(_PLURAL)[-1]))
    except (OSError, struct.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.InputError(
            f"{path} is not a message catalogue: {reason}. Install Django again"
        ) from error
    return tuple(entries)


@functools.cache
def _percentile(english: str) -> int:
    """Return 0 to 99 for an English sentence, computed from its letters and digits only."""
    bare = "".join(letter for letter in english.casefold() if letter.isalnum())
    return int.from_bytes(hashlib.sha256(bare.encode()).digest()[:8]) % 100


def _sentence(text: str) -> str:
    """Return a message on one line; its line breaks are only layout."""
    return " ".join(text.split())
