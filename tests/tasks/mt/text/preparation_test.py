"""From corpora to records: what they hold, what is refused, what is left after a failure."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import preparation, records
from lingvo_gpipe.tasks.mt.text.corpora import text_files
from lingvo_gpipe.tasks.mt.text.records import PairText
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining
from tests.support import programs
from tests.tasks.mt import toy_text

SIZES = {"de": 300, "sw": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_text.write_folder(tmp_path_factory.mktemp("text"), SIZES)


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> records.Records:
    output = tmp_path_factory.mktemp("records") / "both"
    params = toy_text.params(folder, pairs=("de:en", "sw:en", "en:de"))
    return params.instantiate().run(output, num_threads=2)


def text_of(folder: Path, language: str, name: str, split: str) -> list[str]:
    return (folder / language / f"{name}.{split}.txt").read_text().splitlines()


def run(params: Any, output: Path) -> tuple[records.Records, list[str]]:
    """Prepare; return the records and the lines that were reported."""
    lines: list[str] = []
    return params.instantiate().run(output, report=lines.append), lines


# --- What is made ---------------------------------------------------------------------------------


def test_every_sentence_is_read_back_by_its_number(made: records.Records, folder: Path) -> None:
    for split in ("train", "test"):
        found = made.split(split)
        for span in found.spans:
            source, _, target = span.pair.partition(":")
            foreign = source if target == "en" else target
            sides = [text_of(folder, foreign, name, split) for name in (source, target)]
            assert span.count == len(sides[0])
            for place in (0, 1, span.count - 1):
                ids = found.example(span.first + place)
                first = made.vocabulary.target_id(target)
                assert ids[0][0] == first
                assert made.vocabulary.decode(ids) == [side[place] for side in sides]
            lengths = found.lengths[span.first : span.first + span.count]
            assert [span.source_tokens, span.target_tokens] == lengths.sum(0).tolist()
        assert sum(span.count for span in found.spans) == len(found)


def test_the_manifest_reports_what_is_there(made: records.Records) -> None:
    assert made.pairs == ("de:en", "sw:en", "en:de")
    assert list(made.spans) == ["test", "train"]
    assert made.target_tokens
    assert made.manifest["vocabulary"]["size"] == len(made.vocabulary)
    assert made.manifest["vocabulary"]["num_threads"] == 2
    assert [span.count for span in made.spans["train"]] == [300, 40, 300]
    assert made.manifest["faults"] == {"text0": {}} or list(made.manifest["faults"].values()) == [
        {}
    ]


def test_text_that_is_not_trained_on_is_kept(made: records.Records, folder: Path) -> None:
    both = (text_of(folder, "de", name, "test") for name in ("en", "de"))
    assert made.text("test", "en:de") == list(zip(*both, strict=True))
    with pytest.raises(errors.InputError, match="has no text of pair 'de:en' in split 'train'"):
        made.text("train", "de:en")


def test_one_target_language_needs_no_target_token(folder: Path, tmp_path: Path) -> None:
    found, lines = run(toy_text.params(folder), tmp_path / "out")
    assert found.pairs == ("de:en", "sw:en")
    assert not found.target_tokens
    (source, _) = found.split("train").example(0)
    assert source[0] != found.vocabulary.target_id("en")
    stages = [line.partition(" ")[0] for line in lines]
    assert stages == ["preparing", "read", "training", "vocabulary", "test:", "train:"]
    assert "preparing 2 pairs of languages: de:en, sw:en" in lines
    assert "training a vocabulary of 330 pieces on 680 sentences" in lines


def test_records_are_the_same_at_any_number_of_threads(
    made: records.Records, folder: Path, tmp_path: Path
) -> None:
    params = toy_text.params(folder, pairs=("de:en", "sw:en", "en:de"))
    params.instantiate().run(tmp_path / "out", num_threads=1)
    names = sorted(p.relative_to(made.folder) for p in made.folder.rglob("*") if p.is_file())
    assert len(names) == 7 + 2 * 3
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (made.folder / name).read_bytes()


def test_the_vocabulary_sees_languages_by_temperature(tmp_path: Path) -> None:
    texts = {PairText(tmp_path, "train", f"{name}:en"): size for name, size in SIZES.items()}
    for text, size in texts.items():
        text.append([(f"{text.pair[:2]} {n}", f"en {n}") for n in range(size)])
    # Its other direction counts once.
    back = PairText(tmp_path, "train", "en:de")
    back.append([sentences[::-1] for sentences in next(iter(texts)).sentences()])
    texts[back] = SIZES["de"]
    sizes = {"de": 300, "en": 340, "sw": 40}
    for temperature in (1.0, 5.0):
        training = VocabularyTraining(temperature=temperature, sentences=200)
        lines = preparation.sampled(texts, training, 0)
        assert len(lines) == 200
        assert preparation.sampled(texts, training, 0) == lines
        assert preparation.sampled(texts, training, 1) != lines
        total = sum(size ** (1 / temperature) for size in sizes.values())
        for language, size in sizes.items():
            share = sum(line.startswith(f"{language} ") for line in lines) / 200
            assert abs(share - size ** (1 / temperature) / total) <= 1 / 200 + 1e-9


def test_more_pairs_than_files_that_may_be_open_are_prepared(tmp_path: Path) -> None:
    languages = [f"l{n}" for n in range(70)]
    lines = ["\t".join(f"{word} {n}" for n in range(71)) for word in toy_text.sentences(30, 1)]
    (tmp_path / "text.tsv").write_text("".join(f"{line}\n" for line in lines))
    table = text_files.TSV.Params(
        languages=(*languages, "en"), files={"train": str(tmp_path / "text.tsv")}
    )
    params = toy_text.params(tmp_path, corpora=[table])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    already_open = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (already_open + 30, hard))
    try:
        found, _ = run(params, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [span.count for span in found.spans["train"]] == [30] * 70


# --- What is left out -----------------------------------------------------------------------------


def test_faults_are_reported_and_counted_in_the_manifest(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    path = folder / "de" / "de.train.txt"
    lines = path.read_bytes().split(b"\n")
    lines[4], lines[9], lines[11] = b"a\xe2\x80\xa8b", b"", b"\xff"
    path.write_bytes(b"\n".join(lines))
    found, reported = run(toy_text.params(folder), tmp_path / "out")
    assert found.manifest["faults"] == {"text": {"separator": 1, "empty": 1, "encoding": 1}}
    assert "text: 1 pair empty, see faults.tsv" in reported
    every = (found.folder / records.FAULTS).read_text().splitlines()
    assert [line.split("\t")[:2] for line in every] == [
        ["separator", f"{path}:5"],
        ["empty", f"{path}:10"],
        ["encoding", f"{path}:12"],
    ]
    assert len(found.split("train")) == 297


# --- A vocabulary of the user's -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocabulary": VocabularyTraining(size=10)}, "vocabulary.size=10 is too small"),
        ({"vocabulary_file": "nowhere.model"}, "vocabulary nowhere.model cannot be read"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused_before_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], text: str
) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 30})
    monkeypatch.delattr(text_files, "lines")
    with pytest.raises(errors.InputError, match=text):
        run(toy_text.params(folder, **fields), tmp_path / "out")


def test_a_given_vocabulary_is_taken(made: records.Records, folder: Path, tmp_path: Path) -> None:
    path = str(made.folder / records.VOCABULARY)
    params = toy_text.params(folder, vocabulary_file=path, pairs=("sw:en",))
    assert run(params, tmp_path / "out")[0].vocabulary_hash == made.vocabulary_hash
    params.set(pairs=("en:sw",), target_tokens=True)
    with pytest.raises(errors.InputError, match="vocabulary has no <2sw>"):
        run(params, tmp_path / "other")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"byte_fallback": True, "control_symbols": ["<2de>", "<2en>"]}, ""),
        ({"control_symbols": ["<2en>"]}, "own.model has no byte fallback: .*vanish"),
        ({"byte_fallback": True, "control_symbols": ["<mask>"]}, "but only <2xx> are allowed"),
    ],
)
def test_a_given_vocabulary_that_does_not_serve_is_refused(
    tmp_path: Path, folder: Path, fields: dict[str, Any], text: str
) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((folder / "de" / "de.train.txt").read_text().splitlines()),
        model_prefix=str(tmp_path / "own"),
        vocab_size=330 if "byte_fallback" in fields else 60,
        minloglevel=2,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        **fields,
    )
    params = toy_text.params(folder, vocabulary_file=str(tmp_path / "own.model"))
    if not text:
        run(params, tmp_path / "out")
        return
    with pytest.raises(errors.InputError, match=text):
        run(params, tmp_path / "out")


# --- A folder of existing records -----------------------------------------------------------------


def test_the_same_params_open_what_is_there_and_others_refuse_it(
    folder: Path, tmp_path: Path
) -> None:
    params = toy_text.params(folder)
    run(params, tmp_path / "out")
    before = (tmp_path / "out" / records.MANIFEST).stat().st_mtime_ns
    assert run(params, tmp_path / "out")[1] == [f"{tmp_path / 'out'} is prepared already"]
    assert (tmp_path / "out" / records.MANIFEST).stat().st_mtime_ns == before
    params.vocabulary.size = 331
    with pytest.raises(errors.InputError) as caught:
        run(params, tmp_path / "out")
    first, *lines = str(caught.value).splitlines()
    assert "was prepared with other params. Use a new folder" in first
    assert lines == ["    vocabulary.size: 330 -> 331"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("years of work")
    with pytest.raises(errors.InputError, match="own is in use, but holds no records"):
        run(params, tmp_path / "own")


# --- Failures -------------------------------------------------------------------------------------


def test_a_fault_in_strict_text_leaves_nothing(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    path = folder / "de" / "de.train.txt"
    path.write_text("\n" + path.read_text().partition("\n")[2])
    params = toy_text.params(folder)
    params.set_path("corpora[0].strict", True)
    with pytest.raises(errors.InputError, match=r"de.train.txt:1: de: sentence is empty"):
        run(params, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


_KILLED = """
import os, signal, sys
from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import records
records.write_split = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
prepare.run(sys.argv[1:])
"""


def test_a_killed_command_leaves_nothing_that_is_taken_for_whole(
    folder: Path, tmp_path: Path
) -> None:
    flags = [f"--output={tmp_path / 'out'}", f"--translate_folder={folder}"]
    killed = programs.run(_KILLED, *flags, "--vocabulary_size=330")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    found, _ = run(toy_text.params(folder), tmp_path / "out")
    whole, _ = run(toy_text.params(folder), tmp_path / "undisturbed")
    for name in ("train.ids", "train.lengths", "test.ids", "vocabulary.model", "manifest.json"):
        assert (found.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_what_cannot_be_prepared_is_refused(folder: Path, tmp_path: Path) -> None:
    def refused(text: str, **fields: Any) -> None:
        with pytest.raises(errors.InputError, match=text) as caught:
            run(toy_text.params(folder, **fields), tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()

    def corpora(name: str, *languages: str, line: str) -> list[Any]:
        (tmp_path / name).mkdir()
        for language in languages:
            (tmp_path / name / f"{language}.train.txt").write_text(line)
        return [text_files.TranslateFolder.Params(folder=str(tmp_path / name))]

    refused("no corpus has the pair 'de:ne' in split 'train'; nearest 'de:en'", pairs=("de:ne",))
    refused(r"a split 'dev' \(there are test, train\)", train_split="dev")
    refused("no corpus to prepare", corpora=[])
    without_english = corpora("foreign", "de", "fr", line="a\n")
    refused(r"no corpus has English in split 'train'; name .*de:fr", corpora=without_english)
    empty = corpora("empty", "de", "en", line="\n\n")
    refused(r"no training pair is left: every one is .* such as \S+:1: ", corpora=empty)


@pytest.mark.parametrize("name", ["..", ".de", "a/b", "a b", "", "a\n", "a:b", "\x00"])
def test_names_that_can_name_no_file_are_refused(name: str) -> None:
    for split, language in ((name, "de"), ("train", name)):
        files = {"train": {"en": "x", "de": "x"}, split: {"en": "x", language: "x"}}
        corpora: list[Any] = [text_files.Aligned.Params(files=files)]
        with pytest.raises(errors.InputError, match=r"^aligned: .* cannot be part of a file name"):
            preparation.Preparation.Params(corpora=corpora).instantiate().check_text()
