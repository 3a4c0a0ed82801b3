"""The command that prepares records: flags, printed lines, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import records
from lingvo_gpipe.tasks.mt.text.corpora import django_catalogues, text_files, tfds_corpus
from tests.tasks.mt import toy_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_text.write_folder(tmp_path_factory.mktemp("text"), {"de": 300, "sw": 40})


def test_the_command_makes_records(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        f"--output={tmp_path / 'out'}",
        "--vocabulary_size=330",
        "--pairs=de:en,en:de",
        "--override=corpora[1].strict=True",
        "--override=seed=3",
        "--threads=1",
    ]
    for split in ("train", "test"):
        paths = ",".join(str(folder / "de" / f"{name}.{split}.txt") for name in ("en", "de"))
        flags.append(f"--aligned=en,de:{split}={paths}")
    assert prepare.run(flags) == 0
    reported = capsys.readouterr().out.splitlines()
    assert "read 600 training pairs" in reported
    assert reported[-1] == f"{tmp_path / 'out'}: 2 pairs of languages, complete"
    found = records.Records(tmp_path / "out")
    assert list(found.spans) == ["test", "train"]
    assert "corpora[1].strict: True" in found.manifest["params"]
    assert "seed: 3" in found.manifest["params"]


def test_flags_name_corpora_of_every_kind() -> None:
    values = prepare.flags().read(
        [
            "--output=x",
            "--translate_folder=a",
            "--aligned=en,de:train=b.en,b.de",
            "--tsv=en,de:test=c.tsv.gz",
            "--tfds=wmt14_translate/de-en",
            "--tfds_dir=d",
            "--django",
        ]
    )
    assert values is not None
    assert prepare._corpora(values) == [
        text_files.TranslateFolder.Params(folder="a"),
        text_files.Aligned.Params(files={"train": {"en": "b.en", "de": "b.de"}}),
        text_files.TSV.Params(languages=("en", "de"), files={"test": "c.tsv.gz"}),
        tfds_corpus.TFDSCorpus.Params(dataset="wmt14_translate/de-en", tfds_dir="d"),
        django_catalogues.Django.Params(),
    ]


# Flags → what the line says.
MISTAKES = {
    "": "ParamsError: --output=FOLDER is missing",
    "--output=x": "ParamsError: there is no corpus. Use --translate_folder",
    "--output=x --tsv=a.tsv": "ParamsError: --tsv=a.tsv is not of the form LANG,LANG",
    "--output=x --aligned=a,b:c=d": "has 1 files for 2 languages",
    "--output=x --translate_folder=/none": "InputError: corpus folder /none holds no LANG",
    "--output=x --django --override=vocabulry.size=3": (
        "has no field 'vocabulry.size'; nearest 'vocabulary.size'"
    ),
    "--output=x --tsv=en,de:train=a --tsv=en,de:../evil=a": (
        "InputError: tsv: split or language '../evil' cannot be part of a file name. Use"
    ),
    "--output=x --django --pairs=de:enn": "no corpus has the pair 'de:enn'",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_users_mistake_is_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.run(flags.split()) == 1
    reported = capsys.readouterr()
    assert MISTAKES[flags] in reported.err
    assert reported.err.count("\n") == 1
    assert not reported.out
