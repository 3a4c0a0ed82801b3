"""Training a vocabulary by SentencePiece, on a sample of the text."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import sentencepiece

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import progress
from lingvo_gpipe.tasks.mt.text.vocabulary import BEGIN, END, PAD, RESERVED, UNKNOWN, Vocabulary

_NUM_BYTES = 256
_NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")
# Ranges of the fields of VocabularyTraining: SentencePiece's, except for `sentences`.
_RANGES = {
    "sentences": (1, math.inf),
    "character_coverage": (0.98, 1.0),
    "num_threads": (1, 1024),
    "max_bytes": (10, 2**30),
}


class VocabularyTraining(hyperparams.Params):
    """How a vocabulary is trained."""

    size: int = hyperparams.field(
        64_000, "Maximum number of pieces, with reserved ones; with little text there may be fewer."
    )
    temperature: float = hyperparams.field(5.0, "T of the languages' shares in its text.")
    sentences: int = hyperparams.field(2_000_000, "Maximum number of sentences to train on.")
    character_coverage: float = hyperparams.field(
        0.9995, "Share of the text's characters that get pieces; the others become bytes."
    )
    num_threads: int = hyperparams.field(
        2, "Threads of the training. The vocabulary depends on their number."
    )
    normalization: str = hyperparams.field("nmt_nfkc", "SentencePiece's rule: nmt_nfkc, identity …")
    max_bytes: int = hyperparams.field(4192, "Longer sentences are not trained on.")


def normaliser(rule: str) -> Callable[[str], str]:
    """Return the normalization of a vocabulary that is trained with `rule`.

    Raises:
        InputError: SentencePiece has no such rule.
    """
    try:
        made = sentencepiece.SentencePieceNormalizer(rule_name=rule, remove_extra_whitespaces=True)
    except (RuntimeError, OSError, ValueError) as error:
        near = ", ".join(errors.nearest(rule, _NORMALIZATIONS) or _NORMALIZATIONS)
        raise errors.InputError(
            f"vocabulary.normalization={rule!r} is not a rule of SentencePiece; nearest {near}"
        ) from error
    normalise: Callable[[str], str] = made.normalize
    return normalise


def check(params: VocabularyTraining, num_targets: int) -> None:
    """Refuse params with which no vocabulary can be trained.

    Raises:
        InputError: the size is too small for bytes and control symbols, or another field is out of
            range.
    """
    smallest = len(RESERVED) + num_targets + _NUM_BYTES + 1
    if params.size < smallest:
        raise errors.InputError(
            f"vocabulary.size={params.size} is too small for {num_targets} target tokens and "
            f"{_NUM_BYTES} bytes. Use {smallest} or more"
        )
    if not params.temperature > 0:
        raise errors.InputError(
            f"vocabulary.temperature={params.temperature} is not possible. Use 1 for proportional "
            "shares, more for more equal ones"
        )
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if not least <= value <= most:
            allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise errors.InputError(f"vocabulary.{name}={value} is not possible. Use {allowed}")
    normaliser(params.normalization)


def train(
    texts: Iterable[str], params: VocabularyTraining, targets: Sequence[str] = ()
) -> Vocabulary:
    """Train a unigram vocabulary; equal texts and params produce the same one, bit for bit.

    Args:
        texts: sentences, in an order that does not change between calls.
        params: size and options.
        targets: languages that get a target token.

    Raises:
        InputError: a field of `params` is out of range, or the text is too little for the size.
        BaseException: any exception that `texts` raises.
    """
    check(params, len(targets))
    written = io.BytesIO()
    raised: list[BaseException] = []
    read, done = threading.Event(), threading.Event()

    def show() -> None:
        read.wait()
        if not raised:
            with progress.Count("training the vocabulary", "") as clock:
                while not done.wait(1.0):
                    clock.update()

    # SentencePiece reports no progress, but releases the interpreter lock while it trains, so the
    # clock runs in another thread. The training must be in this thread: a process that exits while
    # another thread is inside SentencePiece is aborted.
    clock = threading.Thread(target=show, daemon=True)
    clock.start()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_watched(texts, raised, read),
            model_writer=written,
            model_type="unigram",
            vocab_size=params.size,
            hard_vocab_limit=False,
            byte_fallback=True,
            character_coverage=params.character_coverage,
            normalization_rule_name=params.normalization,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
            control_symbols=[f"<2{language}>" for language in targets],
            num_threads=params.num_threads,
            max_sentence_length=params.max_bytes,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError) as error:
        if raised:
            raise raised[0] from None
        reason = " ".join(str(error).split()).rpartition("] ")[2] or "there is no text"
        raise errors.InputError(
            f"no vocabulary of {params.size} pieces can be trained: {reason}. Add text, or change "
            "vocabulary.size"
        ) from error
    finally:
        done.set()
        read.set()
        clock.join()
    return Vocabulary(written.getvalue())


def _watched(
    texts: Iterable[str], raised: list[BaseException], read: threading.Event
) -> Iterator[str]:
    """Yield the texts, then set `read`; keep their exception, which SentencePiece would replace."""
    try:
        yield from texts
        read.set()
    except GeneratorExit:  # SentencePiece stopped reading
        raise
    except BaseException as error:
        raised.append(error)
        raise
