"""The interface of corpora, and what is a fault in their text.

A corpus yields examples: sentences of two or more languages that translate each other. A pair of
languages is written `de:en`, source first, because codes such as `zh-Hans` contain hyphens.
"""

from __future__ import annotations

import abc
import collections
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TextIO, TypeAlias

from lingvo_gpipe import errors, hyperparams

Languages: TypeAlias = tuple[str, str]  # source, target
Sentence: TypeAlias = bytes | str
Example: TypeAlias = tuple[str, Mapping[str, Sentence]]
"""Where it is, such as `de.txt:7`; language → sentence."""

_INVISIBLE_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
# Where `str.splitlines` splits (a line of a file has no line feed, but an example of a dataset
# may); NUL ends strings in other tools.
_SEPARATOR = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029\x00]")


class Corpus(hyperparams.Configurable, abc.ABC):
    """Base of corpora: examples in splits."""

    class Params(hyperparams.Configurable.Params):
        """Fields that every corpus has."""

        strict: bool = hyperparams.field(
            False, "Ends the preparation at the first faulty text, which is dropped otherwise."
        )

    params: Params

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name in manifests and messages."""

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""

    @abc.abstractmethod
    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""

    @abc.abstractmethod
    def examples(
        self, split: str, pairs: Collection[Languages], faults: Faults
    ) -> Iterator[Example]:
        """Yield the examples of a split; those without any of `pairs` may be left out.

        Raises:
            InputError: the text cannot be read.
        """

    def sentence_pairs(
        self, split: str, pairs: Collection[str], faults: Faults
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the faultless sentences of a split: pair of languages, source and target.

        Args:
            split: one of `splits`.
            pairs: pairs such as `de:en`; it may lack some.
            faults: counts the others.

        Raises:
            InputError: the text cannot be read, or faults end the preparation.
        """
        available = self.pairs(split)
        wanted = {pair: languages_of(pair) for pair in pairs if languages_of(pair) in available}
        for where, sentences in self.examples(split, wanted.values(), faults):
            for pair, languages in wanted.items():
                if sentences.keys() >= set(languages):
                    try:
                        source, target = (_decoded(sentences, name) for name in languages)
                    except _TextFault as fault:
                        faults.record(fault.kind, where, str(fault))
                    else:
                        yield pair, (source, target)


class Faults:
    """Counts the faulty text of a corpus by kind, and lists it in a file.

    Attributes:
        counts: kind → number of sentence pairs.
    """

    def __init__(self, file: TextIO, strict: bool) -> None:
        """Start with no fault.

        Args:
            file: receives a line for each: kind, place and description, separated by tabs.
            strict: whether a fault ends the preparation.
        """
        self.counts: collections.Counter[str] = collections.Counter()
        self._file = file
        self._strict = strict

    def record(self, kind: str, where: str, what: str) -> None:
        """Count a fault.

        Raises:
            InputError: faults end the preparation.
        """
        if self._strict:
            raise errors.InputError(f"{where}: {what}. Correct it, or leave out strict=True")
        self.counts[kind] += 1
        self._file.write(f"{kind}\t{where}\t{what}\n")


class _TextFault(Exception):  # noqa: N818 (no error: the pair is dropped)
    """A sentence or a pair of sentences is faulty."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def _decoded(sentences: Mapping[str, Sentence], language: str) -> str:
    """Return the text of an example's sentence in a language.

    Raises:
        _TextFault: it is not UTF-8, has no text, or holds a character that would end its line.
    """
    sentence = sentences[language]
    try:
        text = sentence if isinstance(sentence, str) else sentence.decode()
    except UnicodeDecodeError as error:
        what = f"{language}: byte {error.start + 1} is not UTF-8"
        raise _TextFault("encoding", what) from error
    if (separator := _SEPARATOR.search(text)) is not None:
        place = f"U+{ord(separator[0]):04X} at character {separator.start() + 1}"
        raise _TextFault("separator", f"{language}: {place} would end the line elsewhere")
    if all(unicodedata.category(character) in _INVISIBLE_CATEGORIES for character in text):
        raise _TextFault("empty", f"{language}: sentence is empty")
    return text


def languages_of(pair: str) -> Languages:
    """Return source and target of a pair.

    >>> languages_of("de:en")
    ('de', 'en')
    """
    source, _, target = pair.partition(":")
    return source, target


def all_pairs(languages: Sequence[str]) -> frozenset[Languages]:
    """Return every pair of two different languages, in both directions."""
    return frozenset((one, other) for one in languages for other in languages if one != other)
