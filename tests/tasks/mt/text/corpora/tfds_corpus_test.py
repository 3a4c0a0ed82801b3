"""From the name of a TFDS translation dataset to records, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe import errors
from lingvo_gpipe.tasks import tfds_preparing
from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import records
from lingvo_gpipe.tasks.mt.text.corpora import tfds_corpus
from lingvo_gpipe.tasks.mt.text.corpora.faults import FaultPolicy, Faults

EXAMPLES = 30


def test_a_name_of_tfds_becomes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_preparing, "network_fault", lambda _: None)
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
        truth = [
            (example["de"].decode(), example["en"].decode())
            for example in tfds.as_numpy(builder.as_dataset(split="validation"))
        ]
    reported = capsys.readouterr()
    assert code == 0, reported.err
    found = records.Records(tmp_path / "records")
    assert found.pairs == ("az:en", "de:en", "en:de")
    assert found.splits == ("train", "valid")
    for split in found.splits:
        spans = {span.pair: span for span in found.split(split).spans}
        assert set(spans) == set(found.pairs)
        assert 0 < spans["de:en"].count <= EXAMPLES
        assert spans["de:en"].count == spans["en:de"].count
        assert spans["de:en"].corpora == {"wmt14_translate/de-en": spans["de:en"].count}
        assert spans["az:en"].corpora == {"ted_hrlr_translate/az_to_en": spans["az:en"].count}
    pairs = list(zip(*found.text("valid", "de:en"), strict=True))
    assert set(pairs) <= set(truth)
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
    assert made._split_names["valid"] == "validation"


@pytest.mark.parametrize(
    ("kept_bytes", "text"),
    [(200, "after example 5 of split 'train': truncated record at 180"), (None, "No such file")],
)
def test_a_file_that_is_torn_or_lost_ends_in_one_line(
    tmp_path: Path, kept_bytes: int | None, text: str
) -> None:
    path = tmp_path / "train.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(9):
            writer.write(f"sentence number {number}: tail".encode()[:20])
    if kept_bytes is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept_bytes])
    made = tfds_corpus.TFDSCorpus.Params(dataset="a/b").instantiate()
    both = tf.data.TFRecordDataset(str(path)).map(lambda line: {"de": line, "en": line})
    made.__dict__["_builder"] = SimpleNamespace(
        as_dataset=lambda **_: both, data_path=tmp_path, info=SimpleNamespace(splits={"train": 9})
    )
    made.__dict__.update(_languages=("de", "en"), _nested=None)
    read = []
    with pytest.raises(errors.InputError) as caught:
        read.extend(made.read("train", {("de", "en"): Faults(FaultPolicy())}))
    reported = str(caught.value)
    assert reported.startswith("TFDS dataset 'a/b' cannot be read after example ")
    assert text in reported
    assert reported.endswith(f". Remove {tmp_path} and prepare it again")
    assert not {"\n", "{", "["} & set(reported)


def nested(*texts: tuple[str, str]) -> dict[str, Any]:
    """Return an example of some of many languages, as TFDS returns it."""
    names, sentences = (
        np.array([side.encode() for side in sides]) for sides in zip(*texts, strict=True)
    )
    return {"translations": {"language": names, "translation": sentences}}


def test_examples_of_many_languages_are_decoded_once_for_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = [
        nested(("de", "eins"), ("en", "one"), ("fr", "un")),
        nested(("en", "two"), ("fr", "deux")),
        nested(("de", ""), ("en", "three"), ("fr", "trois")),
        nested(("de", "vier"), ("en", "four"), ("de", "viere"), ("en", "fore"), ("fr", "quatre")),
    ]
    made = tfds_corpus.TFDSCorpus.Params(dataset="a/b").instantiate()
    made.__dict__.update(_nested="translations", _split_names={"train": "train"})
    passes: list[str] = []

    def read_all(own: str) -> Iterator[dict[str, Any]]:
        passes.append(own)
        return iter(examples)

    monkeypatch.setattr(made, "_examples", read_all)
    policy = FaultPolicy()
    wanted = {both: Faults(policy) for both in (("de", "en"), ("fr", "en"), ("fr", "de"))}
    found = list(made.read("train", wanted))
    assert passes == ["train"]
    for both, faults in wanted.items():
        apart = Faults(policy)
        alone = [pair for _, pair in made.read("train", {both: apart})]
        assert [pair for name, pair in found if name == both] == alone
        assert (faults.counts, faults.examples) == (apart.counts, apart.examples)
    # The first of two sentences of a language is taken, and the other counted.
    texts = [(pair.source, pair.target) for name, pair in found if name == ("de", "en")]
    assert texts == [("eins", "one"), ("vier", "four")]
    assert [faults.counts for faults in wanted.values()] == [
        {"empty": 1, "repeated": 1},
        {"repeated": 1},
        {"empty": 1, "repeated": 1},
    ]
    assert wanted["de", "en"].examples["repeated"] == [
        "a/b train:3: all but the first sentence in de and en is left out"
    ]


def test_a_name_that_tfds_does_not_have_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--output={tmp_path / 'records'}", "--tfds=wmt14_translat/de-en"]
    assert prepare.run(flags) == 1
    reported = capsys.readouterr().err
    assert reported.startswith(
        "InputError: TFDS has no dataset 'wmt14_translat/de-en'; nearest wmt14"
    )
    assert reported.count("\n") == 1
    assert not (tmp_path / "records").exists()
