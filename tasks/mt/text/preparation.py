"""From corpora to records: text, vocabulary, ids.

Corpora are read once. Faulty text is counted, the rest goes to files, a pair of languages each. A
sample of it trains the vocabulary, and all of it is tokenised. The folder gets its name only when
it is complete.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import sentencepiece
from absl import logging

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import progress, units
from lingvo_gpipe.tasks.mt.text import mixture, records, vocabulary
from lingvo_gpipe.tasks.mt.text.corpora import corpus
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, languages_of
from lingvo_gpipe.tasks.mt.text.records import PairText
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary, VocabularyTraining

_BLOCK = 8192
# Splits and languages are parts of file names.
_NAME = re.compile(r"(?!\.)[\w.-]+")


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
            InputError: the text cannot be prepared, or the folder is in use.
        """
        target = _absolute(folder)
        if _is_prepared(target):
            self.check(prepared := records.Records(target))
            report(f"{target} is prepared already")
            return prepared
        self.check_text()  # before all text is read
        names = textwrap.shorten(", ".join(self._pairs), 400, placeholder=" …")
        report(f"preparing {units.things(len(self._pairs), 'pair')} of languages: {names}")
        with _building(target) as partial:
            self._make(partial, report, num_threads or os.cpu_count() or 1)
        return records.Records(target)

    def check_text(self) -> None:
        """Refuse corpora, pairs of languages or a vocabulary that cannot be prepared.

        Raises:
            InputError: says which.
        """
        for each in self._corpora:
            for split in each.splits:
                for name in (split, *sorted({name for pair in each.pairs(split) for name in pair})):
                    if not _NAME.fullmatch(name):
                        raise errors.InputError(
                            f"{each.name}: split or language {name!r} cannot be part of a file "
                            "name. Use letters, digits, '-', '_' and '.', and do not begin with '.'"
                        )
        if self.params.vocabulary_file is None:
            vocabulary.check_size(self.params.vocabulary, len(self._targets))
        else:
            _ = self._vocabulary_of_file

    def check(self, prepared: records.Records) -> None:
        """Refuse records that other params made.

        Raises:
            InputError: names the differences.
        """
        from lingvo_gpipe import task  # which needs this module

        old, new = prepared.manifest["params"], self.params.to_text()
        if old != new and (lines := task.change(old, new).lines):
            raise errors.InputError(
                f"{prepared.folder} was prepared with other params. Use a new folder, or the same "
                "params; a model reads it as it is with --params_override=input.preparation=None\n"
                + "\n".join(f"    {line}" for line in lines)
            )

    @functools.cached_property
    def _pairs(self) -> tuple[str, ...]:
        """The pairs of languages that are prepared.

        Raises:
            InputError: no corpus has the training split, or one of the pairs in it.
        """
        split = self.params.train_split
        available = {
            f"{source}:{target}"
            for each in self._corpora
            if split in each.splits
            for source, target in each.pairs(split)
        }
        if not available:
            splits = sorted({name for each in self._corpora for name in each.splits})
            raise errors.InputError(
                f"no corpus has a split {split!r} (there are {', '.join(splits) or 'none'}). Set "
                "train_split to the one to train on"
            )
        pairs = self.params.pairs or sorted(pair for pair in available if pair.endswith(":en"))
        if not pairs:
            raise errors.InputError(
                f"no corpus has English in split {split!r}; name the pairs, such as "
                f"pairs={min(available)}"
            )
        for pair in pairs:
            if pair not in available:
                near = errors.suggestion(pair, available)
                raise errors.InputError(
                    f"no corpus has the pair {pair!r} in split {split!r}; {near}"
                )
        return tuple(dict.fromkeys(pairs))

    @property
    def _targets(self) -> list[str]:
        """Target languages, sorted."""
        return sorted({languages_of(pair)[1] for pair in self._pairs})

    @property
    def _target_tokens(self) -> bool:
        if self.params.target_tokens is not None:
            return bool(self.params.target_tokens)
        return len(self._targets) > 1

    def _make(self, folder: Path, report: Callable[[str], None], num_threads: int) -> None:
        trained = self.params.train_split
        with open(folder / records.FAULTS, "w", encoding="utf-8", errors="replace") as faults_file:
            counts, faults = self._read(folder, faults_file, report)
        training = {text: count for text, count in counts.items() if text.split == trained}
        total = sum(training.values())
        if not total:
            listed = (folder / records.FAULTS).read_text(encoding="utf-8")
            fault = listed.partition("\n")[0].partition("\t")[2].replace("\t", ": ")
            such = f", such as {fault}" if fault else ""
            raise errors.InputError(
                f"no training pair is left: every one is faulty or left out{such}"
            )
        report(f"read {units.things(total, 'training pair')}")
        words = self._vocabulary(training, report)
        words.save(folder / records.VOCABULARY)
        splits = {}
        with progress.Count("tokenising", "pair", sum(counts.values())) as bar:
            for split in sorted({text.split for text in counts}):
                texts = {
                    pair: bar.over(text.sentences())
                    for pair in self._pairs
                    if (text := PairText(folder, split, pair)) in counts
                }
                splits[split] = records.write_split(
                    folder,
                    split,
                    words,
                    texts,
                    target_tokens=self._target_tokens,
                    num_threads=num_threads,
                )
                report(f"{split}: {units.things(splits[split]['examples'], 'example')} tokenised")
        for text in training:
            for path in text.paths:
                path.unlink()
        manifest = {
            "format": records.FORMAT,
            "params": self.params.to_text(),
            "pairs": list(self._pairs),
            "target_tokens": self._target_tokens,
            "vocabulary": {
                "hash": words.hash,
                "size": len(words),
                "num_threads": self.params.vocabulary.num_threads,
                "sentencepiece": sentencepiece.__version__,
            },
            "splits": splits,
            "faults": faults,
        }
        (folder / records.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")

    def _read(
        self, folder: Path, faults_file: TextIO, report: Callable[[str], None]
    ) -> tuple[dict[PairText, int], dict[str, dict[str, int]]]:
        """Write all faultless text to files; return their counts, and corpus → its faults."""
        counts: collections.Counter[PairText] = collections.Counter()
        faults_of: dict[str, dict[str, int]] = {}
        with progress.Count("reading", "pair") as bar:
            for number, each in enumerate(self._corpora):
                earlier = [other.name for other in self._corpora[:number]].count(each.name)
                name = f"{each.name}#{earlier + 1}" if earlier else each.name
                faults = corpus.Faults(faults_file, each.params.strict)
                for split in each.splits:
                    rows: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
                    found = each.sentence_pairs(split, self._pairs, faults)
                    for place, (pair, sentences) in enumerate(bar.over(found), 1):
                        rows[pair].append(sentences)
                        if place % _BLOCK == 0:
                            _append(folder, split, rows, counts)
                    _append(folder, split, rows, counts)
                faults_of[name] = dict(faults.counts)
                for kind, count in sorted(faults.counts.items()):
                    report(f"{name}: {units.things(count, 'pair')} {kind}, see {records.FAULTS}")
        return dict(counts), faults_of

    def _vocabulary(
        self, training: dict[PairText, int], report: Callable[[str], None]
    ) -> Vocabulary:
        """Return the vocabulary of the file, or train one on a sample of the training text."""
        if self.params.vocabulary_file is not None:
            return self._vocabulary_of_file
        settings = self.params.vocabulary
        sample = sampled(training, settings, self.params.seed)
        report(f"training a vocabulary of {settings.size} pieces on {len(sample)} sentences")
        words = vocabulary.train(sample, settings, self._targets)
        fewer = "" if len(words) == settings.size else f" (not {settings.size}: too little text)"
        report(f"vocabulary of {len(words)} pieces{fewer}, {words.hash[:12]}")
        return words

    @functools.cached_property
    def _vocabulary_of_file(self) -> Vocabulary:
        """The vocabulary of the file.

        Raises:
            InputError: it cannot be read, has no byte fallback, or has other control symbols.
        """
        path = os.path.expanduser(self.params.vocabulary_file or "")
        words = Vocabulary.load(path)
        if not words.byte_fallback:
            raise errors.InputError(
                f"vocabulary {path} has no byte fallback: characters without a piece would vanish. "
                "Train it with byte_fallback=true, or by the prepare command"
            )
        expected = {n: f"<2{target}>" for n, target in enumerate(words.targets, END + 1)}
        if words.controls != expected:
            symbols = ", ".join(f"{symbol} ({n})" for n, symbol in words.controls.items())
            raise errors.InputError(
                f"vocabulary {path} has the control symbols {symbols}, but only <2xx> are allowed, "
                f"from id {END + 1} on. Train it by the prepare command"
            )
        for target in self._targets if self._target_tokens else ():
            words.target_id(target)
        return words


def _append(
    folder: Path,
    split: str,
    rows: dict[str, list[tuple[str, str]]],
    counts: collections.Counter[PairText],
) -> None:
    """Append sentences to the files of their pairs, and forget them.

    In blocks, because there may be more files than a process can have open.
    """
    for pair, sentences in rows.items():
        text = PairText(folder, split, pair)
        text.append(sentences)
        counts[text] += len(sentences)
    rows.clear()


def sampled(texts: dict[PairText, int], training: VocabularyTraining, seed: int) -> list[str]:
    """Return the sentences that a vocabulary is trained on, in shares by temperature.

    Args:
        texts: training text, and number of its sentence pairs.
        training: how the vocabulary is trained.
        seed: seed of the choice.
    """
    sizes: collections.Counter[str] = collections.Counter()
    # The two directions of a pair have the same sentences.
    once = {frozenset(languages_of(text.pair)): text for text in texts}.values()
    for text in once:
        for language in languages_of(text.pair):
            sizes[language] += texts[text]
    languages = sorted(sizes)
    shares = mixture.probabilities([sizes[name] for name in languages], training.temperature)
    quotas = np.round(min(training.sentences, sum(sizes.values())) * shares)
    picks = {}
    for index, (name, quota) in enumerate(zip(languages, quotas, strict=True)):
        drawn = mixture.draws(sizes[name], 0, int(quota), seed, index)
        picks[name] = iter(np.bincount(drawn, minlength=sizes[name]).tolist())
    sample: list[str] = []
    for text in once:
        for pair in text.sentences():
            for language, sentence in zip(languages_of(text.pair), pair, strict=True):
                sample += [sentence] * next(picks[language])
    return sample


def _absolute(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _is_prepared(target: Path) -> bool:
    """Return whether a folder holds records; if not, it is free to be made.

    Raises:
        InputError: it holds something else.
    """
    if (target / records.MANIFEST).exists():
        return True
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.InputError(f"{target} is in use, but holds no records. Use a new folder")
    return False


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """Yield an empty folder; it becomes `target` if the block succeeds, and is removed if not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(target)  # also in place of an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)
