"""Synthetic sentences and a vocabulary for them, which are prepared as real text is.

A sentence is made-up words, of which frequent ones are as much more frequent as in a language. Its
translation has, for each word, the word that follows it by a distance of the pair's own.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.text import preparation, records, vocabulary
from lingvo_gpipe.tasks.mt.text.corpora import corpus
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, languages_of

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_SYLLABLES = [one + other for one in "bcdfghjklmnprstvwxyz" for other in "aeiou"]
_MOST_WORDS = len(_SYLLABLES) ** 3
_PAIRS = ("de:en", "fr:en", "sw:en")
_VOCABULARY = 1000
_SEED_WORDS = 50  # of the vocabulary to which the others are added
_LONGEST, _FEWEST = 30, 200
_HELD_OUT = 40
_WORD = "\u2581"
_PROTOS: Any = sentencepiece_model_pb2  # its classes are created when it is imported


class SyntheticTranslation(synthetic.Synthetic, Translation):
    """Sentences of made-up words: prepared in a second, in a folder that ends with the process."""

    asset_names = (*Translation.asset_names, synthetic.FILE)

    class Params(synthetic.Synthetic.Params, Translation.Params):
        """Params of SyntheticTranslation."""

        data_dir = ""
        vocabulary: int = hyperparams.required("Pieces of the vocabulary.")
        sentences: dict[str, int] = hyperparams.required("Split → sentences of each pair.")

    params: Params

    @functools.cached_property
    def records(self) -> records.Records:
        """The records, which are made now.

        Raises:
            InputError: the vocabulary is too small for bytes and words, or too large for words.
        """
        params = self.params
        targets = sorted({languages_of(pair)[1] for pair in params.pairs})
        made_words = word_vocabulary(params.vocabulary, targets)
        folder = Path(tempfile.mkdtemp(prefix="lingvo_gpipe_made_"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # at exit, at the latest
        made_words.save(folder / records.VOCABULARY)
        recipe = preparation.Preparation.Params(
            corpora=[
                SyntheticText.Params(
                    pairs=params.pairs,
                    sentences=params.sentences,
                    num_words=sum(piece.startswith(_WORD) for piece in made_words.pieces),
                    longest=max(1, min(_LONGEST, params.max_length - 2)),
                )
            ],
            pairs=params.pairs,
            train_split=params.train_split,
            vocabulary_file=str(folder / records.VOCABULARY),
        )
        prepared = recipe.instantiate().run(folder / "records", report=lambda _: None)
        if params.vocabulary_hash is not None:
            prepared.check_vocabulary(params.vocabulary_hash)
        return prepared


def params_like(
    params: Translation.Params, task_params: Task.Params
) -> SyntheticTranslation.Params:
    """Return params of synthetic sentences in place of others; see `Input.Params.synthetic`."""
    pairs = params.pairs or _PAIRS
    split = cast("TranslationTask.Params", task_params).score.split
    held_out = {name for name in ("valid", "test", task_params.eval.split, split) if name}
    count = max(_FEWEST, 4 * params.batch_size // (_LONGEST // 2 * len(pairs)))
    paths = task_params.model.iter_paths()
    sizes = [value for _, value, declared in paths if declared.name == "vocabulary"]
    fields = {name: params.get(name) for name in params.fields()}
    return SyntheticTranslation.Params(**fields).set(
        data_dir="",
        preparation=None,
        pairs=pairs,
        vocabulary=min((s for s in sizes if isinstance(s, int)), default=_VOCABULARY),
        sentences={params.train_split: count, **dict.fromkeys(sorted(held_out), _HELD_OUT)},
        vocabulary_hash=None,
    )


def words(count: int) -> Iterator[str]:
    """Yield different words of six letters.

    >>> list(words(3))
    ['bababa', 'bababe', 'bababi']
    """
    return itertools.islice(map("".join, itertools.product(_SYLLABLES, repeat=3)), count)


def word_vocabulary(size: int, targets: Sequence[str]) -> vocabulary.Vocabulary:
    """Return a vocabulary of `size` pieces, of which as many as possible are made-up words.

    Args:
        size: number of its pieces.
        targets: target languages.

    Raises:
        InputError: the size is too small for bytes and a word, or there are too few words.
    """
    fixed = len(vocabulary.RESERVED) + len(targets) + vocabulary.NUM_BYTES
    if not fixed < size <= fixed + _MOST_WORDS:
        raise errors.InputError(
            f"no vocabulary of {size} pieces can be made. Use a model with a vocabulary of "
            f"{fixed + 1} to {fixed + _MOST_WORDS}"
        )
    training = vocabulary.VocabularyTraining(size=fixed + _SEED_WORDS, num_threads=1)
    trained = vocabulary.train([*words(_SEED_WORDS)] * 4, training, targets)
    proto = _PROTOS.ModelProto.FromString(trained.proto)
    del proto.pieces[fixed:]
    for rank, word in enumerate(words(size - fixed), 1):
        proto.pieces.add(piece=_WORD + word, score=-math.log(1 + rank))
    proto.trainer_spec.vocab_size = size
    return vocabulary.Vocabulary(proto.SerializeToString(), "the made vocabulary")


class SyntheticText(Corpus):
    """A corpus of such sentences."""

    class Params(Corpus.Params):
        """Fields of SyntheticText."""

        pairs: tuple[str, ...] = hyperparams.required("Pairs of languages, such as de:en.")
        sentences: dict[str, int] = hyperparams.required("Split → sentences of each pair.")
        num_words: int = hyperparams.required("Different words.")
        longest: int = hyperparams.required("Most words of a sentence.")

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return "synthetic"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self.params.sentences)

    def pairs(self, split: str) -> frozenset[corpus.Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        del split
        both = [languages_of(pair) for pair in self.params.pairs]
        return frozenset([*both, *(pair[::-1] for pair in both)])

    def examples(
        self, split: str, pairs: Collection[corpus.Languages], faults: corpus.Faults
    ) -> Iterator[corpus.Example]:
        """Yield the examples of a split; see `Corpus.examples`."""
        del faults
        all_words = list(words(self.params.num_words))
        for source, target in {frozenset(pair): pair for pair in pairs}.values():
            distance = zlib.crc32(":".join(sorted((source, target))).encode()) % len(all_words)
            random = np.random.RandomState(zlib.crc32(f"{split} {source} {target}".encode()))
            for number in range(self.params.sentences[split]):
                length = random.randint(1, self.params.longest + 1)
                ranks = (len(all_words) * random.random_sample(length) ** 3).astype(int)
                both = (
                    " ".join(all_words[(rank + shift) % len(all_words)] for rank in ranks)
                    for shift in (0, distance)
                )
                yield (
                    f"synthetic {split}:{number + 1}",
                    dict(zip((source, target), both, strict=True)),
                )
