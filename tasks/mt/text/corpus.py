"""Parallel text as it lies on disk: pairs of sentences, read one by one, faults named and counted.

A corpus has splits, each with some languages, and gives the sentences of two of them side by side.
Lines end at line feeds alone: the other characters at which Python's `str.splitlines` cuts are
inside a sentence, where they are a fault. Text is UTF-8; a name that ends in `.gz` is unpacked.

Several pairs of languages are read in one pass where each line or example holds them all. A pair is
written `de:en`, source first, since codes such as `zh-Hans` have hyphens.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import glob
import gzip
import itertools
import os
import re
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal

from absl import logging

from lingvo_gpipe import errors, hyperparams

_BOM = b"\xef\xbb\xbf"
# Where `str.splitlines` cuts a line (a line feed stands in no line of a file, but may in what a
# dataset gives); NUL ends strings in other tools.
_SEPARATOR = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029\x00]")
# What a split or language may be called: it names files.
_NAME = re.compile(r"(?!\.)[\w.-]+")
_KEPT_EXAMPLES = 5
_UNSEEN = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
_FILE = re.compile(r"(?P<language>[^.]+)\.(?P<split>[^.]+)\.txt(\.gz)?")

Fate = Literal["skip", "fail"]
Languages = tuple[str, str]  # of sources and targets


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences that mean the same, and where they were read."""

    source: str
    target: str
    where: str


class Policy(hyperparams.Params):
    """What becomes of faulty text: `skip` leaves the pair out and counts it, `fail` ends the run.

    A mark at the beginning of a file and a carriage return at the end of a line are taken off and
    counted, where they do not end the run; their sentences stay.
    """

    misaligned: Fate = hyperparams.field(
        "fail",
        "Files of one split have unequal numbers of lines; skipped whole, as nobody knows "
        "where the shift begins.",
    )
    columns: Fate = hyperparams.field("skip", "A line of a TSV file has other columns than told.")
    encoding: Fate = hyperparams.field("skip", "A line is not UTF-8.")
    separator: Fate = hyperparams.field(
        "skip",
        "A sentence holds U+2028, U+2029, U+0085, \\n, \\r, \\v, \\f, \\x1c to \\x1e or NUL.",
    )
    empty: Fate = hyperparams.field(
        "skip", "A side has no text, or none that the vocabulary's normaliser leaves."
    )
    bom: Fate = hyperparams.field("skip", "A file begins with a byte order mark.")
    carriage_return: Fate = hyperparams.field("skip", "A line ends in \\r\\n.")
    max_characters: int | None = hyperparams.field(
        1000, "Training pairs with a longer side are left out and counted; None: no bound."
    )
    max_ratio: float | None = hyperparams.field(
        None,
        "Training pairs of which one side has more than so many times the characters of the "
        "other are left out and counted; None: no bound.",
    )
    filtered_splits: tuple[str, ...] = hyperparams.field(
        ("train",),
        "Splits that both bounds hold for, `train` being whichever is trained on; the others "
        "keep all.",
    )


class Faults:
    """Counts what is wrong with a corpus, as its policy says; the first of each kind by place.

    Attributes:
        counts: kind → pairs (files, for `misaligned`) so far.
        examples: kind → the first places and what is wrong there.
    """

    def __init__(
        self,
        policy: Policy,
        train_split: str = "train",
        tell: Callable[[str, str, str], None] | None = None,
        *,
        normalise: Callable[[str], str] = str,
        shown: Callable[[Iterable[bytes]], Iterable[bytes]] = iter,
    ) -> None:
        """Begin without any.

        Args:
            policy: of the corpus.
            train_split: the one that is trained on.
            tell: called for every fault, with its kind, its place and what is wrong there; None:
                nothing is.
            normalise: what the vocabulary makes of a sentence; one of which nothing is left is
                empty.
            shown: gives the lines that it is given, which are only counted, and shows how far
                that is.
        """
        self.policy = policy
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, list[str]] = {}
        self._train_split = train_split
        self._tell = tell
        self._normalise = normalise
        self.shown = shown
        self._of_pair: set[str] | None = None

    def found(self, kind: str, where: str, what: str) -> None:
        """Take note of a fault.

        Raises:
            InputError: the policy says that it ends the run.
        """
        if getattr(self.policy, kind, "skip") == "fail":
            raise errors.InputError(
                f"{where}: {what}. Mend it, or leave such pairs out by policy.{kind}=skip"
            )
        if self._tell is not None:
            self._tell(kind, where, what)
        if self._of_pair is not None:
            if kind in self._of_pair:
                return  # the other side of the pair was counted
            self._of_pair.add(kind)
        self.counts[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < _KEPT_EXAMPLES:
            kept.append(f"{where}: {what}")

    def add(self, other: Faults) -> None:
        """Take what another one counted, after one's own."""
        self.counts.update(other.counts)
        for kind, found in other.examples.items():
            kept = self.examples.setdefault(kind, [])
            kept.extend(found[: _KEPT_EXAMPLES - len(kept)])

    def texts(self, sides: Sequence[bytes | str], places: Sequence[str]) -> tuple[str, str] | None:
        """Return both sides of a pair as text; None: the pair is faulty, which was counted.

        Args:
            sides: of the pair, bytes of a line or what a dataset gives.
            places: where each was read.
        """
        self._of_pair = set()
        one, other = (
            self.sentence(side, where) if isinstance(side, str) else self._text(side, where)
            for side, where in zip(sides, places, strict=True)
        )
        self._of_pair = None
        return None if one is None or other is None else (one, other)

    def _text(self, raw: bytes, where: str) -> str | None:
        """Return one side of a pair as text; None: it is faulty, which was counted."""
        if raw.endswith(b"\r"):
            self.found("carriage_return", where, "line ends in a carriage return")
            raw = raw[:-1]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.found("encoding", where, f"byte {error.start + 1} of the line is not UTF-8")
            return None
        return self.sentence(text, where)

    def sentence(self, text: str, where: str) -> str | None:
        """Return one side of a pair; None: it is faulty, which was counted."""
        if (cut := _SEPARATOR.search(text)) is not None:
            place = f"U+{ord(cut[0]):04X} at character {cut.start() + 1}"
            self.found("separator", where, f"{place} would end the line elsewhere")
            return None
        if not is_text(text) or not self._normalise(text):
            self.found("empty", where, "side is empty")
            return None
        return text

    def fits(self, pair: Pair, split: str) -> bool:
        """Tell whether a pair keeps the policy's bounds of length; if not, it was counted."""
        policy = self.policy
        if ("train" if split == self._train_split else split) not in policy.filtered_splits:
            return True
        short, long = sorted((len(pair.source), len(pair.target)))
        if policy.max_characters is not None and long > policy.max_characters:
            self.found("long", pair.where, f"{long} characters, over {policy.max_characters}")
            return False
        if policy.max_ratio is not None and long > policy.max_ratio * short:
            self.found("ratio", pair.where, f"{short} against {long} characters")
            return False
        return True


def is_text(text: str) -> bool:
    """Tell whether any character of a text is seen: no space, format or control character."""
    return any(unicodedata.category(character) not in _UNSEEN for character in text)


class Corpus(hyperparams.Configurable, abc.ABC):
    """Base of corpora: sentences of several languages side by side, in splits."""

    class Params(hyperparams.Configurable.Params):
        """Fields that every corpus has."""

        policy: Policy = hyperparams.field(Policy(), "What becomes of faulty text.")

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What it is called in manifests and messages."""

    @abc.abstractmethod
    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each both ways round."""

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""

    @abc.abstractmethod
    def sides(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, Pair]]:
        """Yield the pairs of sentences of a split that are whole; the others are counted."""

    def files(self) -> Iterable[str]:
        """Return the paths of its text; none where it is no file of the user's.

        Raises:
            InputError: they are no corpus.
        """
        return ()

    def check_names(self) -> None:
        """Refuse names of splits and languages that cannot be part of a file's name.

        Raises:
            InputError: names the first.
        """
        for split in self.splits:
            languages = sorted({name for pair in self.pairs(split) for name in pair})
            for what, name in (("split", split), *(("language", name) for name in languages)):
                if not _NAME.fullmatch(name):
                    raise errors.InputError(
                        f"{self.name}: {what} {name!r} can name no file. Call it by letters, "
                        "digits, '-', '_' and '.', the last not first"
                    )

    def read(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, Pair]]:
        """Yield the pairs of sentences of a split that are whole and keep the bounds of length.

        Those of two languages come in their order, among those of others.

        Args:
            split: one of `splits`.
            wanted: languages, as in `pairs` → what counts their faults.

        Raises:
            InputError: a file cannot be read, or has a fault that the policy does not bear.
        """
        for languages, pair in self.sides(split, wanted):
            if wanted[languages].fits(pair, split):
                yield languages, pair


def lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, plain or gz, without their line feeds.

    Raises:
        InputError: it cannot be read to its end; names the line.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007 (told when reading fails)
                yield line[:-1] if line.endswith(b"\n") else line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        after = f" after line {number}" if number else ""
        raise errors.InputError(
            f"{path} cannot be read{after}: {reason}. Give another file, or copy it anew"
        ) from error


def _open(path: str) -> BinaryIO:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _without_bom(path: str, every: Collection[Faults]) -> Iterator[bytes]:
    for number, raw in enumerate(lines(path)):
        if number == 0 and raw.startswith(_BOM):
            for faults in every:
                faults.found("bom", f"{path}:1", "file begins with a byte order mark")
            yield raw[len(_BOM) :]
        else:
            yield raw


def _both(languages: Sequence[str]) -> frozenset[tuple[str, str]]:
    return frozenset((one, other) for one in languages for other in languages if one != other)


class Files(Corpus):
    """Base of corpora that are text files, a sentence a line; subclasses tell which."""

    class Params(Corpus.Params):
        """Fields of Files."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._counts: dict[str, int] = {}  # path → lines

    @abc.abstractmethod
    def paths(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """Return split → groups of files whose lines belong together, language → path."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self._paths)

    @functools.cached_property
    def _paths(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        return self.paths()

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each both ways round."""
        return frozenset[tuple[str, str]]().union(
            *(_both(tuple(group)) for group in self._paths.get(split, ()))
        )

    def files(self) -> Iterable[str]:
        """Return the paths of its text; see `Corpus.files`."""
        groups = itertools.chain.from_iterable(self._paths.values())
        return [path for group in groups for path in group.values()]

    def sides(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, Pair]]:
        """Yield the pairs of sentences of a split; see `Corpus.sides`."""
        for languages, faults in wanted.items():
            for group in self._paths.get(split, ()):
                if group.keys() >= set(languages):
                    source, target = (group[language] for language in languages)
                    for pair in self._aligned(source, target, faults):
                        yield languages, pair

    def _aligned(self, source: str, target: str, faults: Faults) -> Iterator[Pair]:
        counts = []
        for path in (source, target):
            if path not in self._counts:  # one side may be aligned with many others
                self._counts[path] = sum(1 for _ in faults.shown(lines(path)))
            counts.append(self._counts[path])
        if counts[0] != counts[1]:
            what = f"has {counts[0]} lines, but {target} has {counts[1]}"
            faults.found("misaligned", source, what)
            return
        files = [_without_bom(path, (faults,)) for path in (source, target)]
        for number, sides in enumerate(zip(*files, strict=True), 1):
            places = [f"{path}:{number}" for path in (source, target)]
            texts = faults.texts(sides, places)
            if texts is not None:
                yield Pair(*texts, places[0])


class TranslateFolder(Files):
    """The layout of `tfds.TranslateFolder`: folder/LANG.SPLIT.txt, or .txt.gz.

    Other files are left out and told. A folder of such folders is taken whole. What is hidden (its
    name begins with a dot) is left out.
    """

    class Params(Files.Params):
        """Fields of TranslateFolder."""

        folder: str = hyperparams.required("Folder of the files.")

    @property
    def name(self) -> str:
        """What it is called in manifests and messages."""
        return os.path.basename(os.path.normpath(self.params.folder))

    def paths(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """Return split → groups of files; see `Files.paths`."""
        root = os.path.expanduser(self.params.folder)
        if not os.path.isdir(root):
            what = "is not a folder" if os.path.exists(root) else "does not exist"
            raise errors.InputError(f"corpus folder {root} {what}. Give another")
        folders = [root, *_listed(root)[0]]
        splits: dict[str, list[dict[str, str]]] = {}
        for folder in folders:
            for split, group in self._group(folder).items():
                splits.setdefault(split, []).append(group)
        if not splits:
            raise errors.InputError(
                f"corpus folder {root} holds no LANG.SPLIT.txt, such as "
                f"{os.path.join(root, 'en.train.txt')}, neither do the folders in it"
            )
        return splits

    def _group(self, folder: str) -> dict[str, dict[str, str]]:
        """Return split → language → path of one folder."""
        splits: dict[str, dict[str, str]] = {}
        for path in _listed(folder)[1]:
            named = _FILE.fullmatch(os.path.basename(path))
            if named is None:
                logging.warning("%s is left out: it is not named LANG.SPLIT.txt", path)
                continue
            group = splits.setdefault(named["split"], {})
            if (other := group.setdefault(named["language"], path)) != path:
                raise errors.InputError(f"{other} and {path} are the same text: remove one")
        for split, group in splits.items():
            if len(group) < 2:
                raise errors.InputError(
                    f"{next(iter(group.values()))} stands alone: split {split!r} has no other "
                    "language. Add its translation, or remove it"
                )
        return splits


def _listed(folder: str) -> tuple[list[str], list[str]]:
    """Return the folders and the other files in a folder, sorted, hidden ones left out.

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
            f"corpus folder {folder} cannot be read: {error.strerror}. Make it readable, or give "
            "another"
        ) from error
    return sorted(folders), sorted(files)


class Aligned(Files):
    """Plain files, plain or gz, line i of each a translation of line i of the others."""

    class Params(Files.Params):
        """Fields of Aligned."""

        title: str = hyperparams.field("aligned", "What it is called in manifests.")
        files: dict[str, dict[str, str]] = hyperparams.required("Split → language → path.")

    @property
    def name(self) -> str:
        """What it is called in manifests and messages."""
        return self.params.title

    def paths(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """Return split → groups of files; see `Files.paths`."""
        for split, group in self.params.files.items():
            if len(group) < 2:
                raise errors.InputError(f"{self.name}: split {split!r} needs two languages or more")
        return {
            split: [{language: os.path.expanduser(path) for language, path in group.items()}]
            for split, group in self.params.files.items()
        }


class TSV(Corpus):
    """Files, plain or gz, with a sentence of each language on a line, between tabs."""

    class Params(Corpus.Params):
        """Fields of TSV."""

        title: str = hyperparams.field("tsv", "What it is called in manifests.")
        languages: tuple[str, ...] = hyperparams.required(
            "Language of each column; one that is named '' is not read."
        )
        files: dict[str, str] = hyperparams.required("Split → path, or a glob of several.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        named = [language for language in params.languages if language]
        if len(named) < 2 or len(set(named)) < len(named):
            raise errors.InputError(
                f"{self.name}: languages={params.languages} must name two different columns or more"
            )

    @property
    def name(self) -> str:
        """What it is called in manifests and messages."""
        return self.params.title

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self.params.files)

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each both ways round."""
        del split
        return _both([language for language in self.params.languages if language])

    def files(self) -> Iterable[str]:
        """Return the paths of its text; see `Corpus.files`."""
        return [path for pattern in self.params.files.values() for path in _matches(pattern)]

    def sides(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, Pair]]:
        """Yield the pairs of sentences of a split; see `Corpus.sides`."""
        count = len(self.params.languages)
        columns = {both: [*map(self.params.languages.index, both)] for both in wanted}
        for path in _matches(self.params.files[split]):
            for number, line in enumerate(_without_bom(path, wanted.values()), 1):
                where = f"{path}:{number}"
                cells = line.removesuffix(b"\r").split(b"\t")
                for languages, faults in wanted.items():
                    if line.endswith(b"\r"):
                        faults.found("carriage_return", where, "line ends in a carriage return")
                    if len(cells) != count:
                        faults.found(
                            "columns", where, f"line has {len(cells)} columns, not {count}"
                        )
                        continue
                    sides = [cells[column] for column in columns[languages]]
                    texts = faults.texts(sides, (where, where))
                    if texts is not None:
                        yield languages, Pair(*texts, where)


def _matches(pattern: str) -> list[str]:
    """Return the files that a glob names, sorted; itself where there is none."""
    pattern = os.path.expanduser(pattern)
    return sorted(glob.glob(pattern)) or [pattern]
