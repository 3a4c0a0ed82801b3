"""From corpora to records: clean text, vocabulary, ids.

Text is read once. Faults are counted, and faultless text goes to temporary files; a sample of them
trains the vocabulary, and all of it is tokenised. The folder gets its name only when it is
complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from absl import logging

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import progress, units
from lingvo_gpipe.tasks.mt.text import clean_text, output_folder, records
from lingvo_gpipe.tasks.mt.text.clean_text import CleanText
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, languages_of
from lingvo_gpipe.tasks.mt.text.pair_selection import PairSelection
from lingvo_gpipe.tasks.mt.text.reading import CorpusReader, FaultLog
from lingvo_gpipe.tasks.mt.text.vocabulary import Vocabulary
from lingvo_gpipe.tasks.mt.text.vocabulary_source import VocabularySource
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining

_SCRATCH = "scratch"


class Preparation(hyperparams.Configurable):
    """Makes a folder of records from corpora; see `records`."""

    class Params(hyperparams.Configurable.Params):
        """Fields of Preparation."""

        corpora: list[Corpus.Params] = hyperparams.required("Sources of the text.")
        pairs: tuple[str, ...] = hyperparams.field(
            (), "Pairs of languages, such as de:en; empty: every language to English."
        )
        train_split: str = hyperparams.field("train", "Split that the vocabulary is trained on.")
        target_tokens: bool | None = hyperparams.field(
            None, "Sources begin with <2xx>; None: if there are several target languages."
        )
        vocabulary: VocabularyTraining = hyperparams.field(
            VocabularyTraining(), "How the vocabulary is trained."
        )
        vocabulary_file: str | None = hyperparams.field(
            None, "A .model file to use instead of training a vocabulary."
        )
        seed: int = hyperparams.field(0, "Seed of the vocabulary's sample.")

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        if not params.corpora:
            raise errors.InputError("there is no corpus to prepare. Name one or more")
        self._corpora: list[Corpus] = [corpus.instantiate() for corpus in params.corpora]
        self._selection = PairSelection(self._corpora, params.pairs, params.train_split)

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        report: Callable[[str], None] = logging.info,
        num_threads: int | None = None,
    ) -> records.Records:
        """Make the records, or open them if the same params made them before.

        Args:
            folder: folder of the records; it does not exist yet, or is empty.
            report: receives a line for each stage.
            num_threads: threads that tokenise; None: one for each core. The result is the same.

        Raises:
            InputError: the text has a fault that a policy sets to `fail`, or the folder is in use.
        """
        target = _absolute(folder)
        if output_folder.is_prepared(target, records.MANIFEST):
            self.check(prepared := records.Records(target))
            prepared.check_files()
            report(f"{target} is prepared already")
            if (change := self._changed_text(prepared)) is not None:
                report(
                    f"warning: {target} was prepared from other text: {change}. Prepare into "
                    "another folder, or remove this one"
                )
            return prepared
        self._check_text()  # before all text is read
        report(f"preparing {units.things(len(self._selection.pairs), 'pair')} of languages")
        for line in self._selection.warnings():
            report(line)
        with output_folder.building(target) as partial:
            self._make(partial, report, num_threads or os.cpu_count() or 1)
        return records.Records(target)

    def check_there(self, folder: str | os.PathLike[str]) -> None:
        """Refuse records that are missing and cannot be made, from a look at the disk.

        Args:
            folder: folder of the records.

        Raises:
            InputError: the text is missing, or the folder holds something else.
        """
        target = _absolute(folder)
        if output_folder.is_prepared(target, records.MANIFEST):
            self.check(records.Records(target))
        else:
            self._check_text()

    def _check_text(self) -> None:
        for corpus in self._corpora:
            corpus.check_names()
        _ = self._selection.pairs
        self.vocabulary_source.check()

    def check(self, prepared: records.Records) -> None:
        """Refuse records that other params made; a field that they lack has its default.

        Raises:
            InputError: names the differences.
        """
        from lingvo_gpipe import task  # imports TensorFlow, which takes seconds

        old, new = prepared.manifest["params"], self.params.to_text()
        if old != new and (lines := task.change(old, new).lines):
            raise errors.InputError(
                f"{prepared.folder} was prepared with other params. Use a new folder, or the same "
                "params; a model reads it as it is with --params_override=input.preparation=None\n"
                + "\n".join(f"    {line}" for line in lines)
            )

    @functools.cached_property
    def vocabulary_source(self) -> VocabularySource:
        """Where the vocabulary comes from."""
        return VocabularySource(
            self.params.vocabulary,
            self.params.vocabulary_file,
            targets=self._selection.targets,
            target_tokens=self._target_tokens,
        )

    def _changed_text(self, prepared: records.Records) -> str | None:
        """Describe the first text file that changed since records were made; None: none did.

        Records do not need their text: a file that is missing now is not a change.
        """
        sizes_then = prepared.manifest.get("files")
        if sizes_then is None:  # records of a version that did not store them
            return None
        for path, size in sorted(self._file_sizes().items()):
            if path not in sizes_then:
                return f"{path} was not there"
            if size != sizes_then[path]:
                return f"{path} had {sizes_then[path]} bytes, not {size}"
        return None

    def _file_sizes(self) -> dict[str, int]:
        """Return path → bytes of the text files that exist."""
        sizes = {}
        for corpus in self._corpora:
            with contextlib.suppress(errors.InputError):
                for path in corpus.files():
                    with contextlib.suppress(OSError):
                        sizes[path] = os.path.getsize(path)
        return sizes

    def _make(self, folder: Path, report: Callable[[str], None], num_threads: int) -> None:
        scratch = folder / _SCRATCH
        scratch.mkdir()
        files = self._file_sizes()
        normalise = self.vocabulary_source.normaliser()
        with FaultLog(folder / records.FAULTS) as log:
            texts, faults = CorpusReader(self._selection, scratch, normalise, log, report).read()
        seen = _targets_seen_in_training(self._selection, texts)
        for split, number in seen.items():
            report(f"{split}: targets in the training text too: {number}")
        training = [text for text in texts if text.split == self.params.train_split]
        vocabulary = self.vocabulary_source.make(training, self.params.seed, report)
        vocabulary.save(folder / records.VOCABULARY)
        splits = self._tokenise(folder, texts, vocabulary, report, num_threads)
        shutil.rmtree(scratch)
        manifest = {
            "format": records.FORMAT,
            "params": self.params.to_text(),
            "pairs": list(self._selection.pairs),
            "target_tokens": self._target_tokens,
            "vocabulary": {
                "hash": vocabulary.hash,
                "size": len(vocabulary),
                "num_threads": self.params.vocabulary.num_threads,
                "sentencepiece": sentencepiece.__version__,
            },
            "splits": splits,
            "corpora": faults,
            "left_out": self._selection.unused,
            "files": files,
            "targets_seen_in_training": seen,
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (folder / records.MANIFEST).write_text(
            text + "\n", encoding="utf-8", errors="surrogateescape"
        )

    @property
    def _target_tokens(self) -> bool:
        if self.params.target_tokens is not None:
            return bool(self.params.target_tokens)
        return len(self._selection.targets) > 1

    def _tokenise(
        self,
        folder: Path,
        texts: Sequence[CleanText],
        vocabulary: Vocabulary,
        report: Callable[[str], None],
        num_threads: int,
    ) -> dict[str, dict[str, Any]]:
        """Write the ids of all splits; return their entries of the manifest."""
        by_languages = {(text.split, frozenset((text.one, text.other))): text for text in texts}
        entries = {}
        (folder / clean_text.KEPT).mkdir()
        total = sum(text.count for text, _ in self._selection.directed(texts))
        with progress.Count("tokenising", "pair", total) as bar:
            for split in sorted({text.split for text in texts}):
                with records.SplitWriter(
                    folder,
                    split,
                    vocabulary,
                    target_tokens=self._target_tokens,
                    num_threads=num_threads,
                ) as writer:
                    for pair in self._selection.pairs:
                        languages = languages_of(pair)
                        text = by_languages.get((split, frozenset(languages)))
                        if text is None:
                            continue
                        names = None
                        if split != self.params.train_split:
                            names = clean_text.keep(folder, text, languages)
                        sentences = bar.over(text.directed(languages[0]))
                        writer.add(pair, sentences, corpora=text.corpora, text=names)
                    entries[split] = writer.entry()
                report(f"{split}: {units.things(entries[split]['examples'], 'example')} tokenised")
        return entries


def _absolute(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _targets_seen_in_training(
    selection: PairSelection, texts: Sequence[CleanText]
) -> dict[str, int]:
    """Return split → number of its targets that the training text of their language contains."""
    training: list[_Targets] = []
    others: list[_Targets] = []
    for text, (source, target) in selection.directed(texts):
        trained = text.split == selection.train_split
        (training if trained else others).append(_Targets(text, source, target))
    if not others:
        return {}
    languages = {each.language for each in others}
    training = [each for each in training if each.language in languages]
    counts: dict[tuple[str, str], dict[str, int]] = {}  # (language, split) → sentence → number
    total = sum(each.text.count for each in (*others, *training))
    with progress.Count("comparing targets", "pair", total) as bar:
        for each in others:
            of_split = counts.setdefault((each.language, each.text.split), {})
            for _, sentence in bar.over(each.text.directed(each.source)):
                of_split[sentence] = of_split.get(sentence, 0) + 1
        seen = {split: 0 for _, split in sorted(counts)}
        for each in training:
            for _, sentence in bar.over(each.text.directed(each.source)):
                for split in seen:
                    # Removed when it is first seen, because training may repeat it.
                    seen[split] += counts.get((each.language, split), {}).pop(sentence, 0)
    return seen


@dataclasses.dataclass(frozen=True, slots=True)
class _Targets:
    """A text whose sentences in `language` are targets, translated from `source`."""

    text: CleanText
    source: str
    language: str
