"""Tokenised text on disk: any example is read by its number, and no text is tokenised twice.

A folder of records holds `manifest.json`, `vocabulary.model` and for each split `SPLIT.ids` (the
ids of source and target, example after example) and `SPLIT.lengths` (int32 [N, 2]). Examples of a
pair of languages stand together. What was faulty stands in `faults.tsv`: kind, place,
what is wrong. The folder appears under its name when it is whole: see `preparation`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import vocabulary

Array = np.ndarray[Any, Any]

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
FAULTS = "faults.tsv"
TARGET_TOKENS = "target_tokens"  # of a run: whether its sources begin with <2xx>
_LENGTHS = np.dtype("<i4")
_BLOCK = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Where the examples of a pair of languages stand in a split.

    Attributes:
        pair: such as `de:en`.
        first: number of its first example.
        count: how many.
        source_tokens: in all of them, target token included, end marks not.
        target_tokens: the same of the targets.
        longest: tokens of its longest side.
        corpora: name → examples from it.
        text: names of the files with sources and targets as they were; None for those trained on.
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
    """Writes one split, pair after pair."""

    def __init__(self, folder: Path, split: str, vocabulary: vocabulary.Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._dtype = ids_dtype(len(vocabulary))
        self._ids = open(folder / f"{split}.ids", "wb")  # noqa: SIM115 (closed with this object)
        self._lengths = open(folder / f"{split}.lengths", "wb")  # noqa: SIM115
        self._spans: list[Span] = []

    def add(
        self,
        pair: str,
        sentences: Iterable[tuple[str, str]],
        *,
        corpora: Mapping[str, int],
        target_token: bool = False,
        text: tuple[str, str] | None = None,
        num_threads: int = 1,
    ) -> Span:
        """Tokenise and write all examples of a pair of languages.

        Args:
            pair: such as `de:en`.
            sentences: sources and targets.
            corpora: name → how many are from it.
            target_token: puts <2en> before each source.
            text: names of files that hold them as text.
            num_threads: that tokenise; what is written does not depend on it.
        """
        first = sum(span.count for span in self._spans)
        prefix = [self._vocabulary.target_id(pair.partition(":")[2])] if target_token else []
        count = longest = 0
        tokens = np.zeros(2, np.int64)
        for block in _blocks(sentences):
            texts = [sentence for both in block for sentence in both]
            rows = self._vocabulary.encode(texts, num_threads)
            if prefix:
                rows[::2] = [prefix + row for row in rows[::2]]
            lengths = np.fromiter(map(len, rows), _LENGTHS, len(rows)).reshape(-1, 2)
            flat = (number for row in rows for number in row)
            self._ids.write(np.fromiter(flat, self._dtype, int(lengths.sum())).tobytes())
            self._lengths.write(lengths.tobytes())
            count += len(block)
            tokens += lengths.sum(0)
            longest = max(longest, int(lengths.max()))
        span = Span(pair, first, count, int(tokens[0]), int(tokens[1]), longest, corpora, text)
        self._spans.append(span)
        return span

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        self._lengths.close()

    def entry(self) -> dict[str, Any]:
        """Return what the manifest says of the split."""
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
        lengths: int32 [N, 2], tokens of source and target, end marks not counted.
        spans: of the pairs of languages, in order.
    """

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any], dtype: Any) -> None:
        self.name = name
        self.spans = tuple(Span(**span) for span in entry["pairs"])
        self.lengths = _file(folder / f"{name}.lengths", entry["lengths_bytes"], _LENGTHS)
        self.lengths = self.lengths.reshape(-1, 2)
        self._ids = _file(folder / f"{name}.ids", entry["ids_bytes"], np.dtype(dtype))
        self._ends = np.cumsum(self.lengths.sum(1, dtype=np.int64))
        total = int(self._ends[-1]) if len(self._ends) else 0
        if len(self.lengths) != entry["examples"] or total != len(self._ids):
            raise errors.InputError(
                f"{folder / name}.ids holds {len(self._ids)} ids of {len(self.lengths)} examples, "
                f"but {total} of {entry['examples']} are told. {_anew(folder)}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[Array, Array]:
        """Return the ids of source and target, without end marks."""
        source, target = (int(length) for length in self.lengths[number])
        last = int(self._ends[number])
        return self._ids[last - source - target : last - target], self._ids[last - target : last]


def _file(path: Path, size: int, dtype: np.dtype[Any]) -> Array:
    """Map a file that must have `size` bytes."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise errors.InputError(
            f"{path} cannot be read: {error.strerror}. {_anew(path.parent)}"
        ) from error
    if found != size:
        raise errors.InputError(
            f"{path} has {found} bytes, not {size} as the manifest says. {_anew(path.parent)}"
        )
    # A plain array over the map: each slice of a `memmap` would be another object in Python.
    return np.asarray(np.memmap(path, dtype, "r")) if size else np.zeros(0, dtype)


def _lines(path: Path, count: int) -> list[str]:
    """Read a text that must have `count` lines."""
    try:
        lines = path.read_bytes().decode().split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.InputError(
            f"{path} cannot be read: {reason}. {_anew(path.parents[1])}"
        ) from error
    if len(lines) != count:
        raise errors.InputError(
            f"{path} has {len(lines)} lines, not {count} as the manifest says. "
            f"{_anew(path.parents[1])}"
        )
    return lines


def _anew(folder: Path) -> str:
    return f"Remove {folder} and prepare it again"


class Records:
    """A whole folder of records.

    Attributes:
        folder: where.
        manifest: content of `manifest.json`.
        vocabulary: that the text was tokenised with.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a folder.

        Raises:
            InputError: it is none, or holds another vocabulary than its records were made with.
        """
        self.folder = Path(folder)
        try:
            self.manifest = json.loads(
                (self.folder / MANIFEST).read_bytes().decode(errors="surrogateescape")
            )
        except OSError as error:
            raise errors.InputError(
                f"{folder} holds no prepared text ({MANIFEST}: {error.strerror}). Make it with "
                f"python -m lingvo_gpipe.tasks.mt.prepare --output={folder}"
            ) from error
        except ValueError as error:
            raise errors.InputError(
                f"{self.folder / MANIFEST} is torn: {error}. {_anew(self.folder)}"
            ) from error
        if not isinstance(self.manifest, dict) or self.manifest.get("format") != FORMAT:
            raise errors.InputError(
                f"{self.folder / MANIFEST} is not of format {FORMAT}. {_anew(self.folder)}"
            )
        self.vocabulary = vocabulary.Vocabulary.load(self.folder / VOCABULARY)
        self.check_vocabulary(self.vocabulary.hash)

    @property
    def vocabulary_hash(self) -> str:
        """Of the vocabulary that the records were made with."""
        return str(self.manifest["vocabulary"]["hash"])

    def check_vocabulary(self, wanted: str) -> None:
        """Refuse another vocabulary than that of the records.

        Raises:
            InputError: `wanted`, a hash, is another's.
        """
        if wanted != self.vocabulary_hash:
            raise errors.InputError(
                f"records in {self.folder} were made with vocabulary {self.vocabulary_hash[:12]}…, "
                f"not with {wanted[:12]}…. Prepare them anew with --vocabulary_file, or give "
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

    @functools.cache  # noqa: B019 (records live as long as their run)
    def split(self, name: str) -> Split:
        """Return a split.

        Raises:
            InputError: there is none of this name, or its files are torn.
        """
        if name not in self.manifest["splits"]:
            told = ", ".join(self.splits)
            raise errors.InputError(f"{self.folder} has no split {name!r}; there are {told}")
        dtype = ids_dtype(len(self.vocabulary))
        return Split(self.folder, name, self.manifest["splits"][name], dtype)

    def check_files(self) -> None:
        """Refuse torn files of any split.

        Raises:
            InputError: names the first.
        """
        for name in self.splits:
            self.split(name)

    def text(self, split: str, pair: str) -> tuple[list[str], list[str]]:
        """Return sources and targets of a split that is not trained on, as they were.

        Raises:
            InputError: the split or the pair has no text.
        """
        for span in self.split(split).spans:
            if span.pair == pair and span.text is not None:
                source, target = (_lines(self.folder / name, span.count) for name in span.text)
                return source, target
        raise errors.InputError(f"{self.folder} keeps no text of pair {pair!r} in split {split!r}")
