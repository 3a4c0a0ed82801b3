"""The vocabulary of a preparation: read from a file, or trained on a sample of its text."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.console import progress
from lingvo_gpipe.tasks.mt.text import clean_text, vocabulary_training
from lingvo_gpipe.tasks.mt.text.clean_text import CleanText
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining


class VocabularySource:
    """Makes the vocabulary for some target languages."""

    def __init__(
        self,
        training: VocabularyTraining,
        file: str | None,
        *,
        targets: Sequence[str],
        target_tokens: bool,
    ) -> None:
        """Decide where the vocabulary comes from.

        Args:
            training: how it is trained.
            file: a `.model` file to use instead; None: it is trained.
            targets: target languages.
            target_tokens: whether sources begin with <2xx>.
        """
        self._training = training
        self._file = file
        self._targets = targets
        self._target_tokens = target_tokens

    def check(self) -> None:
        """Refuse a vocabulary that cannot be trained or used, before any text is read.

        Raises:
            InputError: a setting is out of range, or the file is unsuitable.
        """
        if self._file is None:
            vocabulary_training.check(self._training, len(self._targets))
        else:
            _ = self.from_file

    def normaliser(self) -> Callable[[str], str]:
        """Return the vocabulary's normalization of text."""
        if self._file is None:
            return vocabulary_training.normaliser(self._training.normalization)
        return self.from_file.normalise

    def make(
        self, texts: Sequence[CleanText], seed: int, report: Callable[[str], None]
    ) -> Vocabulary:
        """Return the vocabulary of the file, or train one.

        Args:
            texts: training text.
            seed: seed of the sample.
            report: receives a line for each stage.
        """
        if self._file is not None:
            return self.from_file
        training = self._training
        count = min(training.sentences, 2 * sum(text.count for text in texts))
        sample = clean_text.sample(texts, training, seed)

        def drawn() -> Iterator[str]:
            with progress.Count("sampling", "sentence", count) as bar:
                yield from bar.over(sample)
            report(f"training a vocabulary of {training.size} pieces on {count} sentences")

        vocabulary = vocabulary_training.train(drawn(), training, self._targets)
        fewer = (
            "" if len(vocabulary) == training.size else f" (not {training.size}: too little text)"
        )
        report(f"vocabulary of {len(vocabulary)} pieces{fewer}, {vocabulary.hash[:12]}")
        return vocabulary

    @functools.cached_property
    def from_file(self) -> Vocabulary:
        """The vocabulary of the file.

        Raises:
            InputError: it cannot be read, has no byte fallback, or has other control symbols.
        """
        path = os.path.expanduser(self._file or "")
        vocabulary = Vocabulary.load(path)
        if not vocabulary.byte_fallback:
            raise errors.InputError(
                f"vocabulary {path} has no byte fallback: characters without a piece would vanish. "
                "Train it with byte_fallback=true, or by the prepare command"
            )
        first = END + 1
        expected = {n: f"<2{target}>" for n, target in enumerate(vocabulary.targets, first)}
        if vocabulary.controls != expected:
            symbols = ", ".join(f"{symbol} ({n})" for n, symbol in vocabulary.controls.items())
            raise errors.InputError(
                f"vocabulary {path} has the control symbols {symbols}, but only <2xx> are allowed, "
                f"from id {first} on. Train it by the prepare command"
            )
        if self._target_tokens:
            for target in self._targets:
                vocabulary.target_id(target)
        return vocabulary
