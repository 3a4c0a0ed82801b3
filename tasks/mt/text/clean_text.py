"""Text between corpora and records: whole pairs of sentences in files, of two languages each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lingvo_gpipe.tasks.mt.text import corpus, mixture, vocabulary

KEPT = "text"  # folder of what is kept with the records
_BLOCK = 8192


@dataclasses.dataclass(slots=True)
class Text:
    """Clean text of a split in two languages: line 2i holds one's sentence, 2i + 1 the other's."""

    split: str
    one: str
    other: str
    path: Path
    corpora: dict[str, int]

    @property
    def count(self) -> int:
        """How many pairs of sentences it has."""
        return sum(self.corpora.values())

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Yield (one's, the other's)."""
        with open(self.path, encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line[:-1], next(file)[:-1]

    def directed(self, source: str) -> Iterator[tuple[str, str]]:
        """Yield (source, target)."""
        if source == self.one:
            return self.sentences()
        return ((target, source) for source, target in self.sentences())


def append(
    texts: Mapping[corpus.Languages, Text],
    name: str,
    found: Iterable[tuple[corpus.Languages, corpus.Pair]],
) -> None:
    """Write pairs of sentences of a corpus behind what their texts have.

    A block at a time: there may be more texts than files that a process may have open.

    Args:
        texts: by the languages that the pairs are found with, in that order.
        name: of the corpus.
        found: the pairs.
    """
    lines: dict[corpus.Languages, list[str]] = {languages: [] for languages in texts}
    counts = dict.fromkeys(texts, 0)

    def write() -> None:
        for languages, text in texts.items():
            with open(text.path, "a", encoding="utf-8", newline="\n") as file:
                file.writelines(lines[languages])
            lines[languages].clear()

    for number, (languages, pair) in enumerate(found, 1):
        lines[languages].append(f"{pair.source}\n{pair.target}\n")
        counts[languages] += 1
        if number % _BLOCK == 0:
            write()
    write()
    for languages, text in texts.items():
        text.corpora[name] = counts[languages]


def sample(texts: Sequence[Text], training: vocabulary.Training, seed: int) -> Iterator[str]:
    """Yield the sentences that the vocabulary is trained on, language shares by temperature."""
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
        for sides in text.sentences():
            for language, sentence in zip((text.one, text.other), sides, strict=True):
                for _ in range(picks[language][done[language]]):
                    yield sentence
                done[language] += 1


def keep(folder: Path, text: Text, source: str, target: str) -> tuple[str, str]:
    """Write sources and targets as they are; return the files' names in the folder."""
    stem = f"{KEPT}/{text.split}.{source}.{target}"
    names = (f"{stem}.source", f"{stem}.target")
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(open(folder / name, "w", encoding="utf-8", newline="\n"))
            for name in names
        ]
        for sides in text.directed(source):
            for file, sentence in zip(files, sides, strict=True):
                file.write(f"{sentence}\n")
    return names
