"""Made-up sentences and a vocabulary for them, which take the whole way of real ones."""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sentencepiece import sentencepiece_model_pb2

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.text import preparation, records, vocabulary_training
from lingvo_gpipe.tasks.mt.text.corpora import made_text
from lingvo_gpipe.tasks.mt.text.corpora.corpus import languages_of
from lingvo_gpipe.tasks.mt.text.vocabulary import RESERVED, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.task import TranslationTask

_PAIRS = ("de:en", "fr:en", "sw:en")
_VOCABULARY = 1000
_NUM_BYTES = 256
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
        made_words = vocabulary(
            params.vocabulary, sorted({languages_of(p)[1] for p in params.pairs})
        )
        num_words = sum(piece.startswith(_WORD) for piece in made_words.pieces)
        folder = Path(tempfile.mkdtemp(prefix="lingvo_gpipe_made_"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # at exit, at the latest
        made_words.save(folder / records.VOCABULARY)
        recipe = preparation.Preparation.Params(
            corpora=[
                made_text.MadeText.Params(
                    pairs=params.pairs,
                    sentences=params.sentences,
                    num_words=num_words,
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

    def is_there(self) -> bool:
        """Return False: sizes are those declared; see `Input.is_there`."""
        return False


def params_like(
    params: Translation.Params, task_params: Task.Params
) -> SyntheticTranslation.Params:
    """Return params of made sentences in place of others; see `Input.Params.made`."""
    pairs: tuple[str, ...] = params.instantiate().params.pairs or _PAIRS
    split = cast("TranslationTask.Params", task_params).score.split
    held_out = {name for name in ("valid", "test", task_params.eval.split, split) if name}
    count = max(_FEWEST, 4 * params.batch_size // (_LONGEST // 2 * len(pairs)))
    fields = {
        name: params.get(name)
        for name in SyntheticTranslation.Params.fields()
        if name in params.fields()
    }
    return SyntheticTranslation.Params(**fields).set(
        data_dir="",
        preparation=None,
        pairs=pairs,
        vocabulary=_vocabulary_size(task_params),
        sentences={params.train_split: count, **dict.fromkeys(sorted(held_out), _HELD_OUT)},
        vocabulary_hash=None,
        records=None,
    )


def _vocabulary_size(task_params: Task.Params) -> int:
    """Return the smallest vocabulary of the model's layers."""
    paths = task_params.model.iter_paths()
    sizes = [value for _, value, declared in paths if declared.name == "vocabulary"]
    return min((size for size in sizes if isinstance(size, int)), default=_VOCABULARY)


@functools.cache
def _trained(targets: tuple[str, ...], size: int) -> Vocabulary:
    """Return a vocabulary that is trained on a few words."""
    text = list(made_text.words(_SEED_WORDS))
    training = vocabulary_training.VocabularyTraining(size=size, num_threads=1)
    return vocabulary_training.train(text * 4, training, targets)


def vocabulary(size: int, targets: Sequence[str]) -> Vocabulary:
    """Return a vocabulary of `size` pieces, of which as many as possible are made-up words.

    Args:
        size: number of its pieces.
        targets: target languages.

    Raises:
        InputError: the size is too small for bytes and a word, or there are too few words.
    """
    fixed = len(RESERVED) + len(targets) + _NUM_BYTES
    if not fixed < size <= fixed + made_text.MOST_WORDS:
        raise errors.InputError(
            f"no vocabulary of {size} pieces can be made. Use a model with a vocabulary of "
            f"{fixed + 1} to {fixed + made_text.MOST_WORDS}"
        )
    proto = _PROTOS.ModelProto.FromString(_trained(tuple(targets), fixed + _SEED_WORDS).proto)
    del proto.pieces[fixed:]
    for rank, word in enumerate(made_text.words(size - fixed), 1):
        proto.pieces.add(piece=_WORD + word, score=-math.log(1 + rank))
    proto.trainer_spec.vocab_size = size
    return Vocabulary(proto.SerializeToString(), "the made vocabulary")
