"""The interface of corpora: splits, each with pairs of languages, whose sentences are read once.

A corpus yields sentences of two languages, aligned. Several pairs of languages are read in one pass
if each line or example holds all of them. A pair is written `de:en`, source first, because codes
such as `zh-Hans` contain hyphens.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.text.corpora.faults import FaultPolicy, Faults, SentencePair

Languages: TypeAlias = tuple[str, str]  # source, target

# Splits and languages are parts of file names.
_NAME = re.compile(r"(?!\.)[\w.-]+")


class Corpus(hyperparams.Configurable, abc.ABC):
    """Base of corpora: aligned sentences of several languages, in splits."""

    class Params(hyperparams.Configurable.Params):
        """Fields that every corpus has."""

        policy: FaultPolicy = hyperparams.field(FaultPolicy(), "What to do with faulty text.")

    params: Params

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name in manifests and messages."""

    @abc.abstractmethod
    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""

    @abc.abstractmethod
    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split that have no fault; count the others."""

    def files(self) -> Iterable[str]:
        """Return the paths of its text; nothing if it does not read the user's files.

        Raises:
            InputError: the files are not a corpus.
        """
        return ()

    def check_names(self) -> None:
        """Refuse names of splits and languages that cannot be part of a file name.

        Raises:
            InputError: names the first.
        """
        for split in self.splits:
            languages = sorted({name for pair in self.pairs(split) for name in pair})
            for what, name in (("split", split), *(("language", name) for name in languages)):
                if not _NAME.fullmatch(name):
                    raise errors.InputError(
                        f"{self.name}: {what} {name!r} cannot be part of a file name. Use letters, "
                        "digits, '-', '_' and '.', and do not begin with '.'"
                    )

    def read(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split that have no fault and are within the limits.

        Pairs of the same two languages come in their order, mixed with those of others.

        Args:
            split: one of `splits`.
            wanted: languages, as in `pairs` → counter of their faults.

        Raises:
            InputError: a file cannot be read, or has a fault that the policy sets to `fail`.
        """
        for languages, pair in self.sentence_pairs(split, wanted):
            if wanted[languages].fits(pair, split):
                yield languages, pair


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
