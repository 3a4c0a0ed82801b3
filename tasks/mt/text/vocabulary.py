"""One vocabulary for source and target: SentencePiece, with our reserved ids and our sample.

Ids: padding 0, unknown 1, <s> 2, </s> 3, then a control symbol <2xx> for each target language, 256
bytes, pieces. Control symbols come from no text: `<2de>` typed by somebody is five characters.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import progress

PAD, UNKNOWN, BEGIN, END = range(4)
_RESERVED = ("<pad>", "<unk>", "<s>", "</s>")
_NUM_BYTES = 256
_RULES = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")
# What fields of Training may be: SentencePiece's own bounds, but for `sentences`.
_BOUNDS = {
    "sentences": (1, math.inf),
    "character_coverage": (0.98, 1.0),
    "num_threads": (1, 1024),
    "max_bytes": (10, 2**30),
}
_PROTOS: Any = sentencepiece_model_pb2  # its classes are made when it is imported


class Vocabulary:
    """Pieces of words, from text to ids and back; pickles and loads without TensorFlow."""

    def __init__(self, proto: bytes, where: str = "vocabulary") -> None:
        """Take a SentencePiece model.

        Args:
            proto: content of a `.model` file.
            where: its name in messages.

        Raises:
            InputError: it is none, or its reserved ids are not ours.
        """
        self.proto = proto
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._model = _PROTOS.ModelProto.FromString(proto)
            self._processor.LoadFromSerializedProto(proto)
        except Exception as error:  # protobuf and SentencePiece raise classes of their own
            raise errors.InputError(f"{where} is no SentencePiece model. Give another") from error
        found = tuple(piece.piece for piece in self._model.pieces[: len(_RESERVED)])
        ids = (self._processor.pad_id(), self._processor.unk_id(), self._processor.bos_id())
        if ids != (PAD, UNKNOWN, BEGIN) or self._processor.eos_id() != END:
            raise errors.InputError(
                f"{where} begins with {', '.join(found)}, not with {', '.join(_RESERVED)}. Train "
                "it by the prepare command"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `.model` file.

        Raises:
            InputError: it cannot be read, or is none.
        """
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise errors.InputError(
                f"vocabulary {path} cannot be read: {error.strerror}. Give another"
            ) from error
        return cls(proto, f"vocabulary {path}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.proto,)

    def __len__(self) -> int:
        return len(self._model.pieces)

    @property
    def byte_fallback(self) -> bool:
        """Whether a character without a piece becomes its bytes; else it vanishes."""
        return bool(self._model.trainer_spec.byte_fallback)

    @property
    def pieces(self) -> tuple[str, ...]:
        """All pieces in the order of their ids."""
        return tuple(piece.piece for piece in self._model.pieces)

    @functools.cached_property
    def hash(self) -> str:
        """What tells vocabularies apart: sha256 over pieces, scores, kinds and normaliser.

        The file itself also holds settings of its training that change no id.
        """
        digest = hashlib.sha256()
        for piece in self._model.pieces:
            text = piece.piece.encode()
            digest.update(struct.pack("<IfI", len(text), piece.score, piece.type) + text)
        for spec in (self._model.normalizer_spec, self._model.denormalizer_spec):
            digest.update(struct.pack("<I", len(spec.precompiled_charsmap)))
            digest.update(spec.precompiled_charsmap)
            digest.update(
                bytes(
                    (
                        spec.add_dummy_prefix,
                        spec.remove_extra_whitespaces,
                        spec.escape_whitespaces,
                    )
                )
            )
        trainer = self._model.trainer_spec
        digest.update(bytes((trainer.model_type, trainer.byte_fallback)))
        if trainer.treat_whitespace_as_suffix:
            digest.update(b"suffix")  # where it is set alone: all other hashes are as they were
        return digest.hexdigest()

    @functools.cached_property
    def controls(self) -> dict[int, str]:
        """Control symbols by their ids, but for the reserved ones."""
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
            InputError: the vocabulary has none.
        """
        if language not in self.targets:
            told = ", ".join(self.targets) or "none"
            raise errors.InputError(f"vocabulary has no <2{language}>; its target tokens: {told}")
        return int(self._processor.piece_to_id(f"<2{language}>"))

    def normalise(self, text: str) -> str:
        """Return what is cut into pieces; a text of which nothing is left has no ids."""
        return str(self._processor.normalize(text))

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each text, without <s> and </s>; in order at any number of threads."""
        return self._processor.encode(list(texts), out_type=int, num_threads=num_threads)

    def encode_source(self, texts: Sequence[str], target: str | None = None) -> list[list[int]]:
        """Return sources as the encoder reads them: <2target> where one is given, ids, </s>."""
        first = [] if target is None else [self.target_id(target)]
        return [[*first, *ids, END] for ids in self.encode(texts)]

    def decode(self, ids: Iterable[Iterable[int]]) -> list[str]:
        """Return the texts of ids: up to </s>, reserved ids left out."""
        size = len(self)
        rows = []
        for row in ids:
            kept = [int(number) for number in row]
            if END in kept:
                kept = kept[: kept.index(END)]
            rows.append([number for number in kept if UNKNOWN < number < size])
        return self._processor.decode(rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the `.model` file."""
        Path(path).write_bytes(self.proto)


class Training(hyperparams.Params):
    """How a vocabulary is trained."""

    size: int = hyperparams.field(
        64_000, "Pieces at most, reserved ones included; poor text gives fewer."
    )
    temperature: float = hyperparams.field(5.0, "T of the languages' shares in its text.")
    sentences: int = hyperparams.field(2_000_000, "Sentences that it is trained on at most.")
    character_coverage: float = hyperparams.field(
        0.9995, "Share of the text's characters that have pieces; the others are bytes."
    )
    num_threads: int = hyperparams.field(
        2, "Threads of its training: another number gives another vocabulary."
    )
    normalization: str = hyperparams.field("nmt_nfkc", "SentencePiece's rule: nmt_nfkc, identity …")
    max_bytes: int = hyperparams.field(4192, "Longer sentences are left out of its training.")


def normaliser(rule: str) -> Callable[[str], str]:
    """Return what a vocabulary does to a text first that is trained with a rule.

    Raises:
        InputError: SentencePiece has no such rule.
    """
    try:
        made = sentencepiece.SentencePieceNormalizer(rule_name=rule, remove_extra_whitespaces=True)
    except (RuntimeError, OSError, ValueError) as error:
        near = ", ".join(errors.nearest(rule, _RULES) or _RULES)
        raise errors.InputError(
            f"vocabulary.normalization={rule!r} is no rule of SentencePiece; nearest {near}"
        ) from error
    normalise: Callable[[str], str] = made.normalize
    return normalise


def check(params: Training, num_targets: int) -> None:
    """Refuse params of which no text gives a vocabulary.

    Raises:
        InputError: the size has no room for what every vocabulary holds, or another field cannot
            be.
    """
    smallest = len(_RESERVED) + num_targets + _NUM_BYTES + 1
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
    for name, (least, most) in _BOUNDS.items():
        value = getattr(params, name)
        if not least <= value <= most:
            told = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise errors.InputError(f"vocabulary.{name}={value} is not possible. Use {told}")
    normaliser(params.normalization)


def train(texts: Iterable[str], params: Training, targets: Sequence[str] = ()) -> Vocabulary:
    """Train a unigram vocabulary; the same texts and params give the same one, bit for bit.

    Args:
        texts: sentences, in an order that is always the same.
        params: how.
        targets: languages that get a target token.

    Raises:
        InputError: the params cannot be, or the text gives no vocabulary of this size.
        BaseException: whatever `texts` raises.
    """
    check(params, len(targets))
    written = io.BytesIO()
    raised: list[BaseException] = []
    read, done = threading.Event(), threading.Event()

    def show() -> None:
        read.wait()
        if not raised:
            with progress.Count("training the vocabulary", "s") as clock:
                while not done.wait(1.0):
                    clock.update()

    # SentencePiece tells nothing while it trains, but lets other threads run. It trains in this
    # one: a process that ends before another one comes back from it is aborted.
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
            f"no vocabulary of {params.size} pieces can be trained: {reason}. Give more text, or "
            "another vocabulary.size"
        ) from error
    finally:
        done.set()
        read.set()
        clock.join()
    return Vocabulary(written.getvalue())


def _watched(
    texts: Iterable[str], raised: list[BaseException], read: threading.Event
) -> Iterator[str]:
    """Yield the texts, set `read`, and keep what they raise: SentencePiece makes a RuntimeError."""
    try:
        yield from texts
        read.set()
    except GeneratorExit:  # SentencePiece asks for no more
        raise
    except BaseException as error:
        raised.append(error)
        raise
