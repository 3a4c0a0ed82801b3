"""A made-up corpus: sentences of made-up words, and their translations word by word."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from lingvo_gpipe import hyperparams
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages, languages_of
from lingvo_gpipe.tasks.mt.text.corpora.faults import Faults, SentencePair

_SYLLABLES = [one + other for one in "bcdfghjklmnprstvwxyz" for other in "aeiou"]
MOST_WORDS = len(_SYLLABLES) ** 3


def words(count: int) -> Iterator[str]:
    """Yield different words of six letters, at most `MOST_WORDS`.

    >>> list(words(3))
    ['bababa', 'bababe', 'bababi']
    """
    return itertools.islice(map("".join, itertools.product(_SYLLABLES, repeat=3)), count)


class MadeText(Corpus):
    """Sentences in which frequent words are as much more frequent as in a language.

    A word's translation is the word that follows it by a distance of the pair's own.
    """

    class Params(Corpus.Params):
        """Fields of MadeText."""

        pairs: tuple[str, ...] = hyperparams.required("Pairs of languages, such as de:en.")
        sentences: dict[str, int] = hyperparams.required("Split → sentences of each pair.")
        num_words: int = hyperparams.required("Different words.")
        longest: int = hyperparams.required("Most words of a sentence.")

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return "made"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self.params.sentences)

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        del split
        both = [languages_of(pair) for pair in self.params.pairs]
        return frozenset([*both, *(pair[::-1] for pair in both)])

    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split; see `Corpus.sentence_pairs`."""
        known = list(words(self.params.num_words))
        for languages in wanted:
            distance = zlib.crc32(":".join(sorted(languages)).encode()) % len(known)
            random = np.random.RandomState(zlib.crc32(f"{split} {languages}".encode()))
            for number in range(self.params.sentences[split]):
                length = random.randint(1, self.params.longest + 1)
                ranks = (len(known) * random.random_sample(length) ** 3).astype(int)
                source, target = (
                    " ".join(known[(rank + shift) % len(known)] for rank in ranks)
                    for shift in (0, distance)
                )
                yield languages, SentencePair(source, target, f"made {split}:{number + 1}")
