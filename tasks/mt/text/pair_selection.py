"""Which pairs of languages are prepared, and which text each corpus contributes to them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text.clean_text import CleanText
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages, languages_of


class PairSelection:
    """The pairs of languages that are prepared.

    Corpora are read only when a property is first used, because existing records need no corpus.

    Attributes:
        corpora: in their order.
        train_split: name of the training split.
    """

    def __init__(
        self, corpora: Sequence[Corpus], requested: Sequence[str], train_split: str
    ) -> None:
        """Select pairs.

        Args:
            corpora: in their order.
            requested: pairs such as `de:en`; none: every language to English.
            train_split: name of the training split.
        """
        self.corpora = corpora
        self.train_split = train_split
        self._requested = requested

    @functools.cached_property
    def pairs(self) -> tuple[str, ...]:
        """The pairs, each of which some corpus has in the training split.

        Raises:
            InputError: no corpus has such a split, or one of the pairs.
        """
        split = self.train_split
        available = {
            f"{source}:{target}"
            for corpus in self.corpora
            if split in corpus.splits
            for source, target in corpus.pairs(split)
        }
        if not available:
            splits = sorted({name for corpus in self.corpora for name in corpus.splits})
            raise errors.InputError(
                f"no corpus has a split {split!r} (there are {', '.join(splits) or 'none'}). Set "
                "train_split to the one to train on"
            )
        selected = self._requested or sorted(pair for pair in available if pair.endswith(":en"))
        if not selected:
            raise errors.InputError(
                f"no corpus has English in split {split!r}; name the pairs, such as "
                f"pairs={min(available)}"
            )
        for pair in selected:
            if pair not in available:
                near = errors.nearest(pair, available) or sorted(available)[:3]
                raise errors.InputError(
                    f"no corpus has the pair {pair!r} in split {split!r}; nearest {', '.join(near)}"
                )
        return tuple(dict.fromkeys(selected))

    @property
    def targets(self) -> list[str]:
        """Target languages, sorted."""
        return sorted({languages_of(pair)[1] for pair in self.pairs})

    def corpus_name(self, number: int) -> str:
        """Return the name of corpus `number`, with a suffix if an earlier one has the same."""
        names = [corpus.name for corpus in self.corpora]
        earlier = names[:number].count(names[number])
        return f"{names[number]}#{earlier + 1}" if earlier else names[number]

    def of_corpus(self, corpus: Corpus) -> dict[str, list[Languages]]:
        """Return split → the selected languages of a corpus, each two in one direction only."""
        parts = {}
        for split in corpus.splits:
            available = corpus.pairs(split)
            selected: dict[frozenset[str], Languages] = {}
            for pair in self.pairs:
                languages = languages_of(pair)
                if languages in available:
                    selected.setdefault(frozenset(languages), languages)
            parts[split] = list(selected.values())
        return parts

    @functools.cached_property
    def unused(self) -> dict[str, dict[str, list[str]]]:
        """Corpus → split → languages that are not used, although the user did not choose that.

        If pairs are requested, other languages are left out by choice, unless this leaves out a
        whole split.
        """
        unused: dict[str, dict[str, list[str]]] = {}
        for number, corpus in enumerate(self.corpora):
            for split, selected in self.of_corpus(corpus).items():
                left = set().union(*corpus.pairs(split)).difference(*selected)
                if left and not (selected and self._requested):
                    unused.setdefault(self.corpus_name(number), {})[split] = sorted(left)
        return unused

    def warnings(self) -> Iterator[str]:
        """Yield a line for each entry of `unused`."""
        why = f"split {self.train_split!r} has no such pair with English"
        if self._requested:
            why = "no such pair is named"
        for name, splits in self.unused.items():
            for split, languages in splits.items():
                yield (
                    f"warning: {name}: no text is used of {', '.join(languages)} in split "
                    f"{split!r}: {why}. Correct the languages, or name their pairs as well"
                )

    def directed(self, texts: Sequence[CleanText]) -> Iterator[tuple[CleanText, Languages]]:
        """Yield each text with each selected pair of its languages, source first."""
        for text in texts:
            for pair in self.pairs:
                languages = languages_of(pair)
                if set(languages) == {text.one, text.other}:
                    yield text, languages
