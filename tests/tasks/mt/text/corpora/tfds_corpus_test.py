"""From the name of a TFDS translation dataset to records, without a network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import records
from lingvo_gpipe.tasks.mt.text.corpora import text_files, tfds_corpus
from tests.tasks.mt import toy_text
from tests.tasks.mt.text.corpora.corpus_test import read, read_all

EXAMPLES = 30


def params_of(name: str, **fields: Any) -> Any:
    made = {"tfds_dir": "/nonexistent", "split_names": {"train": "train"}} | fields
    return tfds_corpus.TFDSCorpus.Params(dataset=name, **made)


def test_a_name_of_tfds_becomes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tfds.testing.mock_data(num_examples=EXAMPLES):
        code = prepare.run(
            [
                f"--output={tmp_path / 'records'}",
                f"--tfds_dir={tmp_path / 'tfds'}",
                "--tfds=wmt14_translate/de-en",
                "--tfds=ted_hrlr_translate/az_to_en",
                "--override=corpora[0].split_names={'train': 'train', 'valid': 'validation'}",
                "--override=corpora[1].split_names={'train': 'train', 'valid': 'validation'}",
                "--pairs=az:en,de:en,en:de",
                "--vocabulary_size=400",
            ]
        )
        builder = tfds.builder("wmt14_translate/de-en", data_dir=str(tmp_path / "tfds"))
        truth = {
            (example["de"].decode(), example["en"].decode())
            for example in tfds.as_numpy(builder.as_dataset(split="validation"))
        }
    reported = capsys.readouterr()
    assert code == 0, reported.err
    found = records.Records(tmp_path / "records")
    assert found.pairs == ("az:en", "de:en", "en:de")
    for split in ("train", "valid"):
        spans = {span.pair: span for span in found.split(split).spans}
        assert set(spans) == set(found.pairs)
        assert 0 < spans["de:en"].count <= EXAMPLES
        assert spans["de:en"].count == spans["en:de"].count
    assert set(found.text("valid", "de:en")) <= truth
    train = found.split("train")
    there, back = (next(s for s in train.spans if s.pair == pair) for pair in ("de:en", "en:de"))
    # Both directions of a pair are the same sentences, with the target's token before the source.
    for number in range(3):
        source, target = train.example(there.first + number)
        source_back, target_back = train.example(back.first + number)
        np.testing.assert_array_equal(source[1:], target_back)
        np.testing.assert_array_equal(source_back[1:], target)
        tokens = (source[0], source_back[0])
        assert tokens == tuple(found.vocabulary.target_id(name) for name in ("en", "de"))


def test_validation_is_valid() -> None:
    """A dataset that is prepared knows its splits; one of mock data does not."""
    made = tfds_corpus.TFDSCorpus.Params(dataset="wmt14_translate/de-en").instantiate()
    splits = {"train": 9, "validation": 3, "test": 3}
    made.__dict__["_builder"] = SimpleNamespace(info=SimpleNamespace(splits=splits))
    assert made.splits == ("train", "valid", "test")


def test_a_translate_folder_is_read_as_tfds_reads_it(tmp_path: Path) -> None:
    text = toy_text.write_folder(tmp_path, {"de": 30}) / "de"
    theirs = tfds.TranslateFolder(str(text)).as_dataset(split="train").as_numpy_iterator()
    ours = read(text_files.TranslateFolder.Params(folder=str(text)))
    assert [(pair["de"].decode(), pair["en"].decode()) for pair in theirs] == ours
    assert len(ours) == 30


def nested(*examples: dict[str, str]) -> Any:
    """Return a mock of a dataset of which each example has some of many languages."""
    rows = [{"language": [*row], "translation": [*row.values()]} for row in examples]
    # A second sentence in a language.
    rows[0] = {name: [*values, values[0]] for name, values in rows[0].items()}
    spec = {name: tf.TensorSpec([None], tf.string) for name in ("language", "translation")}

    def as_dataset(builder: Any, **_: Any) -> tf.data.Dataset:
        del builder
        dataset = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
        return dataset.map(lambda row: {"translations": row, "talk_name": "x"})

    return tfds.testing.mock_data(as_dataset_fn=as_dataset)


def test_examples_of_many_languages_have_each_pair() -> None:
    params = params_of("ted_multi_translate")
    rows = ({"de": "ja", "en": "yes", "fr": "oui"}, {"en": "no", "fr": ""}, {"de": "was"})
    with nested(*rows):
        pairs = params.instantiate().pairs("train")
        assert {("de", "en"), ("fr", "de"), ("pt-br", "en")} <= pairs
        found, counts, lines = read_all(params, "de:en", "en:fr")
    assert found == [("de:en", ("ja", "yes")), ("en:fr", ("yes", "oui"))]
    assert counts == {"repeated": 1, "empty": 1}
    assert lines == [
        "repeated\tted_multi_translate train:0\tanother sentence in de is left out",
        "empty\tted_multi_translate train:1\tfr: sentence is empty",
    ]


def test_what_is_no_translation_dataset_is_refused() -> None:
    def refused(text: str, params: Any) -> None:
        with pytest.raises(errors.InputError, match=text) as caught:
            params.instantiate().pairs("train")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300

    refused("TFDS has no dataset 'wmt14'; ", params_of("wmt14"))
    refused("is not prepared in .*Allow its download", params_of("mnist", download=False))
    with tfds.testing.mock_data(num_examples=1):
        refused("'mnist' is not a translation dataset: its features are", params_of("mnist"))
