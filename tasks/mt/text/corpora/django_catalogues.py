"""Django's message catalogues as a corpus: real translations that come inside its wheel.

Under a thousand English messages in some 90 languages: enough to try everything out, not enough to
measure quality. The split depends on the English message: no English sentence of `test` or `valid`
is in `train`, in any language.
"""

from __future__ import annotations

import functools
import gettext
import hashlib
import importlib.util
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Example, Faults, Languages

_ENGLISH = "en"
_CONTEXT = "\x04"  # ends the context before a message


class Django(Corpus):
    """Messages of Django and its contributed applications, English and some 90 languages."""

    class Params(Corpus.Params):
        """Fields of Django."""

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
                    if pair in done or not pair[0] or _split_of(pair[0]) != split:
                        continue
                    done.add(pair)
                    if pair[0] == pair[1]:
                        faults.record("untranslated", f"{path}:{number}", "is not translated")
                        continue
                    yield f"{path}:{number}", {_ENGLISH: pair[0], language: pair[1]}

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
    """Return (message, translation) of a compiled catalogue, without messages of plural forms.

    Raises:
        InputError: the file is not a catalogue.
    """
    try:
        with open(path, "rb") as file:
            texts = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise errors.InputError(
            f"{path} is not a message catalogue: {error}. Install Django again"
        ) from error
    return tuple(
        (message.rpartition(_CONTEXT)[2], text)
        for message, text in texts.items()
        if message and isinstance(message, str)  # an empty message is the catalogue's header
    )


@functools.cache
def _split_of(english: str) -> str:
    """Return the split of an English sentence: `test` of 10 %, `valid` of 5 %.

    It depends on the letters and digits only.
    """
    bare = "".join(letter for letter in english.casefold() if letter.isalnum())
    percentile = int.from_bytes(hashlib.sha256(bare.encode()).digest()[:8]) % 100
    return "test" if percentile < 10 else "valid" if percentile < 15 else "train"
