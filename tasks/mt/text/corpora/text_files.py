"""Corpora in text files: folders of `LANG.SPLIT.txt`, aligned files, tables with tabs.

A file whose name ends in `.gz` is decompressed.
"""

from __future__ import annotations

import abc
import errno
import functools
import glob
import gzip
import itertools
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeAlias, cast

from absl import logging

from lingvo_gpipe import errors, hyperparams, regular_files
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages, all_pairs
from lingvo_gpipe.tasks.mt.text.corpora.faults import Faults, SentencePair

AlignedFiles: TypeAlias = Mapping[str, str]  # language → path, line i of each a translation

_MAX_LINE_BYTES = 2**24
_BOM = b"\xef\xbb\xbf"
_FILE_NAME = re.compile(r"(?P<language>[^.]+)\.(?P<split>[^.]+)\.txt(\.gz)?")


def lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, plain or gz, without their line feeds.

    Raises:
        InputError: it is not a regular file, or cannot be read to its end; names the line.
    """
    number = 0
    try:
        regular_files.size_of(path)
        with _open(path) as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(line) > _MAX_LINE_BYTES:
                    reason = f"the next line has more than {_MAX_LINE_BYTES:,} bytes"
                    raise OSError(errno.EFBIG, reason, path)
                number += 1
                yield line[:-1] if line.endswith(b"\n") else line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        after = f" after line {number}" if number else ""
        raise errors.InputError(
            f"{path} cannot be read{after}: {reason}. Use another file, or copy it again"
        ) from error


def _open(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.endswith(".gz") else open(path, "rb")


def _without_bom(path: str, counters: Collection[Faults]) -> Iterator[bytes]:
    for number, raw in enumerate(lines(path)):
        if number == 0 and raw.startswith(_BOM):
            for faults in counters:
                faults.record("bom", f"{path}:1", "file begins with a byte order mark")
            yield raw[len(_BOM) :]
        else:
            yield raw


class FileCorpus(Corpus):
    """Base of corpora of text files with a sentence a line; subclasses implement `paths`."""

    class Params(Corpus.Params):
        """Fields of FileCorpus."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._line_counts: dict[str, int] = {}  # by path

    @abc.abstractmethod
    def paths(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self._paths)

    @functools.cached_property
    def _paths(self) -> Mapping[str, Sequence[AlignedFiles]]:
        return self.paths()

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        groups = self._paths.get(split, ())
        return frozenset[Languages]().union(*(all_pairs(tuple(group)) for group in groups))

    def files(self) -> Iterable[str]:
        """Return the paths of its text; see `Corpus.files`."""
        groups = itertools.chain.from_iterable(self._paths.values())
        return [path for group in groups for path in group.values()]

    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split; see `Corpus.sentence_pairs`."""
        for languages, faults in wanted.items():
            for group in self._paths.get(split, ()):
                if group.keys() >= set(languages):
                    source, target = (group[language] for language in languages)
                    for pair in self._aligned(source, target, faults):
                        yield languages, pair

    def _aligned(self, source: str, target: str, faults: Faults) -> Iterator[SentencePair]:
        counts = []
        for path in (source, target):
            if path not in self._line_counts:  # a file may be aligned with several others
                self._line_counts[path] = sum(1 for _ in faults.progress(lines(path)))
            counts.append(self._line_counts[path])
        if counts[0] != counts[1]:
            what = f"has {counts[0]} lines, but {target} has {counts[1]}"
            faults.record("misaligned", source, what)
            return
        files = [_without_bom(path, (faults,)) for path in (source, target)]
        for number, sentences in enumerate(zip(*files, strict=True), 1):
            places = [f"{path}:{number}" for path in (source, target)]
            texts = faults.texts(sentences, places)
            if texts is not None:
                yield SentencePair(*texts, places[0])


class TranslateFolder(FileCorpus):
    """The layout of `tfds.TranslateFolder`: folder/LANG.SPLIT.txt, or .txt.gz.

    A folder of such folders is read as one corpus. Files with other names are skipped with a
    warning, hidden files (whose names begin with a dot) without one.
    """

    class Params(FileCorpus.Params):
        """Fields of TranslateFolder."""

        folder: str = hyperparams.required("Folder of the files.")

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return os.path.basename(os.path.normpath(self.params.folder))

    def paths(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split; see `FileCorpus.paths`."""
        root = os.path.expanduser(self.params.folder)
        if not os.path.isdir(root):
            what = "is not a folder" if os.path.exists(root) else "does not exist"
            raise errors.InputError(
                f"corpus folder {root} {what}. Put the text there, or name its folder: "
                "--translate_folder of prepare, input.preparation.corpora[0].folder of a recipe"
            )
        folders = [root, *_listed(root)[0]]
        splits: dict[str, list[AlignedFiles]] = {}
        for folder in folders:
            for split, group in self._splits_of(folder).items():
                splits.setdefault(split, []).append(group)
        if not splits:
            raise errors.InputError(
                f"corpus folder {root} holds no LANG.SPLIT.txt, such as "
                f"{os.path.join(root, 'en.train.txt')}, and neither do the folders in it"
            )
        return splits

    def _splits_of(self, folder: str) -> dict[str, dict[str, str]]:
        """Return split → language → path of one folder."""
        splits: dict[str, dict[str, str]] = {}
        for path in _listed(folder)[1]:
            name = _FILE_NAME.fullmatch(os.path.basename(path))
            if name is None:
                logging.warning("%s is left out: it is not named LANG.SPLIT.txt", path)
                continue
            group = splits.setdefault(name["split"], {})
            if (other := group.setdefault(name["language"], path)) != path:
                raise errors.InputError(f"{other} and {path} are the same text: remove one")
        for split, group in splits.items():
            if len(group) < 2:
                raise errors.InputError(
                    f"{next(iter(group.values()))} has no translation: split {split!r} has no "
                    "other language. Add one, or remove the file"
                )
        return splits


def _listed(folder: str) -> tuple[list[str], list[str]]:
    """Return the folders and the other files in a folder, sorted, without hidden ones.

    Raises:
        InputError: it cannot be read.
    """
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files).append(entry.path)
    except OSError as error:
        raise errors.InputError(
            f"corpus folder {folder} cannot be read: {error.strerror}. Make it readable, or use "
            "another"
        ) from error
    return sorted(folders), sorted(files)


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

    def paths(self) -> Mapping[str, Sequence[AlignedFiles]]:
        """Return the groups of aligned files of each split; see `FileCorpus.paths`."""
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
        named = [language for language in params.languages if language]
        if len(named) < 2 or len(set(named)) < len(named):
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
        return all_pairs([language for language in self.params.languages if language])

    def files(self) -> Iterable[str]:
        """Return the paths of its text; see `Corpus.files`."""
        return [path for pattern in self.params.files.values() for path in _matches(pattern)]

    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split; see `Corpus.sentence_pairs`."""
        count = len(self.params.languages)
        columns = {both: [*map(self.params.languages.index, both)] for both in wanted}
        for path in _matches(self.params.files[split]):
            for number, line in enumerate(_without_bom(path, wanted.values()), 1):
                where = f"{path}:{number}"
                cells = line.removesuffix(b"\r").split(b"\t")
                for languages, faults in wanted.items():
                    if line.endswith(b"\r"):
                        faults.record("carriage_return", where, "line ends in a carriage return")
                    if len(cells) != count:
                        what = f"line has {len(cells)} columns, not {count}"
                        faults.record("columns", where, what)
                        continue
                    sentences = [cells[column] for column in columns[languages]]
                    texts = faults.texts(sentences, (where, where))
                    if texts is not None:
                        yield languages, SentencePair(*texts, where)


def _matches(pattern: str) -> list[str]:
    """Return the files that match a glob, sorted; the pattern itself if none does."""
    pattern = os.path.expanduser(pattern)
    return sorted(glob.glob(pattern)) or [pattern]
