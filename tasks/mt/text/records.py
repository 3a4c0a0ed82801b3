"""Tokenised text on disk: any example can be read by its number, and text is tokenised once.

A folder of records holds `manifest.json`, `vocabulary.model` and for each split `SPLIT.ids` (the
ids of source and target, example after example) and `SPLIT.lengths` (int32 [N, 2]). The examples of
a pair of languages are consecutive. `text/` holds the sentences of all splits but that of training,
and `faults.tsv` lists the faulty text: kind, place, description. The folder gets its name only when
it is complete: see `preparation`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text.corpora.corpus import languages_of
from lingvo_gpipe.tasks.mt.text.vocabulary import Vocabulary

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 2
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.model"
FAULTS = "faults.tsv"
TARGET_TOKENS = "target_tokens"  # asset of a run: whether its sources begin with <2xx>
_TEXT = "text"
_LENGTHS = np.dtype("<i4")
_BLOCK = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class PairText:
    """The sentences of a pair of languages in a split, in two files of as many lines.

    Attributes:
        folder: folder of the records.
        split: name of the split.
        pair: such as `de:en`.
    """

    folder: Path
    split: str
    pair: str

    @property
    def paths(self) -> tuple[Path, Path]:
        """Paths of sources and targets."""
        stem = f"{self.split}.{self.pair.replace(':', '.')}"
        source, target = (self.folder / _TEXT / f"{stem}.{name}" for name in ("source", "target"))
        return source, target

    def append(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Write further sentences and their translations."""
        for path, sentences in zip(self.paths, zip(*pairs, strict=True), strict=False):
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{sentence}\n" for sentence in sentences)

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Yield the sentences with their translations."""
        source, target = self.paths
        with (
            open(source, encoding="utf-8", newline="\n") as sources,
            open(target, encoding="utf-8", newline="\n") as targets,
        ):
            for pair in zip(sources, targets, strict=True):
                yield pair[0].removesuffix("\n"), pair[1].removesuffix("\n")


@dataclasses.dataclass(frozen=True, slots=True)
class PairSpan:
    """The consecutive examples of a pair of languages in a split.

    Attributes:
        pair: such as `de:en`.
        first: number of its first example.
        count: number of examples.
        source_tokens: number of tokens of all sources, with target tokens, without end tokens.
        target_tokens: number of tokens of all targets, without end tokens.
    """

    pair: str
    first: int
    count: int
    source_tokens: int
    target_tokens: int


def write_split(
    folder: Path,
    split: str,
    vocabulary: Vocabulary,
    sentences: Mapping[str, Iterable[tuple[str, str]]],
    *,
    target_tokens: bool = False,
    num_threads: int = 1,
) -> dict[str, Any]:
    """Tokenise and write a split; return its entry in the manifest.

    Args:
        folder: folder of the records.
        split: its name.
        vocabulary: that tokenises.
        sentences: pair of languages → sources and targets.
        target_tokens: begin each source with <2xx>, its target language.
        num_threads: threads that tokenise; the files do not depend on it.
    """
    spans: list[PairSpan] = []
    first = 0
    with (
        open(folder / f"{split}.ids", "wb") as ids_file,
        open(folder / f"{split}.lengths", "wb") as lengths_file,
    ):
        for pair, both in sentences.items():
            _, target = languages_of(pair)
            prefix = [vocabulary.target_id(target)] if target_tokens else []
            count, tokens = 0, np.zeros(2, np.int64)
            rest = iter(both)
            while block := list(itertools.islice(rest, _BLOCK)):
                rows = vocabulary.encode([s for pair in block for s in pair], num_threads)
                rows[::2] = [prefix + row for row in rows[::2]]
                lengths = np.fromiter(map(len, rows), _LENGTHS, len(rows)).reshape(-1, 2)
                flat = itertools.chain.from_iterable(rows)
                dtype = ids_dtype(len(vocabulary))
                ids_file.write(np.fromiter(flat, dtype, int(lengths.sum())).tobytes())
                lengths_file.write(lengths.tobytes())
                count += len(block)
                tokens += lengths.sum(0)
            spans.append(PairSpan(pair, first, count, *tokens.tolist()))
            first += count
    return {"examples": first, "pairs": [dataclasses.asdict(span) for span in spans]}


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

    def __init__(self, folder: Path, name: str, spans: Iterable[PairSpan], size: int) -> None:
        """Open the files of a split.

        Args:
            folder: folder of the records.
            name: its name.
            spans: spans of the pairs of languages, in order.
            size: number of ids of the vocabulary.

        Raises:
            InputError: a file is missing or damaged.
        """
        self.name = name
        self.spans = tuple(spans)
        count = sum(span.count for span in self.spans)
        tokens = sum(span.source_tokens + span.target_tokens for span in self.spans)
        self.lengths = _mapped(folder / f"{name}.lengths", 2 * count, _LENGTHS).reshape(-1, 2)
        self._ids = _mapped(folder / f"{name}.ids", tokens, ids_dtype(size))
        self._ends = np.cumsum(self.lengths.sum(1, dtype=np.int64))
        if count and self._ends[-1] != tokens:
            raise errors.InputError(f"{folder / name}.lengths is damaged. {_again(folder)}")

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[Array, Array]:
        """Return the ids of source and target, without end tokens."""
        source, target = (int(length) for length in self.lengths[number])
        last = int(self._ends[number])
        return self._ids[last - source - target : last - target], self._ids[last - target : last]


def _mapped(path: Path, count: int, dtype: np.dtype[Any]) -> Array:
    """Memory-map a file that must have `count` numbers."""
    try:
        actual, expected = os.path.getsize(path), count * dtype.itemsize
    except OSError as error:
        raise errors.InputError(
            f"{path} cannot be read: {error.strerror}. {_again(path.parent)}"
        ) from error
    if actual != expected:
        raise errors.InputError(
            f"{path} has {actual} bytes, not {expected} as the manifest says. {_again(path.parent)}"
        )
    # A plain array over the map, because slices of a `memmap` are slow to create.
    return np.asarray(np.memmap(path, dtype, "r")) if count else np.zeros(0, dtype)


def _again(folder: Path) -> str:
    return f"Remove {folder} and prepare it again"


class Records:
    """A complete folder of records.

    Attributes:
        folder: folder of the files.
        manifest: content of `manifest.json`.
        pairs: pairs of languages, in the order of their indices.
        target_tokens: whether sources begin with <2xx>.
        spans: split → spans of its pairs of languages.
        vocabulary: with which the text was tokenised.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a folder.

        Raises:
            InputError: it holds no records, or not the vocabulary that they were made with.
        """
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            self.manifest = json.loads(path.read_text(encoding="utf-8"))
            if self.manifest["format"] != FORMAT:
                raise ValueError(f"its format is {self.manifest['format']}, not {FORMAT}")
            self.pairs = tuple(map(str, self.manifest["pairs"]))
            self.target_tokens = bool(self.manifest["target_tokens"])
            self.spans = {
                name: [PairSpan(**span) for span in entry["pairs"]]
                for name, entry in self.manifest["splits"].items()
            }
            vocabulary_hash = self.vocabulary_hash
        except OSError as error:
            way = f"python -m lingvo_gpipe.tasks.mt.prepare --output={folder}"
            if any(self.folder.glob("*.*.txt")):  # text as for tfds.TranslateFolder
                way = f"{way}_records --translate_folder={folder}"
            raise errors.InputError(
                f"{folder} holds no prepared text ({MANIFEST}: {error.strerror}). Make it with "
                f"{way}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise errors.InputError(f"{path} is damaged: {error}. {_again(self.folder)}") from error
        self.vocabulary = Vocabulary.load(self.folder / VOCABULARY)
        if self.vocabulary.hash != vocabulary_hash:
            raise errors.InputError(
                f"{self.folder / VOCABULARY} is not that of the records. {_again(self.folder)}"
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

    def check_split(self, name: str) -> None:
        """Refuse a name that no split has.

        Raises:
            InputError: names those that there are, and the fields that choose one.
        """
        if name not in self.spans:
            raise errors.InputError(
                f"{self.folder} has no split {name!r}; there are {', '.join(self.spans)}. Prepare "
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
        return Split(self.folder, name, self.spans[name], len(self.vocabulary))

    def text(self, split: str, pair: str) -> list[tuple[str, str]]:
        """Return sources and targets as text; that of the training split is not kept.

        Raises:
            InputError: there is no such text.
        """
        try:
            return list(PairText(self.folder, split, pair).sentences())
        except (OSError, ValueError) as error:
            raise errors.InputError(
                f"{self.folder} has no text of pair {pair!r} in split {split!r}: {error}"
            ) from error
