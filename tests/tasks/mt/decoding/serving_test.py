"""The vocabulary in a graph equals that of training; served translation models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_text

from lingvo_gpipe import pipelining
from lingvo_gpipe.run import export
from lingvo_gpipe.tasks.mt.decoding import search, serving
from lingvo_gpipe.tasks.mt.text import vocabulary
from tests.tasks.mt import toy_model, toy_text

SENTENCES = ["bado keli", "", "munapo ri <2de> </s>", "Ж 語 😀 ﬁ", "  li\tmu\u2028na  "]


def padded(rows: list[list[int]]) -> Any:
    return tf.ragged.constant(rows, dtype=tf.int32).to_tensor()


@pytest.fixture(scope="module")
def tokenizers() -> tuple[vocabulary.Vocabulary, serving.Tokenizer]:
    texts = [*toy_text.sentences(300, 3), "straße naïve 日本語 résumé"]
    made = vocabulary.train(texts, vocabulary.VocabularyTraining(size=360), ["de", "zh-Hans"])
    return made, serving.Tokenizer(made, tensorflow_text)


def samples() -> list[str]:
    """Return texts of every kind: plain, such as control symbols look like, and of any letters."""
    chosen = [
        *SENTENCES,
        *("<2de>", "<2zh-Hans> bado", "<s>bado</s>", "<pad><unk>", "<0x41><0xFF>", "▁bado▁▁keli"),
        *(
            "ﬁ \u210c ① \uff21\uff22\uff23 Å e\u0301",
            "\u00a0\u3000\u200b\ufeffx",
            "a\r\nb\x0bc\x85d\x00e",
            " ",
            "\n",
        ),
        *(
            "שלום مرحبا नमस्ते",
            "👩‍👩‍👧‍👦🇩🇪",
            "\U0001f600\ue000\U0010ffff",
            "日本語 straße",
            "x" * 500,
        ),
    ]
    random = np.random.RandomState(5)
    drawn = (
        "".join(map(chr, random.randint(1, top, length)))
        for top in (0x80, 0x800, 0x3000, 0xD800)
        for length in random.randint(1, 20, 100)
    )
    return [*chosen, *drawn]


def test_text_is_tokenised_in_graph_as_for_training(
    tokenizers: tuple[vocabulary.Vocabulary, serving.Tokenizer],
) -> None:
    made, own = tokenizers
    texts = samples()
    wanted = made.encode_source(texts)
    found = own.encode(tf.constant([text.encode() for text in texts])).numpy()
    for text, row, ids in zip(texts, wanted, found, strict=True):
        assert ids[: len(row)].tolist() == row, text
        assert not ids[len(row) :].any()
        assert min(row[:-1], default=6) > 5, text
    assert {number for row in wanted for number in row} & set(range(6, 262))  # bytes


def test_ids_become_the_same_text(
    tokenizers: tuple[vocabulary.Vocabulary, serving.Tokenizer],
) -> None:
    made, own = tokenizers
    random = np.random.RandomState(6)
    any_ids = random.randint(0, len(made), (60, 12)).tolist()
    rows = [*made.encode_source(samples()), *any_ids, [3, 9, 300], [2, 4, 300, 5, 301, 3, 302], []]
    found = [text.decode() for text in own.decode(padded(rows)).numpy()]
    assert found == made.decode(rows)


def test_texts_begin_with_the_language_that_they_go_to(
    tokenizers: tuple[vocabulary.Vocabulary, serving.Tokenizer],
) -> None:
    made, own = tokenizers
    found = own.encode(tf.constant(["bado", "keli"]), tf.constant(["zh-Hans", "de"]))
    wanted = [*made.encode_source(["bado"], "zh-Hans"), *made.encode_source(["keli"], "de")]
    np.testing.assert_array_equal(found, padded(wanted))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be one of de, zh-Hans"):
        own.encode(tf.constant(["bado"]), tf.constant(["fr"]))


def test_text_comes_with_the_language_where_there_are_several(
    tokenizers: tuple[vocabulary.Vocabulary, serving.Tokenizer],
) -> None:
    made, _ = tokenizers
    program = serving.program(made, search.Search(beam=2, max_length=4), target_tokens=True)
    layers = toy_model.transformer_layers(1, 8, 1, len(made), units=8, head_dim=4)
    own = export.InferenceNetwork(pipelining.PipeliningLayer.Params(layers=layers), program.fields)
    random = np.random.RandomState(7)
    for path in sorted(own.by_path):
        own.by_path[path].assign(random.normal(size=own.by_path[path].shape))
    # However likely they are, no control symbol is ever a translation.
    own.by_path["softmax/bias"].assign(100.0 * tf.reduce_sum(tf.one_hot([4, 5], len(made)), 0))
    ids, text = program.functions(own)
    assert list(text.signature) == ["text", "target_language"]
    found = text.call(tf.constant(["bado", "keli"]), tf.constant(["zh-Hans", "de"]))
    rows = [*made.encode_source(["bado"], "zh-Hans"), *made.encode_source(["keli"], "de")]
    wanted = ids.call(padded(rows))
    assert not np.isin(wanted["target"], [4, 5]).any()
    assert [row.decode() for row in found["translation"].numpy()] == made.decode(
        wanted["target"].numpy()
    )
    np.testing.assert_allclose(found["score"], wanted["score"], rtol=1e-6)
    nothing = ["", " \t", "\u00a0\u3000", "\u200b"]
    languages = ["zh-Hans", *(["de"] * len(nothing))]
    blank = text.call(tf.constant(["bado", *nothing]), tf.constant(languages))
    first = found["translation"].numpy()[0]
    assert blank["translation"].numpy().tolist() == [first, *([b""] * len(nothing))]
    scores = [float(found["score"][0]), *([0.0] * len(nothing))]
    np.testing.assert_allclose(blank["score"], scores, rtol=1e-6)
    without = ids.call(padded([row[1:] for row in rows]))
    assert not np.isclose(found["score"], without["score"]).any()
