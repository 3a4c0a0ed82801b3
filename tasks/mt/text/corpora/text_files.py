"""Corpora in text files: folders of `LANG.SPLIT.txt`, aligned files, tables with tabs.

A file whose name ends in `.gz` is decompressed. Only line feeds end lines; a byte order mark and
carriage returns at the ends of lines are removed.
"""

from __future__ import annotations

import abc
import functools
import glob
import gzip
import itertools
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.text.corpora.corpus import (
    Corpus,
    Example,
    Faults,
    Languages,
    all_pairs,
)

AlignedFiles: TypeAlias = Mapping[str, str]  # language → path, line i of each a translation

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
_FILE_NAME = re.compile(r"(?P<language>[^.]+)\.(?P<split>[^.]+)\.txt(\.gz)?")


def lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, plain or gz, without their ends.

    Raises:
        InputError: it cannot be read to its end (names the line), or is UTF-16.
    """
    number = 0
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(_UTF16):
                    raise errors.InputError(
                        f"{path} is UTF-16. Convert it: iconv -f utf-16 -t utf-8 {path} > FILE"
                    )
                text = line.removeprefix(_BOM) if number == 1 else line
                yield text.removesuffix(b"\n").removesuffix(b"\r")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        after = f" after line {number}" if number else ""
        raise errors.InputError(
            f"{path} cannot be read{after}: {reason}. Use another file, or copy it again"
        ) from error


class FileCorpus(Corpus):
    """Base of corpora of text files with a sentence a line; subclasses implement `groups`."""

    class Params(Corpus.Params):
        """Fields of FileCorpus."""

    @abc.abstractmethod
    def groups(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split."""

    @functools.cached_property
    def _groups(self) -> Mapping[str, Sequence[AlignedFiles]]:
        return self.groups()

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self._groups)

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        groups = self._groups.get(split, ())
        return frozenset[Languages]().union(*(all_pairs(tuple(group)) for group in groups))

    def examples(
        self, split: str, pairs: Collection[Languages], faults: Faults
    ) -> Iterator[Example]:
        """Yield the examples of a split; see `Corpus.examples`."""
        del faults
        for group in self._groups[split]:
            used = {name for pair in pairs if group.keys() >= set(pair) for name in pair}
            languages = sorted(used)
            paths = [group[language] for language in languages]
            rows = itertools.zip_longest(*map(lines, paths))
            for number, sentences in enumerate(rows, 1):
                if None in sentences:
                    short = paths[sentences.index(None)]
                    long = next(p for p, s in zip(paths, sentences, strict=True) if s is not None)
                    raise errors.InputError(
                        f"{short} has {number - 1} lines, but {long} has more. Correct the files: "
                        "each line of one translates that line of the other"
                    )
                yield f"{paths[0]}:{number}", dict(zip(languages, sentences, strict=True))


class TranslateFolder(FileCorpus):
    """The layout of `tfds.TranslateFolder`: folder/LANG.SPLIT.txt, or .txt.gz.

    A folder of such folders is read as one corpus. Other and hidden files are left out.
    """

    class Params(FileCorpus.Params):
        """Fields of TranslateFolder."""

        folder: str = hyperparams.required("Folder of the files.")

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return os.path.basename(os.path.normpath(self.params.folder))

    def groups(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split; see `FileCorpus.groups`."""
        root = Path(self.params.folder).expanduser()
        splits: dict[str, dict[Path, dict[str, str]]] = {}
        for path in sorted([*root.glob("*.txt*"), *root.glob("[!.]*/*.txt*")]):
            if (name := _FILE_NAME.fullmatch(path.name)) is None:
                continue
            group = splits.setdefault(name["split"], {}).setdefault(path.parent, {})
            if (other := group.setdefault(name["language"], str(path))) != str(path):
                raise errors.InputError(f"{other} and {path} are the same text: remove one")
        if not splits:
            raise errors.InputError(
                f"corpus folder {root} holds no LANG.SPLIT.txt, such as {root / 'en.train.txt'}, "
                "and neither do folders in it. Put the text there, or name another folder: "
                "--translate_folder of prepare, input.preparation.corpora[0].folder of a recipe"
            )
        for split, groups in splits.items():
            for group in groups.values():
                if len(group) < 2:
                    raise errors.InputError(
                        f"{next(iter(group.values()))} has no translation: split {split!r} has no "
                        "other language. Add one, or remove the file"
                    )
        return {split: list(groups.values()) for split, groups in splits.items()}


class Aligned(FileCorpus):
    """Files, plain or gz, in which line i of each is a translation of line i of the others."""

    class Params(FileCorpus.Params):
        """Fields of Aligned."""

        title: str = hyperparams.field("aligned", "Name in manifests.")
        files: dict[str, dict[str, str]] = hyperparams.required("Split → language → path.")

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return self.params.title

    def groups(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split; see `FileCorpus.groups`."""
        for split, group in self.params.files.items():
            if len(group) < 2:
                raise errors.InputError(f"{self.name}: split {split!r} needs two languages or more")
        return {
            split: [{language: os.path.expanduser(path) for language, path in group.items()}]
            for split, group in self.params.files.items()
        }


class TSV(Corpus):
    """Files, plain or gz, whose lines hold a sentence of each language, separated by tabs."""

    class Params(Corpus.Params):
        """Fields of TSV."""

        title: str = hyperparams.field("tsv", "Name in manifests.")
        languages: tuple[str, ...] = hyperparams.required(
            "Language of each column; a column named '' is not read."
        )
        files: dict[str, str] = hyperparams.required("Split → path, or a glob of several.")

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._named = [language for language in params.languages if language]
        if len(self._named) < 2 or len(set(self._named)) < len(self._named):
            raise errors.InputError(
                f"{self.name}: languages={params.languages} must name two different columns or more"
            )

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return self.params.title

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self.params.files)

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        del split
        return all_pairs(self._named)

    def examples(
        self, split: str, pairs: Collection[Languages], faults: Faults
    ) -> Iterator[Example]:
        """Yield the examples of a split; see `Corpus.examples`."""
        del pairs
        languages = self.params.languages
        for path in _matches(self.params.files[split]):
            for number, line in enumerate(lines(path), 1):
                cells = line.split(b"\t")
                if len(cells) != len(languages):
                    what = f"line has {len(cells)} columns, not {len(languages)}"
                    faults.record("columns", f"{path}:{number}", what)
                    continue
                named = zip(languages, cells, strict=True)
                yield f"{path}:{number}", {language: cell for language, cell in named if language}


def _matches(pattern: str) -> list[str]:
    """Return the files that match a glob, sorted; the pattern itself if none does."""
    pattern = os.path.expanduser(pattern)
    return sorted(glob.glob(pattern)) or [pattern]
