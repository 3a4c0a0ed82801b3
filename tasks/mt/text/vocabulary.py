"""One vocabulary for source and target: a SentencePiece model with our reserved ids, trained here.

Ids: padding 0, unknown 1, <s> 2, </s> 3, then a control symbol <2xx> for each target language, 256
bytes, pieces. No text contains a control symbol: `<2de>` in a sentence is five characters.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_gpipe import errors, hyperparams

PAD, UNKNOWN, BEGIN, END = range(4)
NUM_BYTES = 256
RESERVED = ("<pad>", "<unk>", "<s>", "</s>")
_PROTOS: Any = sentencepiece_model_pb2  # its classes are created when it is imported


class Vocabulary:
    """Splits text into ids of word pieces, and joins them again; needs no TensorFlow.

    Attributes:
        proto: content of the `.model` file.
    """

    def __init__(self, proto: bytes, where: str = "vocabulary") -> None:
        """Load a SentencePiece model.

        Args:
            proto: content of a `.model` file.
            where: its name in messages.

        Raises:
            InputError: it is not a SentencePiece model, or its reserved ids differ from ours.
        """
        self.proto = proto
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._model = _PROTOS.ModelProto.FromString(proto)
            self._processor.LoadFromSerializedProto(proto)
            for piece in self._model.pieces:
                piece.piece.encode()  # protobuf returns bytes where they are not UTF-8
        except Exception as error:  # protobuf and SentencePiece raise classes of their own
            raise errors.InputError(
                f"{where} is not a SentencePiece model. Use another file"
            ) from error
        first = tuple(piece.piece for piece in self._model.pieces[: len(RESERVED)])
        ids = (self._processor.pad_id(), self._processor.unk_id(), self._processor.bos_id())
        if ids != (PAD, UNKNOWN, BEGIN) or self._processor.eos_id() != END:
            raise errors.InputError(
                f"{where} begins with {', '.join(first)}, not with {', '.join(RESERVED)}. Train "
                "it by the prepare command"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `.model` file.

        Raises:
            InputError: it cannot be read, or is not a vocabulary.
        """
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise errors.InputError(
                f"vocabulary {path} cannot be read: {error.strerror}. Use another file"
            ) from error
        return cls(proto, f"vocabulary {path}")

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self.proto,)

    def __len__(self) -> int:
        return len(self._model.pieces)

    @property
    def byte_fallback(self) -> bool:
        """Whether a character without a piece becomes its bytes; otherwise it is dropped."""
        return bool(self._model.trainer_spec.byte_fallback)

    @property
    def pieces(self) -> tuple[str, ...]:
        """All pieces in the order of their ids."""
        return tuple(piece.piece for piece in self._model.pieces)

    @functools.cached_property
    def hash(self) -> str:
        """Identity of the vocabulary: sha256 over pieces, scores, kinds and normalization.

        The file also has training settings that do not change ids, so hashes of files would differ
        between equal vocabularies.
        """
        digest = hashlib.sha256()
        for piece in self._model.pieces:
            text = piece.piece.encode()
            digest.update(struct.pack("<IfI", len(text), piece.score, piece.type) + text)
        for spec in (self._model.normalizer_spec, self._model.denormalizer_spec):
            digest.update(struct.pack("<I", len(spec.precompiled_charsmap)))
            digest.update(spec.precompiled_charsmap)
            spaces = (spec.add_dummy_prefix, spec.remove_extra_whitespaces, spec.escape_whitespaces)
            digest.update(bytes(spaces))
        trainer = self._model.trainer_spec
        kinds = (trainer.model_type, trainer.byte_fallback, trainer.treat_whitespace_as_suffix)
        digest.update(bytes(kinds))
        return digest.hexdigest()

    @functools.cached_property
    def controls(self) -> dict[int, str]:
        """Control symbols by their ids, without the reserved ones."""
        control = _PROTOS.ModelProto.SentencePiece.CONTROL
        pieces = enumerate(self._model.pieces)
        return {
            number: each.piece for number, each in pieces if number > END and each.type == control
        }

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """Languages that have a target token."""
        return tuple(name[2:-1] for name in self.controls.values() if name.startswith("<2"))

    def target_id(self, language: str) -> int:
        """Return the id of <2language>.

        Raises:
            InputError: the vocabulary does not have it.
        """
        if language not in self.targets:
            targets = ", ".join(self.targets) or "none"
            raise errors.InputError(
                f"vocabulary has no <2{language}>; its target tokens: {targets}"
            )
        return int(self._processor.piece_to_id(f"<2{language}>"))

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each text, without <s> and </s>; equal at any number of threads.

        The lists are in the order of `texts`.
        """
        return self._processor.encode(list(texts), out_type=int, num_threads=num_threads)

    def encode_source(self, texts: Sequence[str], target: str | None = None) -> list[list[int]]:
        """Return sources as the encoder reads them: <2target> if `target` is set, ids, </s>."""
        first = [] if target is None else [self.target_id(target)]
        return [[*first, *ids, END] for ids in self.encode(texts)]

    def decode(self, ids: Iterable[Iterable[int]]) -> list[str]:
        """Return the texts of ids: up to </s>, without reserved ids."""
        size = len(self)
        rows = []
        for row in ids:
            numbers = [int(number) for number in row]
            if END in numbers:
                numbers = numbers[: numbers.index(END)]
            rows.append([number for number in numbers if UNKNOWN < number < size])
        return self._processor.decode(rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the `.model` file."""
        Path(path).write_bytes(self.proto)


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
    normalization: str = hyperparams.field(
        "nmt_nfkc",
        "SentencePiece's rule, also for targets: nmt_nfkc makes m² m2, identity alters nothing.",
    )
    max_bytes: int = hyperparams.field(4192, "Longer sentences are not trained on.")


def check_size(params: VocabularyTraining, num_targets: int) -> None:
    """Refuse a size without room for bytes and control symbols.

    Raises:
        InputError: it is too small.
    """
    smallest = len(RESERVED) + num_targets + NUM_BYTES + 1
    if params.size < smallest:
        raise errors.InputError(
            f"vocabulary.size={params.size} is too small for {num_targets} target tokens and "
            f"{NUM_BYTES} bytes. Use {smallest} or more"
        )


def train(
    texts: Sequence[str], params: VocabularyTraining, targets: Sequence[str] = ()
) -> Vocabulary:
    """Train a unigram vocabulary; equal texts and params produce the same one, bit for bit.

    Args:
        texts: sentences.
        params: size and options.
        targets: languages that get a target token.

    Raises:
        InputError: a field of `params` is out of range, or the text is too little for the size.
    """
    check_size(params, len(targets))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
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
        reason = " ".join(str(error).split()).rpartition("] ")[2] or "there is no text"
        raise errors.InputError(
            f"no vocabulary of {params.size} pieces can be trained: {reason}. Add text, or change "
            "vocabulary.size"
        ) from error
    return Vocabulary(model.getvalue())
