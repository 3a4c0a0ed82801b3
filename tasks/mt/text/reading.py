"""Reading all corpora once: faults are counted and logged, faultless text goes to files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypedDict

from lingvo_gpipe import errors
from lingvo_gpipe.console import progress, units
from lingvo_gpipe.tasks.mt.text import clean_text, records
from lingvo_gpipe.tasks.mt.text.clean_text import CleanText
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages
from lingvo_gpipe.tasks.mt.text.corpora.faults import Faults
from lingvo_gpipe.tasks.mt.text.corpora.text_files import FileCorpus
from lingvo_gpipe.tasks.mt.text.pair_selection import PairSelection

_SHOWN_FAULTS = 3


class FaultEntry(TypedDict):
    """The faults of a corpus in the manifest: kind → number; kind → first examples."""

    faults: dict[str, int]
    examples: dict[str, list[str]]


class FaultLog:
    """Writes every fault to a file: kind, place, description, separated by tabs.

    A context manager. Without a fault there is no file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = open(self._path, "w", encoding="utf-8", errors="surrogateescape")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def write(self, kind: str, where: str, what: str) -> None:
        """Write a line."""
        place = where.replace("\t", " ").replace("\n", " ")
        self._file.write(f"{kind}\t{place}\t{what}\n")


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusReader:
    """Reads the selected pairs of all corpora.

    Attributes:
        selection: selection of pairs.
        folder: folder of the files that are written.
        normalise: the vocabulary's normalization.
        log: receives every fault.
        report: receives a line for each corpus and kind of fault, and one at the end.
    """

    selection: PairSelection
    folder: Path
    normalise: Callable[[str], str]
    log: FaultLog
    report: Callable[[str], None]

    def read(self) -> tuple[list[CleanText], dict[str, FaultEntry]]:
        """Write all faultless text to files of `folder`.

        Returns:
            The texts by split and languages; corpus → its faults.

        Raises:
            InputError: a fault ends the preparation, or no training pair is left.
        """
        texts: dict[tuple[str, frozenset[str]], CleanText] = {}
        entries: dict[str, FaultEntry] = {}
        counting = None
        if any(isinstance(corpus, FileCorpus) for corpus in self.selection.corpora):
            counting = progress.Count("counting lines", "line")
        with counting or contextlib.nullcontext(), progress.Count("reading", "pair") as bar:
            for number, corpus in enumerate(self.selection.corpora):
                name = self.selection.corpus_name(number)
                faults = self._read_corpus(corpus, name, texts, counting, bar)
                entries[name] = {"faults": dict(faults.counts), "examples": faults.examples}
                for line in _summary(name, faults):
                    self.report(line)
        kept = sorted(texts.values(), key=lambda text: (text.split, text.one, text.other))
        total = sum(text.count for text in kept if text.split == self.selection.train_split)
        if not total:
            raise errors.InputError("no training pair is left: every one is faulty or left out")
        self.report(
            f"read {units.things(total, 'training pair')} of "
            f"{units.things(len(self.selection.pairs), 'pair')} of languages"
        )
        return kept, entries

    def _read_corpus(
        self,
        corpus: Corpus,
        name: str,
        texts: dict[tuple[str, frozenset[str]], CleanText],
        counting: progress.Count | None,
        bar: progress.Count,
    ) -> Faults:
        """Add the text of a corpus to `texts`; return all its faults."""
        counter = functools.partial(
            Faults,
            corpus.params.policy,
            self.selection.train_split,
            self.log.write,
            normalise=self.normalise,
            progress=iter if counting is None else counting.over,
        )
        faults = counter()
        for split, pairs in self.selection.of_corpus(corpus).items():
            of_split: dict[Languages, CleanText] = {}
            for one, other in pairs:
                path = self.folder / f"{len(texts)}.txt"
                text = texts.setdefault(
                    (split, frozenset((one, other))), CleanText(split, one, other, path, {})
                )
                of_split[text.one, text.other] = text
            wanted = {languages: counter() for languages in of_split}
            if wanted:
                clean_text.append(of_split, name, bar.over(corpus.read(split, wanted)))
            for pair_faults in wanted.values():
                faults.add(pair_faults)
        return faults


def _summary(name: str, faults: Faults) -> Iterator[str]:
    for kind, count in sorted(faults.counts.items()):
        first = "; ".join(faults.examples[kind][:_SHOWN_FAULTS])
        yield f"{name}: {count} times {kind}, such as {first} (all in {records.FAULTS})"
