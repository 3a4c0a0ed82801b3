"""Faulty text: which kinds there are, whether they end the preparation, and how often they occur.

Sentences are on one line. Lines end at line feeds only; the other characters at which Python's
`str.splitlines` splits a line are a fault inside a sentence. Text is UTF-8.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from lingvo_gpipe import errors, hyperparams

Fate: TypeAlias = Literal["skip", "fail"]

_KEPT_EXAMPLES = 5
_INVISIBLE_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
# Where `str.splitlines` splits (a line of a file has no line feed, but an example of a dataset
# may); NUL ends strings in other tools.
_SEPARATOR = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029\x00]")


@dataclasses.dataclass(frozen=True, slots=True)
class SentencePair:
    """A sentence, its translation, and the place where they were read."""

    source: str
    target: str
    where: str


class FaultPolicy(hyperparams.Params):
    """What to do with faulty text: `skip` counts and drops the pair, `fail` ends the preparation.

    A byte order mark and carriage returns at the ends of lines are removed and counted unless they
    are set to `fail`; their sentences are kept.
    """

    misaligned: Fate = hyperparams.field(
        "fail",
        "Files of one split have unequal numbers of lines; skipped as a whole, because the place "
        "of the shift is unknown.",
    )
    columns: Fate = hyperparams.field(
        "skip", "A line of a TSV file has more or fewer columns than `languages`."
    )
    encoding: Fate = hyperparams.field("skip", "A line is not UTF-8.")
    separator: Fate = hyperparams.field(
        "skip",
        "A sentence holds U+2028, U+2029, U+0085, \\n, \\r, \\v, \\f, \\x1c to \\x1e or NUL.",
    )
    empty: Fate = hyperparams.field(
        "skip", "A sentence has no text, or none after the vocabulary's normalization."
    )
    bom: Fate = hyperparams.field("skip", "A file begins with a byte order mark.")
    carriage_return: Fate = hyperparams.field("skip", "A line ends in \\r\\n.")
    max_characters: int | None = hyperparams.field(
        1000, "Training pairs with a longer sentence are dropped and counted; None: no limit."
    )
    max_ratio: float | None = hyperparams.field(
        None,
        "Training pairs in which one sentence has more than this many times the characters of the "
        "other are dropped and counted; None: no limit.",
    )
    filtered_splits: tuple[str, ...] = hyperparams.field(
        ("train",),
        "Splits to which both limits apply; `train` is the training split, whatever its name. All "
        "other splits keep every pair.",
    )


class Faults:
    """Counts the faults of a corpus by its policy and keeps the first examples of each kind.

    Attributes:
        policy: policy of the corpus.
        counts: kind → number of pairs (of files, for `misaligned`) so far.
        examples: kind → the first places, and what is wrong there.
        progress: wraps an iterable of lines that are only counted, and shows the progress.
    """

    def __init__(
        self,
        policy: FaultPolicy,
        train_split: str = "train",
        log: Callable[[str, str, str], None] | None = None,
        *,
        normalise: Callable[[str], str] = str,
        progress: Callable[[Iterable[bytes]], Iterable[bytes]] = iter,
    ) -> None:
        """Start with no fault.

        Args:
            policy: policy of the corpus.
            train_split: name of the training split.
            log: called with the kind, the place and the description of every fault; None: no log.
            normalise: the vocabulary's normalization. A sentence is empty if nothing is left
                after it.
            progress: see the attribute.
        """
        self.policy = policy
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, list[str]] = {}
        self.progress = progress
        self._train_split = train_split
        self._log = log
        self._normalise = normalise
        self._kinds_of_pair: set[str] | None = None

    def record(self, kind: str, where: str, what: str) -> None:
        """Count a fault.

        Raises:
            InputError: the policy sets this kind to `fail`.
        """
        if getattr(self.policy, kind, "skip") == "fail":
            raise errors.InputError(
                f"{where}: {what}. Correct it, or drop such pairs by policy.{kind}=skip"
            )
        if self._log is not None:
            self._log(kind, where, what)
        if self._kinds_of_pair is not None:
            if kind in self._kinds_of_pair:
                return  # already counted for the other sentence of the pair
            self._kinds_of_pair.add(kind)
        self.counts[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < _KEPT_EXAMPLES:
            kept.append(f"{where}: {what}")

    def add(self, other: Faults) -> None:
        """Add the counts of `other`; its examples are appended."""
        self.counts.update(other.counts)
        for kind, examples in other.examples.items():
            kept = self.examples.setdefault(kind, [])
            kept.extend(examples[: _KEPT_EXAMPLES - len(kept)])

    def texts(
        self, sentences: Sequence[bytes | str], places: Sequence[str]
    ) -> tuple[str, str] | None:
        """Return both sentences of a pair as text, or None if one is faulty, which is counted.

        Args:
            sentences: bytes of a line, or the text of a dataset's example.
            places: where each was read.
        """
        self._kinds_of_pair = set()
        one, other = (
            self.sentence(raw, where) if isinstance(raw, str) else self._decoded(raw, where)
            for raw, where in zip(sentences, places, strict=True)
        )
        self._kinds_of_pair = None
        return None if one is None or other is None else (one, other)

    def _decoded(self, raw: bytes, where: str) -> str | None:
        if raw.endswith(b"\r"):
            self.record("carriage_return", where, "line ends in a carriage return")
            raw = raw[:-1]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.record("encoding", where, f"byte {error.start + 1} of the line is not UTF-8")
            return None
        return self.sentence(text, where)

    def sentence(self, text: str, where: str) -> str | None:
        """Return `text`, or None if it is faulty, which is counted."""
        if (separator := _SEPARATOR.search(text)) is not None:
            place = f"U+{ord(separator[0]):04X} at character {separator.start() + 1}"
            self.record("separator", where, f"{place} would end the line elsewhere")
            return None
        if not has_visible_text(text) or not self._normalise(text):
            self.record("empty", where, "sentence is empty")
            return None
        return text

    def fits(self, pair: SentencePair, split: str) -> bool:
        """Return whether a pair is within the policy's limits of length; if not, count it."""
        policy = self.policy
        if ("train" if split == self._train_split else split) not in policy.filtered_splits:
            return True
        short, long = sorted((len(pair.source), len(pair.target)))
        if policy.max_characters is not None and long > policy.max_characters:
            self.record("long", pair.where, f"{long} characters, over {policy.max_characters}")
            return False
        if policy.max_ratio is not None and long > policy.max_ratio * short:
            self.record("ratio", pair.where, f"{short} against {long} characters")
            return False
        return True


def has_visible_text(text: str) -> bool:
    """Return whether any character is visible: not a space, format or control character."""
    return any(unicodedata.category(character) not in _INVISIBLE_CATEGORIES for character in text)
