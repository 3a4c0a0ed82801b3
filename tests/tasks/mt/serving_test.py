"""Exported translation: from ids to ids by TensorFlow alone, from strings to strings beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_text

from lingvo_gpipe import evaluation, export, pipelining, task, train_loop
from lingvo_gpipe.tasks.mt import incremental, search, serving, transformer, vocabulary
from tests.tasks.mt import toy_run, toy_text

SENTENCES = ["bado keli", "", "munapo ri <2de> </s>", "Ж 語 😀 ﬁ", "  li\tmu\u2028na  "]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[str]]:
    """Give the task and folder of a run in two cells, exported, and the lines of the export."""
    data = toy_run.prepared(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("run")
    params = toy_run.task_of(
        data, num_partitions=2, num_micro_batches=2, devices=("/device:CPU:1", "/device:CPU:0")
    )
    train_loop.run(params, folder)
    lines: list[str] = []
    assert export.run(params, folder, report=lines.append) == folder / "export" / "3"
    return params, folder, lines


@pytest.fixture(scope="module")
def words(exported: tuple[Any, Path, list[str]]) -> vocabulary.Vocabulary:
    found: vocabulary.Vocabulary = exported[0].input.instantiate().vocabulary
    return found


def padded(rows: list[list[int]]) -> Any:
    return tf.ragged.constant(rows, dtype=tf.int32).to_tensor()


def test_both_models_are_told(exported: tuple[Any, Path, list[str]]) -> None:
    _, folder, lines = exported
    assert lines == [
        f"exported step=3 to {folder}/export/3",
        "    serving_default: source int32[N, N] → target int32[N, 12], score float32[N]",
        f"exported step=3 to {folder}/export/text/3",
        "    serving_default: text string[N] → translation string[N], score float32[N]",
    ]


def test_another_process_translates_as_the_search_of_the_trained_network(
    exported: tuple[Any, Path, list[str]], words: vocabulary.Vocabulary
) -> None:
    """Ids by TensorFlow alone; strings by tensorflow-text too; neither by this package."""
    params, folder, _ = exported
    source = words.encode_source(SENTENCES)
    program = f"""
import json, sys
class Hidden:
    names = ["lingvo_gpipe", "sentencepiece", "tensorflow_text"]
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Hidden())
import tensorflow as tf
ids = tf.saved_model.load({str(folder / "export" / "3")!r}).signatures["serving_default"]
told = ids(source=tf.constant({padded(source).numpy().tolist()!r}))
Hidden.names.remove("tensorflow_text")
import tensorflow_text
text = tf.saved_model.load({str(folder / "export" / "text" / "3")!r}).signatures["serving_default"]
strings = text(text=tf.constant({SENTENCES!r}))
found = [told["target"], told["score"], strings["score"]]
translations = [row.decode() for row in strings["translation"].numpy()]
print(json.dumps([*(value.numpy().tolist() for value in found), translations]))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    target, score, own_score, translations = json.loads(run.stdout.splitlines()[-1])
    reader = evaluation.Reader(task.complete(params), str(folder / "checkpoints"))
    reader.evaluate(None)
    settings = params.decode.search
    decoder = incremental.Incremental(reader.pipe.analysis, settings.max_length)
    wanted = search.translate(decoder, reader.pipe.by_path, padded(source), settings)
    np.testing.assert_array_equal(target, wanted[0])
    np.testing.assert_allclose(score, wanted[1], rtol=1e-5)
    np.testing.assert_allclose(own_score, score, rtol=1e-6)
    assert translations == words.decode(target)
    assert len(set(translations)) > 2


def test_nothing_of_the_run_is_left_in_the_model(
    exported: tuple[Any, Path, list[str]], words: vocabulary.Vocabulary
) -> None:
    _, folder, _ = exported
    own = folder / "export" / "3"
    served = tf.saved_model.load(str(own)).signatures["serving_default"]
    graph = served.graph.as_graph_def()
    every = [*graph.node, *(node for own in graph.library.function for node in own.node_def)]
    assert {node.device for node in every} == {""}
    content = (own / "saved_model.pb").read_bytes()
    for text in (b"lingvo", b"Sentencepiece", str(folder).encode(), str(Path.home()).encode()):
        assert text not in content
    for model in (own, folder / "export" / "text" / "3"):
        assert (model / "assets" / "vocabulary.model").read_bytes() == words.proto


def test_without_tensorflow_text_ids_alone_are_exported(
    exported: tuple[Any, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, folder, _ = exported
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    lines: list[str] = []
    export.run(params, tmp_path, which=str(folder / "checkpoints"), report=lines.append)
    assert lines[0] == f"exported step=3 to {tmp_path}/export/3"
    assert lines[2:] == [
        "    tensorflow-text is not installed: pip install 'lingvo-gpipe[text]' adds a model from "
        "strings to strings"
    ]
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["3"]


# --- the tokenizer -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers() -> tuple[vocabulary.Vocabulary, serving.Tokenizer]:
    texts = [*toy_text.sentences(300, 3), "straße naïve 日本語 résumé"]
    made = vocabulary.train(iter(texts), vocabulary.Training(size=360), ["de", "zh-Hans"])
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
    layers = transformer.translation_transformer(1, 8, 1, len(made), units=8, head_dim=4)
    own = export.Network(pipelining.PipeliningLayer.Params(layers=layers), program.fields)
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
    without = ids.call(padded([row[1:] for row in rows]))
    assert not np.isclose(found["score"], without["score"]).any()
