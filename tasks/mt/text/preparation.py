"""From corpora to records: clean text, vocabulary, ids; whole under its name or not there at all.

Text is read once, faults are counted, and what is whole goes to a scratch file, from which a sample
trains the vocabulary and all of it is tokenised. Everything is written into a folder beside the
true one, which gets the true name at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import sentencepiece
from absl import logging

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import progress
from lingvo_gpipe.tasks.mt.text import clean_text, records
from lingvo_gpipe.tasks.mt.text.corpus import Corpus, Faults, Files, Languages
from lingvo_gpipe.tasks.mt.text.vocabulary import (
    END,
    Training,
    Vocabulary,
    check,
    normaliser,
    train,
)

_SCRATCH = "scratch"
_SHOWN_FAULTS = 3


class Preparation(hyperparams.Configurable):
    """Makes a folder of records from corpora; see `records`."""

    class Params(hyperparams.Configurable.Params):
        """Fields of Preparation."""

        corpora: list[Corpus.Params] = hyperparams.required("Where the text is from.")
        pairs: tuple[str, ...] = hyperparams.field(
            (), "Pairs of languages, such as de:en; empty: every language to English."
        )
        train_split: str = hyperparams.field("train", "Split that the vocabulary is trained on.")
        target_tokens: bool | None = hyperparams.field(
            None, "Sources begin with <2xx>; None: where there are several target languages."
        )
        vocabulary: Training = hyperparams.field(Training(), "How the vocabulary is trained.")
        vocabulary_file: str | None = hyperparams.field(
            None, "A .model file to take in place of a trained one."
        )
        seed: int = hyperparams.field(0, "Of the vocabulary's sample.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not params.corpora:
            raise errors.InputError("there is no corpus to prepare. Give one or more")
        self._corpora: list[Corpus] = [each.instantiate() for each in params.corpora]

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        report: Callable[[str], None] = logging.info,
        num_threads: int | None = None,
    ) -> records.Records:
        """Make the records, or open them where the same params made them before.

        Args:
            folder: where they shall be; not there yet, or empty.
            report: takes a line for each stage.
            num_threads: that tokenise; None: one for each core. The result does not depend on it.

        Raises:
            InputError: text is faulty beyond what the policies bear, or the folder is in use.
        """
        target = Path(os.path.abspath(os.path.expanduser(folder)))
        if _is_made(target):
            self.check(found := records.Records(target))
            found.check_files()
            report(f"{target} is prepared already")
            if (changed := self._changed(found)) is not None:
                report(
                    f"warning: {target} was prepared of other text: {changed}. Prepare into "
                    "another folder, or remove this one"
                )
            return found
        for each in self._corpora:  # now, not after all text was read
            each.check_names()
        self._check_vocabulary()
        report(f"preparing {len(self._pairs)} pairs of languages")
        for line in self._left_told():
            report(line)
        with _building(target) as partial:
            self._make(partial, report, num_threads or os.cpu_count() or 1)
        return records.Records(target)

    def check(self, found: records.Records) -> None:
        """Refuse records that other params made; a field that is new since has its default in them.

        Raises:
            InputError: names what differs.
        """
        from lingvo_gpipe import task  # imports TensorFlow, which takes seconds

        old, new = found.manifest["params"], self.params.to_text()
        if old != new and (lines := task.change(old, new).lines):
            raise errors.InputError(
                f"{found.folder} was prepared otherwise. Give a new folder, or the same params:\n"
                + "\n".join(f"    {line}" for line in lines)
            )

    def _changed(self, found: records.Records) -> str | None:
        """Tell the first text file that records do not know as it is; None: they know all.

        Records need no text: what is not there any more is no change.
        """
        before = found.manifest.get("files")
        if before is None:  # made when it was not kept
            return None
        for path, size in sorted(self._sizes().items()):
            if path not in before:
                return f"{path} was not there"
            if size != before[path]:
                return f"{path} had {before[path]} bytes, not {size}"
        return None

    def _sizes(self) -> dict[str, int]:
        """Return path → bytes of the text files that are there."""
        sizes = {}
        for each in self._corpora:
            with contextlib.suppress(errors.InputError):
                for path in each.files():
                    with contextlib.suppress(OSError):
                        sizes[path] = os.path.getsize(path)
        return sizes

    @functools.cached_property
    def _pairs(self) -> tuple[str, ...]:
        """The pairs of languages, each of which some corpus has in the training split.

        Records that are there need no corpus: it is asked when they are made.
        """
        split = self.params.train_split
        there = {
            f"{source}:{target}"
            for each in self._corpora
            if split in each.splits
            for source, target in each.pairs(split)
        }
        if not there:
            told = sorted({name for each in self._corpora for name in each.splits})
            raise errors.InputError(
                f"no corpus has a split {split!r} (there are {', '.join(told) or 'none'}). Name "
                "the one that is trained on as train_split"
            )
        wanted = self.params.pairs or sorted(pair for pair in there if pair.endswith(":en"))
        if not wanted:
            raise errors.InputError(
                f"no corpus has English in split {split!r}; name the pairs, such as "
                f"pairs={min(there)}"
            )
        for pair in wanted:
            if pair not in there:
                near = errors.nearest(pair, there) or sorted(there)[:3]
                raise errors.InputError(
                    f"no corpus has the pair {pair!r} in split {split!r}; nearest {', '.join(near)}"
                )
        return tuple(dict.fromkeys(wanted))

    def _make(self, folder: Path, report: Callable[[str], None], num_threads: int) -> None:
        scratch = folder / _SCRATCH
        scratch.mkdir()
        files = self._sizes()
        with _FaultLog(folder / records.FAULTS) as log:
            texts, faults = self._clean(scratch, report, log.tell)
        seen = self._seen_targets(texts)
        for split, number in seen.items():
            report(f"{split}: {number} targets are in the training text too")
        vocabulary = self._vocabulary(texts, report)
        vocabulary.save(folder / records.VOCABULARY)
        splits = self._tokenise(folder, texts, vocabulary, report, num_threads)
        shutil.rmtree(scratch)
        training = self.params.vocabulary
        manifest = {
            "format": records.FORMAT,
            "params": self.params.to_text(),
            "pairs": list(self._pairs),
            "target_tokens": self._target_tokens,
            "vocabulary": {
                "hash": vocabulary.hash,
                "size": len(vocabulary),
                "num_threads": training.num_threads,
                "sentencepiece": sentencepiece.__version__,
            },
            "splits": splits,
            "corpora": faults,
            "left_out": self._left_out,
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
        return len({pair.partition(":")[2] for pair in self._pairs}) > 1

    def _clean(
        self,
        scratch: Path,
        report: Callable[[str], None],
        tell: Callable[[str, str, str], None],
    ) -> tuple[list[clean_text.Text], dict[str, Any]]:
        """Write all text that is whole to scratch files; return them, and faults by corpus."""
        texts: dict[tuple[str, frozenset[str]], clean_text.Text] = {}
        all_faults = {}
        normalise = self._normaliser()
        counting = None
        if any(isinstance(each, Files) for each in self._corpora):
            counting = progress.Count("counting lines", "line")
        with counting or contextlib.nullcontext(), progress.Count("reading", "pair") as bar:
            for number, each in enumerate(self._corpora):
                counted = functools.partial(
                    Faults,
                    each.params.policy,
                    self.params.train_split,
                    tell,
                    normalise=normalise,
                    shown=iter if counting is None else counting.over,
                )
                faults, name = counted(), self._name(number)
                for split, pairs in self._parts(each).items():
                    own = {}
                    for one, other in pairs:
                        path = scratch / f"{len(texts)}.txt"
                        text = texts.setdefault(
                            (split, frozenset((one, other))),
                            clean_text.Text(split, one, other, path, {}),
                        )
                        own[text.one, text.other] = text
                    wanted = {languages: counted() for languages in own}
                    if wanted:
                        clean_text.append(own, name, bar.over(each.read(split, wanted)))
                    for each_faults in wanted.values():
                        faults.add(each_faults)
                all_faults[name] = {"faults": dict(faults.counts), "examples": faults.examples}
                for line in _told(name, faults):
                    report(line)
        kept = sorted(texts.values(), key=lambda text: (text.split, text.one, text.other))
        total = sum(text.count for text in kept if text.split == self.params.train_split)
        if not total:
            raise errors.InputError("no training pair is left: every one is faulty or left out")
        report(f"read {total} training pairs of {len(self._pairs)} pairs of languages")
        return kept, all_faults

    def _name(self, number: int) -> str:
        """Return the name of a corpus, with a number where another has it too."""
        names = [each.name for each in self._corpora]
        before = names[:number].count(names[number])
        return f"{names[number]}#{before + 1}" if before else names[number]

    def _parts(self, corpus: Corpus) -> dict[str, list[Languages]]:
        """Return split → pairs of languages that are wanted of a corpus, each once."""
        parts = {}
        for split in corpus.splits:
            there = corpus.pairs(split)
            pairs: dict[frozenset[str], Languages] = {}
            for pair in self._pairs:
                one, _, other = pair.partition(":")
                if (one, other) in there:
                    pairs.setdefault(frozenset((one, other)), (one, other))
            parts[split] = list(pairs.values())
        return parts

    @functools.cached_property
    def _left_out(self) -> dict[str, dict[str, list[str]]]:
        """Corpus → split → languages of which nothing is taken, though nobody chose that.

        Where pairs are named, others are left out by choice, unless it is a whole split.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for number, each in enumerate(self._corpora):
            for split, pairs in self._parts(each).items():
                left = set().union(*each.pairs(split)).difference(*pairs)
                if left and not (pairs and self.params.pairs):
                    found.setdefault(self._name(number), {})[split] = sorted(left)
        return found

    def _left_told(self) -> Iterator[str]:
        why = f"split {self.params.train_split!r} has no such pair with English"
        if self.params.pairs:
            why = "no such pair is named"
        for name, splits in self._left_out.items():
            for split, languages in splits.items():
                yield (
                    f"warning: {name}: nothing is taken of {', '.join(languages)} in split "
                    f"{split!r}: {why}. Correct the languages, or name their pairs as well"
                )

    def _seen_targets(self, texts: Sequence[clean_text.Text]) -> dict[str, int]:
        """Return split → its examples whose target stands in the training text of its language."""
        held: dict[tuple[str, str], dict[str, int]] = {}
        training: list[tuple[clean_text.Text, str, str]] = []
        others: list[tuple[clean_text.Text, str, str]] = []
        for text, source, target in self._directed(texts):
            (training if text.split == self.params.train_split else others).append(
                (text, source, target)
            )
        if not others:
            return {}
        wanted = {target for _, _, target in others}
        training = [each for each in training if each[2] in wanted]
        total = sum(text.count for text, _, _ in (*others, *training))
        with progress.Count("comparing targets", "pair", total) as bar:
            for text, source, target in others:
                counts = held.setdefault((target, text.split), {})
                for _, sentence in bar.over(text.directed(source)):
                    counts[sentence] = counts.get(sentence, 0) + 1
            seen = {split: 0 for _, split in sorted(held)}
            for text, source, target in training:
                for _, sentence in bar.over(text.directed(source)):
                    for split in seen:
                        # Each is counted once, however often it is trained on.
                        seen[split] += held.get((target, split), {}).pop(sentence, 0)
        return seen

    def _directed(
        self, texts: Sequence[clean_text.Text]
    ) -> Iterator[tuple[clean_text.Text, str, str]]:
        """Yield (text, source, target) for each wanted pair of languages of each text."""
        for text in texts:
            for pair in self._pairs:
                source, _, target = pair.partition(":")
                if {source, target} == {text.one, text.other}:
                    yield text, source, target

    @property
    def _targets(self) -> list[str]:
        """Target languages."""
        return sorted({pair.partition(":")[2] for pair in self._pairs})

    def _check_vocabulary(self) -> None:
        """Refuse a vocabulary that cannot be made or taken."""
        if self.params.vocabulary_file is None:
            check(self.params.vocabulary, len(self._targets))
        else:
            _ = self._given_vocabulary

    def _normaliser(self) -> Callable[[str], str]:
        """Return what the vocabulary does to a text before it is cut."""
        if self.params.vocabulary_file is None:
            return normaliser(self.params.vocabulary.normalization)
        return self._given_vocabulary.normalise

    @functools.cached_property
    def _given_vocabulary(self) -> Vocabulary:
        path = os.path.expanduser(self.params.vocabulary_file)
        vocabulary = Vocabulary.load(path)
        if not vocabulary.byte_fallback:
            raise errors.InputError(
                f"vocabulary {path} has no byte fallback: characters without a piece would vanish. "
                "Train it with byte_fallback=true, or by the prepare command"
            )
        first = END + 1
        wanted = {n: f"<2{target}>" for n, target in enumerate(vocabulary.targets, first)}
        if vocabulary.controls != wanted:
            told = ", ".join(f"{symbol} ({n})" for n, symbol in vocabulary.controls.items())
            raise errors.InputError(
                f"vocabulary {path} has the control symbols {told}, but <2xx> alone may be, from "
                f"id {first} on. Train it by the prepare command"
            )
        if self._target_tokens:
            for target in self._targets:
                vocabulary.target_id(target)
        return vocabulary

    def _vocabulary(
        self, texts: Sequence[clean_text.Text], report: Callable[[str], None]
    ) -> Vocabulary:
        if self.params.vocabulary_file is not None:
            return self._given_vocabulary
        training = self.params.vocabulary
        chosen = [text for text in texts if text.split == self.params.train_split]
        most = min(training.sentences, 2 * sum(text.count for text in chosen))
        sample = clean_text.sample(chosen, training, self.params.seed)

        def drawn() -> Iterator[str]:
            with progress.Count("sampling", "sentence", most) as bar:
                yield from bar.over(sample)
            report(f"training a vocabulary of {training.size} pieces on {most} sentences")

        vocabulary = train(drawn(), training, self._targets)
        fewer = "" if len(vocabulary) == training.size else f" (not {training.size}: poor text)"
        report(f"vocabulary of {len(vocabulary)} pieces{fewer}, {vocabulary.hash[:12]}")
        return vocabulary

    def _tokenise(
        self,
        folder: Path,
        texts: Sequence[clean_text.Text],
        vocabulary: Vocabulary,
        report: Callable[[str], None],
        num_threads: int,
    ) -> dict[str, Any]:
        """Write the ids of all splits; return their entries of the manifest."""
        found = {(text.split, frozenset((text.one, text.other))): text for text in texts}
        entries = {}
        (folder / clean_text.KEPT).mkdir()
        total = sum(text.count for text, _, _ in self._directed(texts))
        with progress.Count("tokenising", "pair", total) as bar:
            for split in sorted({text.split for text in texts}):
                with records.SplitWriter(folder, split, vocabulary) as writer:
                    for pair in self._pairs:
                        source, _, target = pair.partition(":")
                        text = found.get((split, frozenset((source, target))))
                        if text is None:
                            continue
                        names = None
                        if split != self.params.train_split:
                            names = clean_text.keep(folder, text, source, target)
                        writer.add(
                            pair,
                            bar.over(text.directed(source)),
                            corpora=text.corpora,
                            target_token=self._target_tokens,
                            text=names,
                            num_threads=num_threads,
                        )
                    entries[split] = writer.entry()
                report(f"{split}: {entries[split]['examples']} examples tokenised")
        return entries


class _FaultLog:
    """Every fault by place: kind, place and what is wrong, between tabs; no file where none is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = open(self._path, "w", encoding="utf-8", errors="surrogateescape")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def tell(self, kind: str, where: str, what: str) -> None:
        """Add a fault."""
        place = where.replace("\t", " ").replace("\n", " ")
        self._file.write(f"{kind}\t{place}\t{what}\n")


def _told(name: str, faults: Faults) -> Iterator[str]:
    for kind, count in sorted(faults.counts.items()):
        first = "; ".join(faults.examples[kind][:_SHOWN_FAULTS])
        yield f"{name}: {count} times {kind}, such as {first} (all in {records.FAULTS})"


def _is_made(target: Path) -> bool:
    """Tell whether a folder holds records; if not, it is free to take them.

    Raises:
        InputError: it holds something else, or cannot be looked into.
    """
    try:
        if (target / records.MANIFEST).exists():
            return True
        used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise errors.InputError(
            f"{target} cannot be looked into: {error.strerror}. Give another folder"
        ) from error
    if used:
        raise errors.InputError(f"{target} is in use, but holds no records. Give a new folder")
    return False


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """Give an empty folder, locked, that becomes `target` where the block ends well.

    Raises:
        InputError: another process builds it, or the disk does not take it.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # What a killed run left.
            for entry in partial.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            try:
                yield partial
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            if target.exists():
                target.rmdir()
            partial.rename(target)
            _sync(target.parent)
        finally:
            os.close(lock)
    except BlockingIOError as error:
        raise errors.InputError(f"another process prepares {target}. Wait for its end") from error
    except OSError as error:
        raise errors.InputError(
            f"{target} cannot be prepared: {error.strerror} ({error.filename or partial}). Make "
            "room, or give another folder"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
