"""Vocabulary: reserved ids, control symbols, bytes, repeatable bit for bit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import vocabulary
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining
from tests.tasks.mt import toy_text

TEXTS = toy_text.sentences(400, 3)
PROTOS: Any = sentencepiece_model_pb2
SIZE = 320


def trained(*targets: str, texts: list[str] = TEXTS, **fields: Any) -> vocabulary.Vocabulary:
    return vocabulary.train(texts, VocabularyTraining(**{"size": SIZE} | fields), targets)


@pytest.fixture(scope="module")
def made() -> vocabulary.Vocabulary:
    return trained("de", "zh-Hans")


def test_ids_are_in_their_order(made: vocabulary.Vocabulary) -> None:
    assert made.pieces[:7] == (
        *("<pad>", "<unk>", "<s>", "</s>", "<2de>", "<2zh-Hans>"),
        "<0x00>",
    )
    assert made.pieces[261] == "<0xFF>"
    assert len(made) == SIZE
    assert made.targets == ("de", "zh-Hans")
    assert made.controls == {4: "<2de>", 5: "<2zh-Hans>"}
    assert made.target_id("zh-Hans") == 5
    with pytest.raises(errors.InputError, match="has no <2fr>; its target tokens: de, zh-Hans"):
        made.target_id("fr")


@pytest.mark.parametrize("text", ["<2de>", "a <s> </s> <pad> <unk>", "<2zh-Hans> bado", "<0x41>"])
def test_no_text_returns_a_reserved_id(made: vocabulary.Vocabulary, text: str) -> None:
    (ids,) = made.encode([text])
    assert min(ids) > made.target_id("zh-Hans")
    assert made.decode([ids]) == [text]


def test_characters_that_were_not_seen_are_bytes(made: vocabulary.Vocabulary) -> None:
    texts = ["Ж", "語", "😀", "ba\u00e9"]
    assert made.decode(made.encode(texts)) == texts


def test_sources_begin_with_a_target_and_end(made: vocabulary.Vocabulary) -> None:
    (plain,) = made.encode(["bado keli"])
    assert made.encode_source(["bado keli"]) == [[*plain, 3]]
    assert made.encode_source(["bado keli"], "de") == [[4, *plain, 3]]


def test_decoding_ends_at_the_end_and_leaves_out_what_is_reserved(
    made: vocabulary.Vocabulary,
) -> None:
    (ids,) = made.encode(["bado keli"])
    assert made.decode([[2, 4, *ids, 3, *ids], [0, *ids, 0, len(made) + 9], [], [3]]) == [
        "bado keli",
        "bado keli",
        "",
        "",
    ]


def test_the_same_text_trains_the_same_vocabulary_bit_for_bit(made: vocabulary.Vocabulary) -> None:
    again = trained("de", "zh-Hans")
    assert again.proto == made.proto
    assert again.hash == made.hash


def test_tokens_do_not_depend_on_threads(made: vocabulary.Vocabulary) -> None:
    one = made.encode(TEXTS, num_threads=1)
    assert made.encode(TEXTS, num_threads=4) == one
    assert [made.encode([text])[0] for text in TEXTS] == one


def changed(made: vocabulary.Vocabulary, what: str) -> str:
    """Return the hash of a vocabulary of which one thing is changed."""
    proto = PROTOS.ModelProto.FromString(made.proto)
    match what:
        case "piece":
            proto.pieces[-1].piece += "x"
        case "score":
            proto.pieces[-1].score -= 1e-3
        case "normaliser":
            proto.normalizer_spec.precompiled_charsmap = b""
        case "spaces":
            proto.normalizer_spec.remove_extra_whitespaces = False
        case "suffix":
            proto.trainer_spec.treat_whitespace_as_suffix = True
        case "training":
            proto.trainer_spec.num_threads += 1
            proto.trainer_spec.model_prefix = "elsewhere"
    return vocabulary.Vocabulary(proto.SerializeToString()).hash


@pytest.mark.parametrize("what", ["piece", "score", "normaliser", "spaces", "suffix", "training"])
def test_the_hash_sees_what_changes_ids(made: vocabulary.Vocabulary, what: str) -> None:
    assert (changed(made, what) != made.hash) == (what != "training")


def test_a_vocabulary_survives_pickling_and_disk(
    made: vocabulary.Vocabulary, tmp_path: Path
) -> None:
    made.save(tmp_path / "x.model")
    for other in (
        pickle.loads(pickle.dumps(made)),
        vocabulary.Vocabulary.load(tmp_path / "x.model"),
    ):
        assert other.hash == made.hash
        assert other.encode(TEXTS[:9]) == made.encode(TEXTS[:9])


def test_what_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"vocabulary .*none.model cannot be read: No such"):
        vocabulary.Vocabulary.load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_text("no model")
    with pytest.raises(errors.InputError, match=r"bad.model is not a SentencePiece model"):
        vocabulary.Vocabulary.load(tmp_path / "bad.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "other"),
        vocab_size=60,
        minloglevel=2,
    )
    with pytest.raises(
        errors.InputError, match=r"begins with <unk>, <s>, </s>, .*, not with <pad>"
    ):
        vocabulary.Vocabulary.load(tmp_path / "other.model")


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(errors.InputError, match=r"vocabulary.size=100 is too small .* Use 262"):
        trained("de", size=100)
    with pytest.raises(errors.InputError, match=r"no vocabulary of 265 pieces .* Add text"):
        trained("de", size=265)
    with pytest.raises(
        errors.InputError, match="no vocabulary of 320 pieces can be trained: "
    ) as e:
        trained(texts=[])
    assert "\n" not in str(e.value)
    with pytest.raises(errors.InputError, match=r"can be trained: .*nfkcc"):
        trained(normalization="nfkcc")
