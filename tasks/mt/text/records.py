"""Tokenised text on disk: any example can be read by its number, and text is tokenised once.

A folder of records holds `manifest.json`, `vocabulary.model` and for each split `SPLIT.ids` (the
ids of source and target, example after example) and `SPLIT.lengths` (int32 [N, 2]). The examples of
a pair of languages are consecutive. `faults.tsv` lists the faulty text: kind, place, description.
The folder gets its name only when it is complete: see `preparation`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.tasks.mt.text.corpora.corpus import languages_of
from lingvo_gpipe.tasks.mt.text.vocabulary import Vocabulary

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
FAULTS = "faults.tsv"
TARGET_TOKENS = "target_tokens"  # asset of a run: whether its sources begin with <2xx>
_LENGTHS = np.dtype("<i4")
_BLOCK = 8192
_MAX_TEXT_BYTES = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PairSpan:
    """The consecutive examples of a pair of languages in a split.

    Attributes:
        pair: such as `de:en`.
        first: number of its first example.
        count: number of examples.
        source_tokens: number of tokens of all sources, with target tokens, without end tokens.
        target_tokens: number of tokens of all targets, without end tokens.
        longest: tokens of its longest sentence.
        corpora: name → number of examples from it.
        text: names of the files with the text of sources and targets; None in the training split.
    """

    pair: str
    first: int
    count: int
    source_tokens: int
    target_tokens: int
    longest: int
    corpora: Mapping[str, int]
    text: tuple[str, str] | None = None


class SplitWriter:
    """Writes one split, one pair of languages after the other."""

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary: Vocabulary,
        *,
        target_tokens: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Open the files of a split.

        Args:
            folder: folder of the records.
            split: its name.
            vocabulary: that tokenises.
            target_tokens: begin each source with <2xx>, its target language.
            num_threads: threads that tokenise; the files do not depend on it.
        """
        self._vocabulary = vocabulary
        self._target_tokens = target_tokens
        self._num_threads = num_threads
        self._dtype = ids_dtype(len(vocabulary))
        self._ids = open(folder / f"{split}.ids", "wb")  # noqa: SIM115 (closed with this object)
        self._lengths = open(folder / f"{split}.lengths", "wb")  # noqa: SIM115
        self._spans: list[PairSpan] = []

    def add(
        self,
        pair: str,
        sentences: Iterable[tuple[str, str]],
        *,
        corpora: Mapping[str, int],
        text: tuple[str, str] | None = None,
    ) -> PairSpan:
        """Tokenise and write all examples of a pair of languages.

        Args:
            pair: such as `de:en`.
            sentences: sources and targets.
            corpora: name → number of examples from it.
            text: names of the files that hold them as text.
        """
        first = sum(span.count for span in self._spans)
        _, target = languages_of(pair)
        prefix = [self._vocabulary.target_id(target)] if self._target_tokens else []
        count = longest = 0
        tokens = np.zeros(2, np.int64)
        for block in _blocks(sentences):
            texts = [sentence for both in block for sentence in both]
            rows = self._vocabulary.encode(texts, self._num_threads)
            if prefix:
                rows[::2] = [prefix + row for row in rows[::2]]
            lengths = np.fromiter(map(len, rows), _LENGTHS, len(rows)).reshape(-1, 2)
            flat = (number for row in rows for number in row)
            self._ids.write(np.fromiter(flat, self._dtype, int(lengths.sum())).tobytes())
            self._lengths.write(lengths.tobytes())
            count += len(block)
            tokens += lengths.sum(0)
            longest = max(longest, int(lengths.max()))
        span = PairSpan(pair, first, count, int(tokens[0]), int(tokens[1]), longest, corpora, text)
        self._spans.append(span)
        return span

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        self._lengths.close()

    def entry(self) -> dict[str, Any]:
        """Return the split's entry in the manifest."""
        sizes = {"ids_bytes": self._ids.tell(), "lengths_bytes": self._lengths.tell()}
        spans = [dataclasses.asdict(span) for span in self._spans]
        return {"examples": sum(span.count for span in self._spans), **sizes, "pairs": spans}


def _blocks(sentences: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    block: list[tuple[str, str]] = []
    for pair in sentences:
        block.append(pair)
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block


def ids_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the smallest little-endian type that holds all ids of a vocabulary."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


class Split:
    """The examples of a split, by number.

    Attributes:
        name: name of the split.
        lengths: int32 [N, 2], tokens of source and target, without end tokens.
        spans: spans of the pairs of languages, in order.
    """

    def __init__(
        self, folder: Path, name: str, entry: Mapping[str, Any], vocabulary_size: int
    ) -> None:
        """Open the files of a split.

        Args:
            folder: folder of the records.
            name: its name.
            entry: its entry in the manifest.
            vocabulary_size: number of ids that the model has.

        Raises:
            InputError: a file is damaged, or has an id that the vocabulary has not.
        """
        self.name = name
        dtype = ids_dtype(vocabulary_size)
        self.spans = tuple(PairSpan(**span) for span in entry["pairs"])
        self.lengths = _file(folder / f"{name}.lengths", entry["lengths_bytes"], _LENGTHS)
        self.lengths = self.lengths.reshape(-1, 2)
        self._ids = _file(folder / f"{name}.ids", entry["ids_bytes"], dtype)
        self._ends = np.cumsum(self.lengths.sum(1, dtype=np.int64))
        total = int(self._ends[-1]) if len(self._ends) else 0
        if len(self.lengths) != entry["examples"] or total != len(self._ids):
            raise errors.InputError(
                f"{folder / name}.ids holds {len(self._ids)} ids of {len(self.lengths)} examples, "
                f"but the manifest has {total} of {entry['examples']}. {_again(folder)}"
            )
        largest = int(self._ids.max(initial=0))
        if largest >= vocabulary_size or self.lengths.min(initial=0) < 0:
            fault = (
                f"{folder / name}.ids holds the id {largest}, but the vocabulary and the model's "
                f"tables have ids 0 to {vocabulary_size - 1}"
                if largest >= vocabulary_size
                else f"{folder / name}.lengths holds a negative length"
            )
            raise errors.InputError(f"{fault}. {_again(folder)}")

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[Array, Array]:
        """Return the ids of source and target, without end tokens."""
        source, target = (int(length) for length in self.lengths[number])
        last = int(self._ends[number])
        return self._ids[last - source - target : last - target], self._ids[last - target : last]


def _file(path: Path, size: int, dtype: np.dtype[Any]) -> Array:
    """Memory-map a file that must have `size` bytes."""
    try:
        actual = regular_files.size_of(path)
    except OSError as error:
        raise errors.InputError(
            f"{path} cannot be read: {error.strerror}. {_again(path.parent)}"
        ) from error
    if actual != size:
        raise errors.InputError(
            f"{path} has {actual} bytes, not {size} as the manifest says. {_again(path.parent)}"
        )
    # A plain array over the map, because slices of a `memmap` are slow to create.
    return np.asarray(np.memmap(path, dtype, "r")) if size else np.zeros(0, dtype)


def _lines(path: Path, count: int) -> list[str]:
    """Read a text that must have `count` lines."""
    try:
        lines = regular_files.read_text(path, _MAX_TEXT_BYTES).split("\n")[:-1]
    except OSError as error:
        raise errors.InputError(
            f"{path} cannot be read: {error.strerror}. {_again(path.parents[1])}"
        ) from error
    if len(lines) != count:
        raise errors.InputError(
            f"{path} has {len(lines)} lines, not {count} as the manifest says. "
            f"{_again(path.parents[1])}"
        )
    return lines


def _again(folder: Path) -> str:
    return f"Remove {folder} and prepare it again"


_KINDS: Mapping[str, type] = {
    "pairs": list,
    "target_tokens": bool,
    "vocabulary": dict,
    "splits": dict,
}
_SIZES = ("examples", "ids_bytes", "lengths_bytes")
_COUNTS = ("first", "count", "source_tokens", "target_tokens", "longest")


def _fault_of(manifest: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content of a manifest; None: all that is read has its type."""
    for name, kind in _KINDS.items():
        if not isinstance(manifest.get(name), kind):
            return f"{name!r} is not a {kind.__name__}"
    vocabulary = manifest["vocabulary"]
    if not isinstance(vocabulary.get("hash"), str) or not _is_count(vocabulary.get("size")):
        return "'vocabulary' has no hash and size"
    faults = (
        _fault_of_split(name, entry, manifest["pairs"])
        for name, entry in manifest["splits"].items()
    )
    return next(filter(None, faults), None)


def _fault_of_split(name: str, entry: Any, pairs: list[str]) -> str | None:
    """Return what is wrong with a split's entry in the manifest; None: nothing."""
    if not isinstance(entry, dict) or not all(_is_count(entry.get(size)) for size in _SIZES):
        return f"split {name!r} has no {', '.join(_SIZES)}"
    try:
        spans = [PairSpan(**span) for span in entry["pairs"]]
    except (KeyError, TypeError):
        return f"the pairs of split {name!r} are incomplete"
    first = 0
    for span in spans:
        if span.pair not in pairs:
            return f"split {name!r} has the pair {span.pair!r}, which is not in 'pairs'"
        if not all(_is_count(getattr(span, count)) for count in _COUNTS) or span.first != first:
            return f"the numbers of pair {span.pair!r} in split {name!r} do not fit"
        first += span.count
    if first != entry["examples"]:
        return f"the pairs of split {name!r} have {first} of {entry['examples']} examples"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


class Records:
    """A complete folder of records.

    Attributes:
        folder: folder of the files.
        manifest: content of `manifest.json`.
        vocabulary: with which the text was tokenised.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a folder.

        Raises:
            InputError: it holds no records, or not the vocabulary that they were made with.
        """
        self.folder = Path(folder)
        try:
            content = regular_files.read(self.folder / MANIFEST)
            self.manifest = json.loads(content.decode(errors="surrogateescape"))
        except OSError as error:
            way = f"python -m lingvo_gpipe.tasks.mt.prepare --output={folder}"
            if any(self.folder.glob("*.*.txt")):  # text as for tfds.TranslateFolder
                way = f"{way}_records --translate_folder={folder}"
            raise errors.InputError(
                f"{folder} holds no prepared text ({MANIFEST}: {error.strerror}). Make it with "
                f"{way}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise errors.InputError(
                f"{self.folder / MANIFEST} is damaged: {error}. {_again(self.folder)}"
            ) from error
        if not isinstance(self.manifest, dict) or self.manifest.get("format") != FORMAT:
            raise errors.InputError(
                f"{self.folder / MANIFEST} is not of format {FORMAT}. {_again(self.folder)}"
            )
        fault = _fault_of(self.manifest)
        if fault is not None:
            raise errors.InputError(
                f"{self.folder / MANIFEST} is damaged: {fault}. {_again(self.folder)}"
            )
        self.vocabulary = Vocabulary.load(self.folder / VOCABULARY)
        self.check_vocabulary(self.vocabulary.hash)
        size = self.manifest["vocabulary"]["size"]
        if size != len(self.vocabulary):
            raise errors.InputError(
                f"{self.folder / MANIFEST} was written for a vocabulary of {size} ids, but "
                f"{VOCABULARY} has {len(self.vocabulary)}. {_again(self.folder)}"
            )

    @property
    def vocabulary_hash(self) -> str:
        """Hash of the vocabulary that the records were made with."""
        return str(self.manifest["vocabulary"]["hash"])

    def check_vocabulary(self, wanted: str) -> None:
        """Refuse a vocabulary that the records were not made with.

        Args:
            wanted: hash of a vocabulary.

        Raises:
            InputError: the records have another hash.
        """
        if wanted != self.vocabulary_hash:
            raise errors.InputError(
                f"records in {self.folder} were made with vocabulary {self.vocabulary_hash[:12]}…, "
                f"not with {wanted[:12]}…. Prepare them again with --vocabulary_file, or use "
                "another --data_dir"
            )

    @property
    def pairs(self) -> tuple[str, ...]:
        """Pairs of languages, in the order of their indices."""
        return tuple(self.manifest["pairs"])

    @property
    def target_tokens(self) -> bool:
        """Whether sources begin with <2xx>."""
        return bool(self.manifest["target_tokens"])

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.manifest["splits"])

    def check_split(self, name: str) -> None:
        """Refuse a name that no split has.

        Raises:
            InputError: names those that there are, and the fields that choose one.
        """
        if name not in self.manifest["splits"]:
            raise errors.InputError(
                f"{self.folder} has no split {name!r}; there are {', '.join(self.splits)}. Prepare "
                f"it from files of its own, --aligned=LANG,LANG:{name}=FILE,FILE, or name another "
                "by --params_override=eval.split=NAME, or score.split, or input.train_split"
            )

    @functools.cache  # noqa: B019 (records live as long as their run)
    def split(self, name: str) -> Split:
        """Return a split.

        Raises:
            InputError: no split has this name, or its files are damaged.
        """
        self.check_split(name)
        return Split(self.folder, name, self.manifest["splits"][name], len(self.vocabulary))

    def check_files(self) -> None:
        """Refuse damaged files of any split.

        Raises:
            InputError: names the first.
        """
        for name in self.splits:
            self.split(name)

    def text(self, split: str, pair: str) -> tuple[list[str], list[str]]:
        """Return the text of sources and targets; that of the training split is not stored.

        Raises:
            InputError: the split or the pair has no text.
        """
        for span in self.split(split).spans:
            if span.pair == pair and span.text is not None:
                source, target = (_lines(self.folder / name, span.count) for name in span.text)
                return source, target
        raise errors.InputError(f"{self.folder} has no text of pair {pair!r} in split {split!r}")
