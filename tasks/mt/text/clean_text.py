"""Text between corpora and records: faultless sentence pairs, one file for two languages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lingvo_gpipe.tasks.mt.text import mixture
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Languages
from lingvo_gpipe.tasks.mt.text.corpora.faults import SentencePair
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining

KEPT = "text"  # folder of the text that is stored with the records
_BLOCK = 8192


@dataclasses.dataclass(slots=True)
class CleanText:
    """Clean text of a split in two languages.

    Attributes:
        split: its name.
        one: language of lines 0, 2, 4 …
        other: language of lines 1, 3, 5 …, the translations.
        path: path of the file.
        corpora: name → number of sentence pairs from it.
    """

    split: str
    one: str
    other: str
    path: Path
    corpora: dict[str, int]

    @property
    def count(self) -> int:
        """Number of sentence pairs."""
        return sum(self.corpora.values())

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Yield the sentence pairs, in the order (one, other)."""
        with open(self.path, encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line[:-1], next(file)[:-1]

    def directed(self, source: str) -> Iterator[tuple[str, str]]:
        """Yield the sentence pairs with the sentence in language `source` first."""
        if source == self.one:
            return self.sentences()
        return ((target, source) for source, target in self.sentences())


def append(
    texts: Mapping[Languages, CleanText],
    name: str,
    pairs: Iterable[tuple[Languages, SentencePair]],
) -> None:
    """Append the sentence pairs of a corpus to the files of their texts.

    Writes a block at a time: there may be more texts than files that a process can have open.

    Args:
        texts: by their languages, in the order in which `pairs` has them.
        name: name of the corpus.
        pairs: with their languages.
    """
    lines: dict[Languages, list[str]] = {languages: [] for languages in texts}
    counts = dict.fromkeys(texts, 0)

    def write() -> None:
        for languages, text in texts.items():
            with open(text.path, "a", encoding="utf-8", newline="\n") as file:
                file.writelines(lines[languages])
            lines[languages].clear()

    for number, (languages, pair) in enumerate(pairs, 1):
        lines[languages].append(f"{pair.source}\n{pair.target}\n")
        counts[languages] += 1
        if number % _BLOCK == 0:
            write()
    write()
    for languages, text in texts.items():
        text.corpora[name] = counts[languages]


def sample(texts: Sequence[CleanText], training: VocabularyTraining, seed: int) -> Iterator[str]:
    """Yield the sentences that the vocabulary is trained on, in shares by temperature."""
    sizes: dict[str, int] = {}
    for text in texts:
        for language in (text.one, text.other):
            sizes[language] = sizes.get(language, 0) + text.count
    languages = sorted(sizes)
    shares = mixture.probabilities([sizes[name] for name in languages], training.temperature)
    quotas = mixture.apportion(min(training.sentences, sum(sizes.values())), shares)
    picks = {}
    for index, (name, quota) in enumerate(zip(languages, quotas, strict=True)):
        drawn = mixture.draws(sizes[name], 0, int(quota), seed, index)
        picks[name] = np.bincount(drawn, minlength=sizes[name])
    done = dict.fromkeys(languages, 0)
    for text in texts:
        for pair in text.sentences():
            for language, sentence in zip((text.one, text.other), pair, strict=True):
                for _ in range(picks[language][done[language]]):
                    yield sentence
                done[language] += 1


def keep(folder: Path, text: CleanText, languages: Languages) -> tuple[str, str]:
    """Write the sources and targets of a text to two files; return their names in `folder`."""
    stem = f"{KEPT}/{text.split}.{languages[0]}.{languages[1]}"
    names = (f"{stem}.source", f"{stem}.target")
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(open(folder / name, "w", encoding="utf-8", newline="\n"))
            for name in names
        ]
        for pair in text.directed(languages[0]):
            for file, sentence in zip(files, pair, strict=True):
                file.write(f"{sentence}\n")
    return names
