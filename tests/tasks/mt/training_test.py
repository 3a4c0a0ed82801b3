"""A translation run: metrics by language, its vocabulary, its exports."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, optim, pipelining, task
from lingvo_gpipe.run import checkpoints, evaluation, export, loop, tensorboard
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.decoding import decode, incremental, score, search
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.decoding.translator import Decoder
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.text import records, vocabulary
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining
from tests.support import programs, saved, tensorboard_files
from tests.support.jobs import job
from tests.tasks.mt import toy_model, toy_text

PAIRS = ("de:en", "sw:en")
COUNTED = ("language_accuracy", "language_log_perplexity")
SENTENCES = ["bado keli", "", "munapo ri <2de> </s>", "Ж 語 😀 ﬁ", "  li\tmu\u2028na  "]


def prepared(folder: Path, **fields: Any) -> Path:
    """Return the folder of records of two pairs, de:en and sw:en; more by fields of Preparation."""
    text = toy_text.write_folder(folder / "text", {"de": 90, "sw": 20}, held_out=4)
    toy_text.params(text, **fields).instantiate().run(folder / "records")
    return folder / "records"


def task_of(data: Path, **model: Any) -> Any:
    """Return a task of three updates on such records; `model` are fields of its network."""
    layers = toy_model.transformer_layers(1, 8, 1, 64_000, units=8, head_dim=4, dropout=0.0)
    return mt_task.TranslationTask.Params(
        model=pipelining.PipeliningLayer.Params(layers=layers, **model),
        input=Translation.Params(
            data_dir=str(data), batch_size=160, max_length=80, num_shapes=1, temperature=1.0
        ),
        train=task.Train(
            optimizer=optim.Optimizer.Params(
                rule=optim.Adafactor.Params(momentum=0.9, min_factored=4),
                learning_rate=optim.InverseSquareRoot.Params(factor=0.4, units=8, warmup_steps=2),
            ),
            average=optim.Average.Params(decay=0.5),
            max_steps=3,
            log_interval_steps=1,
            save_interval_steps=2,
        ),
        decode=Decode(search=search.Search(beam=3, max_length=12), shown=2),
    )


class Run(NamedTuple):
    """A run of three updates in two cells: its task, folder and lines, and those of its export."""

    params: Any
    folder: Path
    lines: list[str]
    exported: list[str]

    @property
    def words(self) -> vocabulary.Vocabulary:
        found: vocabulary.Vocabulary = self.params.input.instantiate().vocabulary
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = prepared(tmp_path_factory.mktemp("data"))
    devices = ("/device:CPU:1", "/device:CPU:0")
    params = task_of(data, num_partitions=2, num_micro_batches=2, devices=devices)
    made = Run(params, tmp_path_factory.mktemp("run"), [], [])
    loop.run(params, made.folder, evaluate=True, report=made.lines.append)
    own = export.run(params, made.folder, report=made.exported.append)
    assert own == made.folder / "export" / "3"
    return made


def test_each_language_has_curves_where_it_was_seen(ran: Run) -> None:
    params, folder, lines, _ = ran
    seen = []
    for batch in itertools.islice(params.input.instantiate().batches(params.model.seed), 3):
        real = tf.reduce_sum(batch["weight"], 1) > 0
        seen.append({PAIRS[n] for n in batch["language"][real].numpy()})
    assert 0 < sum("sw:en" in each for each in seen) < 3
    train, held_out = (tensorboard_files.curves(folder / name) for name in ("train", "eval"))
    for name in COUNTED:
        assert name not in train
        for pair in PAIRS:
            count = sum(pair in each for each in seen)
            assert len(train.get(f"{name}/{pair}", [])) == count
            assert len(held_out[f"{name}/{pair}"]) == 2
    reported = [line.split()[1:] for line in lines if line.startswith("eval ")]
    assert [words[0] for words in reported] == ["step=2", "step=3"]
    for words in reported:
        assert [word.partition("=")[0] for word in words] == [
            *("step", "accuracy", "log_perplexity", "loss"),
        ]


def test_the_vocabulary_is_kept(ran: Run) -> None:
    folder, source = ran.folder, ran.params.input.instantiate()
    assert (folder / records.VOCABULARY).read_bytes() == source.vocabulary.proto
    kept = (folder / records.TARGET_TOKENS).read_text()
    assert kept == f"{source.records.target_tokens}\n"


def test_a_run_continues_to_the_same_bits_only_by_its_own_vocabulary(
    ran: Run, tmp_path: Path
) -> None:
    """Row, column and momentum of the optimizer, and its rate, continue across a checkpoint."""
    own = tmp_path / "run"
    shutil.copytree(ran.folder, own, ignore=shutil.ignore_patterns("ckpt-3.*", "export"))
    lines: list[str] = []
    loop.run(ran.params, own, evaluate=True, report=lines.append)
    assert "restored step=2" in lines
    assert not any(line.startswith("params changed") for line in lines)
    saved.check_same(saved.newest(ran.folder), saved.newest(own))
    before, whole = (
        saved.values(str(ran.folder / "checkpoints" / f"ckpt-{step}")) for step in (2, 3)
    )
    assert before.keys() == whole.keys()
    for part in ("row", "column", "second_moment", "momentum"):
        slots = [key for key in whole if key.endswith(f"/{part}")]
        assert slots, sorted(whole)
        assert any(before[key].tobytes() != whole[key].tobytes() for key in slots)
    other = task_of(prepared(tmp_path, vocabulary=VocabularyTraining(size=320)))
    with pytest.raises(errors.TrainingError, match="holds a run with other params"):
        loop.run(other, own)
    with pytest.raises(errors.TrainingError) as caught:
        evaluation.run(other, own)
    assert str(caught.value) == (
        f"{own}/vocabulary.model is not that of the data: the run began with other data. "
        "Use that data, or another --logdir"
    )


# --- what is exported ----------------------------------------------------------------------------


def test_both_models_are_reported(ran: Run) -> None:
    folder = ran.folder
    assert ran.exported == [
        f"exported step=3 to {folder}/export/3",
        "    serving_default: source int32[N, N] → target int32[N, 12], score float32[N]",
        f"exported step=3 to {folder}/export/text/3",
        "    serving_default: text string[N] → translation string[N], score float32[N]",
    ]


def test_another_process_translates_as_the_search_of_the_trained_network(ran: Run) -> None:
    """Ids by TensorFlow alone; strings by tensorflow-text too; neither by this package."""
    params, folder = ran.params, ran.folder
    rows = ran.words.encode_source(SENTENCES)
    source = tf.ragged.constant(rows, dtype=tf.int32).to_tensor()
    hidden = ("lingvo_gpipe", "sentencepiece", "tensorflow_text", "sklearn", "matplotlib")
    program = f"""
import json
import tensorflow as tf
ids = tf.saved_model.load({str(folder / "export" / "3")!r}).signatures["serving_default"]
outputs = ids(source=tf.constant({source.numpy().tolist()!r}))
hidden.remove("tensorflow_text")
import tensorflow_text
text = tf.saved_model.load({str(folder / "export" / "text" / "3")!r}).signatures["serving_default"]
strings = text(text=tf.constant({SENTENCES!r}))
found = [outputs["target"], outputs["score"], strings["score"]]
translations = [row.decode() for row in strings["translation"].numpy()]
print(json.dumps([*(value.numpy().tolist() for value in found), translations]))
"""
    out = programs.output(programs.hiding(*hidden) + program)
    target, score, own_score, translations = json.loads(out.splitlines()[-1])
    pipe = saved.restored(params, folder)
    settings = params.decode.search
    decoder = incremental.Incremental(pipe.analysis, settings.max_length)
    wanted = search.translate(
        decoder,
        pipe.by_path,
        source,
        settings,
    )
    np.testing.assert_array_equal(target, wanted[0])
    np.testing.assert_allclose(score, wanted[1], rtol=1e-5)
    blank = [not text for text in SENTENCES]
    np.testing.assert_allclose(own_score, np.where(blank, 0.0, score), rtol=1e-6)
    texts = ran.words.decode(target)
    assert translations == [t if s else "" for s, t in zip(SENTENCES, texts, strict=True)]
    assert len(set(translations)) > 2


def test_without_tensorflow_text_ids_alone_are_exported(
    ran: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    lines: list[str] = []
    export.run(ran.params, tmp_path, which=str(ran.folder / "checkpoints"), report=lines.append)
    assert lines[0] == f"exported step=3 to {tmp_path}/export/3"
    assert lines[2:] == [
        "    tensorflow-text is not installed: pip install 'lingvo-gpipe[text]' adds a model from "
        "strings to strings"
    ]
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["3"]


def test_a_run_is_exported_and_decoded_without_its_data(ran: Run, tmp_path: Path) -> None:
    own = tmp_path / "run"
    shutil.copytree(ran.folder, own, ignore=shutil.ignore_patterns("export"))
    params = ran.params.copy()
    params.input.data_dir = str(tmp_path / "gone")
    lines: list[str] = []
    export.run(params, own, report=lines.append)
    assert [line.replace(str(own), str(ran.folder)) for line in lines] == ran.exported
    ids = ran.words.encode(["Meli ya abiria"])[0]
    source = tf.constant([[*ids, vocabulary.END]], tf.int32)
    reported, wanted = (
        tf.saved_model.load(str(folder / "export" / "3")).signatures["serving_default"](
            source=source
        )
        for folder in (own, ran.folder)
    )
    for name, value in wanted.items():
        np.testing.assert_array_equal(reported[name], value)
    decoder = Decoder(params, logdir=own)
    assert (decoder.step, decoder.max_length, decoder.target_tokens) == (3, 80, False)
    assert decoder.vocabulary.hash == ran.words.hash
    checkpoint = str(own / "checkpoints" / "ckpt-3")
    for path, variable in decoder._pipe.by_path.items():
        average = checkpoints.read_value(checkpoint, f"average/{path}")
        np.testing.assert_array_equal(variable, average)
    rows = decoder.translate([source[0].numpy().tolist(), [vocabulary.END]])
    assert all(min(row) > vocabulary.END for row in rows)
    # One that ended has </s> among its twelve tokens.
    assert decoder.cut == sum(len(row) == 12 for row in rows) > 0
    (own / records.TARGET_TOKENS).write_text("True\n")
    assert Decoder(params, checkpoint=checkpoint).target_tokens

    (own / records.TARGET_TOKENS).unlink()
    with pytest.raises(errors.InputError, match="gone"):
        export.run(params, own)
    (own / records.VOCABULARY).write_bytes(b"torn")
    (own / records.TARGET_TOKENS).write_text("False\n")
    with pytest.raises(
        errors.InputError, match="the stored vocabulary is not a SentencePiece model"
    ):
        export.run(params, own)


# --- other data -------------------------------------------------------------------


def test_a_checkpoint_is_evaluated_only_by_its_own_vocabulary(ran: Run, tmp_path: Path) -> None:
    which = str(ran.folder / "checkpoints")
    other = task_of(prepared(tmp_path, seed=1))
    words = other.input.instantiate().vocabulary
    assert len(words) == len(ran.words)
    assert words.hash != ran.words.hash
    with pytest.raises(errors.TrainingError, match=r"vocabulary.model is not that of the data"):
        evaluation.run(other, None, which=which)
    own = evaluation.run(ran.params, None, which=which)
    assert own is not None
    assert own.step == 3

    lines: list[str] = []
    other.train.max_steps = 0
    loop.run(other, tmp_path / "run", start=which, report=lines.append)
    reported = (
        "    another vocabulary.model there: what was learned about its ids is not valid here"
    )
    assert reported in lines
    ran_again = ran.params.copy()
    ran_again.train.max_steps = 0
    loop.run(ran_again, tmp_path / "same", start=which, report=lines.append)
    assert lines.count(reported) == 1


@pytest.mark.reliability_full
def test_a_run_of_both_directions_is_evaluated_decoded_scored_and_exported(tmp_path: Path) -> None:
    """Sources begin with the token of their target language, everywhere."""
    data = prepared(tmp_path, pairs=("de:en", "en:de"))
    params = task_of(data)
    params.train.max_steps = 1
    params.decode.set(shown=0)
    params.decode.search.set(beam=1, max_length=4)
    folder = tmp_path / "run"
    loop.run(params, folder, evaluate=True, report=lambda _: None)
    evaluated = tensorboard_files.curves(folder / "eval")
    assert {f"{name}/{pair}" for name in COUNTED for pair in ("de:en", "en:de")} <= set(evaluated)

    text, found = tmp_path / "in", tmp_path / "out"
    text.write_text("bado keli\n")
    params.decode.set(input=str(text), output=str(found))
    with pytest.raises(errors.ParamsError, match=r"decode\.target is missing: .* de, en\. Try"):
        decode.run(job(params, folder, []))
    reported: list[str] = []
    of_target = {}
    for target in ("de", "en"):
        params.decode.target = target
        decode.run(job(params, folder, reported))
        of_target[target] = found.read_text()
    assert all(line.strip() for line in of_target.values())

    score.run(job(params, folder, reported))
    table = (folder / "score" / "test.tsv").read_text()
    assert "de:en" in table
    assert "en:de" in table

    params.decode.set(input=None, output=None, target=None)
    export.run(params, folder, report=reported.append)
    made = tf.saved_model.load(str(folder / "export" / "text" / "1"))
    serve = made.signatures["serving_default"]
    for target, line in of_target.items():
        served = serve(text=tf.constant(["bado keli"]), target_language=tf.constant([target]))
        assert served["translation"].numpy()[0].decode() == line.removesuffix("\n")


def test_lines_are_decoded_by_the_run_itself(ran: Run, tmp_path: Path) -> None:
    text, found = tmp_path / "in.de", tmp_path / "out.en"
    lines = ["bado keli", "", "munapo ri bado"]
    text.write_text("\n".join(lines))
    params = ran.params.copy()
    params.decode.set(input=str(text), output=str(found))
    reported: list[str] = []
    decode.run(job(params, ran.folder, reported))
    translator = Decoder(params, logdir=ran.folder)
    ids = [[*own, vocabulary.END] for own in ran.words.encode([lines[0], lines[2]])]
    first, third = (
        " ".join(text.splitlines()) for text in ran.words.decode(translator.translate(ids))
    )
    assert found.read_text().split("\n") == [first, "", third, ""]
    (shown, *_) = score.sentences_to_translate(params.input.instantiate(), "test", 2)
    translated = ran.words.decode(translator.translate(shown.ids))
    rows = zip(shown.sources, translated, shown.references, strict=True)
    table = tensorboard.markdown_table(["source", "translation", "reference"], rows)
    assert tensorboard_files.values(ran.folder / "eval", "translations/de:en")[-1] == table
    assert reported[-1] == f"decode step=3 lines=3 empty=1 split=0 replaced=0 to {found}"
