"""From corpora to records, by the command and from Python: results, errors, leftovers."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lingvo_gpipe import errors
from lingvo_gpipe.console import output
from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import (
    clean_text,
    preparation,
    records,
    vocabulary,
    vocabulary_training,
)
from lingvo_gpipe.tasks.mt.text.corpora import corpus, text_files
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining
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
        assert sum(span.count for span in found.spans) == len(found)


def test_the_manifest_reports_what_is_there(made: records.Records) -> None:
    assert made.pairs == ("de:en", "sw:en", "en:de")
    assert made.splits == ("test", "train")
    assert made.target_tokens
    assert made.manifest["vocabulary"]["size"] == len(made.vocabulary)
    assert made.manifest["vocabulary"]["num_threads"] == 2
    train = made.split("train")
    for span in train.spans:
        lengths = train.lengths[span.first : span.first + span.count]
        assert [span.source_tokens, span.target_tokens] == lengths.sum(0).tolist()
        assert span.longest == lengths.max()
    assert [span.count for span in train.spans] == [300, 40, 300]
    (name,) = made.manifest["corpora"]
    assert [span.corpora for span in train.spans] == [{name: 300}, {name: 40}, {name: 300}]


def test_text_that_is_not_trained_on_is_kept(made: records.Records, folder: Path) -> None:
    wanted = (text_of(folder, "de", "en", "test"), text_of(folder, "de", "de", "test"))
    assert made.text("test", "en:de") == wanted
    with pytest.raises(errors.InputError, match="has no text of pair 'de:en' in split 'train'"):
        made.text("train", "de:en")


def test_one_target_language_needs_no_target_token(folder: Path, tmp_path: Path) -> None:
    found = toy_text.params(folder).instantiate().run(tmp_path / "out")
    assert found.pairs == ("de:en", "sw:en")
    assert not found.target_tokens
    (source, _) = found.split("train").example(0)
    assert source[0] != found.vocabulary.target_id("en")


def test_records_are_the_same_at_any_number_of_threads(
    made: records.Records, folder: Path, tmp_path: Path
) -> None:
    params = toy_text.params(folder, pairs=("de:en", "sw:en", "en:de"))
    params.instantiate().run(tmp_path / "out", num_threads=1)
    names = sorted(p.relative_to(made.folder) for p in made.folder.rglob("*") if p.is_file())
    assert len(names) == 6 + 2 * 3
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (made.folder / name).read_bytes()


def test_test_targets_in_the_training_text_are_reported(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    for name in ("de", "en"):
        path = folder / "de" / f"{name}.test.txt"
        held = text_of(folder, "de", name, "train")[:7]
        path.write_text(path.read_text() + "".join(f"{line}\n" for line in held))
    reported: list[str] = []
    found = toy_text.params(folder).instantiate().run(tmp_path / "out", report=reported.append)
    seen = found.manifest["targets_seen_in_training"]["test"]
    assert seen >= 7
    assert f"test: targets in the training text too: {seen}" in reported


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("held_out", [True, False])
def test_every_stage_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    if not held_out:
        for name in ("de", "en"):
            (folder / "de" / f"{name}.test.txt").unlink()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reported: list[str] = []
    toy_text.params(folder).instantiate().run(tmp_path / "out", report=reported.append)
    shown = terminal.getvalue()
    for stage in ("counting lines", "reading", "training the vocabulary"):
        assert f"{stage}: " in shown
    for stage in ("sampling", "tokenising"):
        assert f"{stage}: 100%" in shown
    assert f"counting lines: {640 if held_out else 600} lines [" in shown
    # Nothing is reread where no split is held out.
    assert ("comparing targets: 100%" in shown) == held_out
    stages = [line.partition(" ")[0] for line in reported]
    assert stages.index("training") == stages.index("vocabulary") - 1
    assert "training a vocabulary of 330 pieces on 600 sentences" in reported


def test_languages_are_mixed_at_temperature_5_by_default() -> None:
    from lingvo_gpipe.tasks.mt.input import Translation  # imports TensorFlow

    params = Translation.Params()
    assert params.temperature == 5.0
    assert preparation.Preparation.Params().vocabulary.temperature == 5.0
    assert preparation.Preparation.Params().vocabulary.size == 64_000


def test_records_of_one_pass_are_those_of_a_pass_for_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{line}\t{line[::-1]}\t{line.upper()}" for line in toy_text.sentences(300, 1)]
    lines[7], lines[11], lines[200] = "bado\t\tKELI", "one column", "\u2028\tbado\tdoba"
    path = tmp_path / "text.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    files = {"train": str(path), "test": str(path)}
    tables = text_files.TSV.Params(languages=("en", "de", "fr"), files=files)
    pairs = ("de:en", "fr:en", "en:de", "fr:de")
    params = toy_text.params(tmp_path, corpora=[tables], pairs=pairs)
    params.instantiate().run(tmp_path / "once")
    read_once = text_files.TSV.sentence_pairs
    passes: list[Any] = []

    def one_by_one(made: Any, split: str, wanted: Any) -> Iterator[Any]:
        for languages, faults in wanted.items():
            passes.append((split, languages))
            yield from read_once(made, split, {languages: faults})

    monkeypatch.setattr(text_files.TSV, "sentence_pairs", one_by_one)
    params.instantiate().run(tmp_path / "often")
    assert len(passes) == 6
    names = {p.relative_to(tmp_path / "once") for p in (tmp_path / "once").rglob("*")}
    assert {str(name) for name in names} >= {"train.ids", "test.lengths", "faults.tsv"}
    for name in names:
        if (tmp_path / "once" / name).is_file():
            once, often = ((tmp_path / of / name).read_bytes() for of in ("once", "often"))
            if name.name == records.FAULTS:  # by place, not by pair
                once, often = (b"\n".join(sorted(text.splitlines())) for text in (once, often))
            assert once == often, name


# --- What is left out ---


def tables(folder: Path, *names: str) -> list[Any]:
    """Return a corpus for each SPLIT_LANGUAGE_LANGUAGE, a table of made sentences."""
    lines = "".join(f"{line}\t{line[::-1]}\n" for line in toy_text.sentences(300, 1))
    (folder / "text.tsv").write_text(lines)
    parts = [name.split("_") for name in names]
    return [
        text_files.TSV.Params(languages=tuple(each), files={split: str(folder / "text.tsv")})
        for split, *each in parts
    ]


@pytest.mark.parametrize(
    ("names", "pairs", "left"),
    [
        (("train_en_de", "valid_en_fr"), (), {"tsv#2": {"valid": ["en", "fr"]}}),
        (("train_en_de", "valid_en_d_dee"), (), {"tsv#2": {"valid": ["d", "dee", "en"]}}),
        (("train_en_de", "valid_en_de_fr"), (), {"tsv#2": {"valid": ["fr"]}}),
        (("train_en_de", "train_fr_cs"), (), {"tsv#2": {"train": ["cs", "fr"]}}),
        # Every language is there, if not with every other.
        (("train_en_de", "train_en_fr_de", "test_en_fr"), (), {}),
        # Others than the named pairs are left out by choice, but no whole split is.
        (("train_en_de_fr", "valid_en_fr"), ("de:en",), {"tsv#2": {"valid": ["en", "fr"]}}),
        (("train_en_de_fr", "valid_de_en_fr"), ("de:en",), {}),
    ],
)
def test_languages_of_which_nothing_is_taken_are_known(
    tmp_path: Path, names: tuple[str, ...], pairs: tuple[str, ...], left: dict[str, Any]
) -> None:
    corpora = tables(tmp_path, *names)
    made = preparation.Preparation.Params(corpora=corpora, pairs=pairs).instantiate()
    assert made._selection.unused == left


def test_what_nothing_is_taken_of_is_reported_and_kept_in_the_manifest(tmp_path: Path) -> None:
    corpora = tables(tmp_path, "train_en_de", "valid_en_fr")
    reported: list[str] = []
    params = toy_text.params(tmp_path, corpora=corpora)
    found = params.instantiate().run(tmp_path / "out", report=reported.append)
    assert reported[1] == (
        "warning: tsv#2: no text is used of en, fr in split 'valid': split 'train' has no such "
        "pair with English. Correct the languages, or name their pairs as well"
    )
    assert found.manifest["left_out"] == {"tsv#2": {"valid": ["en", "fr"]}}
    params.pairs = ("de:en",)
    reported.clear()
    params.instantiate().run(tmp_path / "named", report=reported.append)
    assert "in split 'valid': no such pair is named. Correct" in reported[1]


# --- Faults ---


def test_faults_are_reported_and_kept_in_the_manifest(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    path = folder / "de" / "de.train.txt"
    lines = path.read_bytes().split(b"\n")
    lines[4], lines[9], lines[11] = b"a\xe2\x80\xa8b", b"", b"\xff"
    path.write_bytes(b"\n".join(lines))
    reported: list[str] = []
    found = toy_text.params(folder).instantiate().run(tmp_path / "out", report=reported.append)
    (corpus_entry,) = found.manifest["corpora"].values()
    assert corpus_entry["faults"] == {"separator": 1, "empty": 1, "encoding": 1}
    assert corpus_entry["examples"]["empty"] == [f"{path}:10: sentence is empty"]
    where = f"{path}:10: sentence is empty"
    assert f"text: 1 times empty, such as {where} (all in faults.tsv)" in reported
    every = (found.folder / records.FAULTS).read_text().splitlines()
    assert [line.split("\t")[:2] for line in every] == [
        ["separator", f"{path}:5"],
        ["empty", f"{path}:10"],
        ["encoding", f"{path}:12"],
    ]
    assert len(found.split("train")) == 297


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"vocabulary": VocabularyTraining(size=10)},
            "vocabulary.size=10 is too small",
        ),
        (
            {"vocabulary": VocabularyTraining(temperature=0.0)},
            "vocabulary.temperature=0.0 is not",
        ),
        (
            {"vocabulary": VocabularyTraining(normalization="nmt_nfkcc")},
            "'nmt_nfkcc' is not a rule of SentencePiece; nearest nmt_nfkc",
        ),
        (
            {"vocabulary": VocabularyTraining(character_coverage=0.5)},
            "vocabulary.character_coverage=0.5 is not possible. Use 0.98 to",
        ),
        ({"vocabulary_file": "nowhere.model"}, "vocabulary nowhere.model cannot be read"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused_before_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], text: str
) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 30})
    monkeypatch.delattr(corpus.Corpus, "read")
    with pytest.raises(errors.InputError, match=text):
        toy_text.params(folder, **fields).instantiate().run(tmp_path / "out")


def test_a_given_vocabulary_is_taken(made: records.Records, folder: Path, tmp_path: Path) -> None:
    path = str(made.folder / records.VOCABULARY)
    params = toy_text.params(folder, vocabulary_file=path, pairs=("sw:en",))
    assert params.instantiate().run(tmp_path / "out").vocabulary_hash == made.vocabulary_hash
    params.set(pairs=("en:sw",), target_tokens=True)
    with pytest.raises(errors.InputError, match="vocabulary has no <2sw>"):
        params.instantiate().run(tmp_path / "other")


def test_a_given_vocabulary_without_byte_fallback_is_refused(tmp_path: Path, folder: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((folder / "de" / "de.train.txt").read_text().splitlines()),
        model_prefix=str(tmp_path / "bytes"),
        vocab_size=60,
        minloglevel=2,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
    )
    made = toy_text.params(folder, vocabulary_file=f"{tmp_path}/bytes.model").instantiate()
    with pytest.raises(errors.InputError, match=r"bytes.model has no byte fallback: .*vanish"):
        made.run(tmp_path / "out")
    # What has been made with one is still read.
    assert not vocabulary.Vocabulary.load(tmp_path / "bytes.model").byte_fallback


@pytest.mark.parametrize(
    ("symbols", "fine"),
    [
        (["<2de>", "<2en>"], True),
        (["<2en>", "<sep>"], False),
        (["<sep>", "<2en>"], False),
        (["<mask>"], False),
    ],
)
def test_a_given_vocabulary_with_other_control_symbols_is_refused(
    tmp_path: Path, folder: Path, symbols: list[str], fine: bool
) -> None:
    path = str(tmp_path / "own.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((folder / "de" / "de.train.txt").read_text().splitlines()),
        model_prefix=path.removesuffix(".model"),
        vocab_size=330,
        byte_fallback=True,
        control_symbols=symbols,
        minloglevel=2,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
    )
    made = toy_text.params(folder, vocabulary_file=path).instantiate()
    if fine:
        assert list(made.vocabulary_source.from_file.controls.values()) == symbols
        return
    reported = ", ".join(f"{symbol} ({number})" for number, symbol in enumerate(symbols, 4))
    with pytest.raises(
        errors.InputError, match=re.escape(f"symbols {reported}, but only <2xx> are")
    ):
        made.run(tmp_path / "out")


@pytest.mark.parametrize(("rule", "empty"), [("nmt_nfkc", [3, 5]), ("identity", [5])])
@pytest.mark.parametrize("given", [True, False])
def test_text_without_tokens_is_empty(
    tmp_path: Path, rule: str, empty: list[int], given: bool
) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    path = folder / "de" / "de.train.txt"
    lines = path.read_text().splitlines()
    lines[2], lines[4] = "\ufffd", "\u2581"
    path.write_text("".join(f"{line}\n" for line in lines))
    training = VocabularyTraining(size=330, normalization=rule)
    fields: dict[str, Any] = {"vocabulary": training}
    if given:
        vocabulary_training.train(lines, training).save(tmp_path / "given.model")
        fields = {"vocabulary_file": str(tmp_path / "given.model")}
    params = toy_text.params(folder, **fields)
    found = params.instantiate().run(tmp_path / "out")
    (reported,) = found.manifest["corpora"].values()
    assert reported["examples"] == {
        "empty": [f"{path}:{line}: sentence is empty" for line in empty]
    }
    assert len(found.split("train")) == 300 - len(empty)
    assert found.split("train").lengths.min() > 0
    params.set_path("corpora[0].policy.empty", "fail")
    with pytest.raises(errors.InputError, match=rf"de.train.txt:{empty[0]}: sentence is empty"):
        params.instantiate().run(tmp_path / "other")


def test_an_interrupt_while_sampling_is_no_poor_text(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any) -> Iterator[str]:
        yield "bado keli"
        raise KeyboardInterrupt

    monkeypatch.setattr(clean_text, "sample", interrupted)
    assert prepare.run([f"--output={tmp_path / 'out'}", f"--translate_folder={folder}"]) == 130
    assert not capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_reader_of_the_lines_that_is_gone_ends_no_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})

    def gone(line: str) -> None:
        raise BrokenPipeError(line)

    moved: list[int] = []
    monkeypatch.setattr(output, "report", gone)
    monkeypatch.setattr(os, "dup2", lambda _, number: moved.append(number))
    flags = [f"--output={tmp_path / 'out'}", f"--translate_folder={folder}"]
    assert prepare.run([*flags, "--vocabulary_size=330"]) == 0
    assert records.Records(tmp_path / "out").splits == ("test", "train")
    assert len(moved) > 3


def test_a_fatal_fault_leaves_nothing(tmp_path: Path) -> None:
    folder = toy_text.write_folder(tmp_path / "text", {"de": 300})
    path = folder / "de" / "de.train.txt"
    path.write_text("\n" + path.read_text().partition("\n")[2])
    params = toy_text.params(folder)
    params.set_path("corpora[0].policy.empty", "fail")
    with pytest.raises(errors.InputError, match=r"de.train.txt:1: sentence is empty"):
        params.instantiate().run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    path.write_text("x" + path.read_text())
    params.instantiate().run(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == ["out"]


def test_what_a_killed_run_left_is_swept(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "scratch").mkdir(parents=True)
    (partial / records.MANIFEST).write_text("torn")
    (partial / "scratch" / "0.txt").write_text("half a li")
    found = toy_text.params(folder).instantiate().run(tmp_path / "out")
    assert len(found.split("train")) == sum(SIZES.values())
    assert not partial.exists()
    assert not (found.folder / "scratch").exists()


_KILLED = """
import os, signal, sys
from lingvo_gpipe.tasks.mt import prepare
from lingvo_gpipe.tasks.mt.text import records
records.SplitWriter.entry = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
prepare.run(sys.argv[1:])
"""


def test_a_killed_command_leaves_nothing_that_is_taken_for_whole(
    folder: Path, tmp_path: Path
) -> None:
    flags = [
        f"--output={tmp_path / 'out'}",
        f"--translate_folder={folder}",
        "--vocabulary_size=330",
    ]
    path = os.pathsep.join(sys.path)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, *flags],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".out.partial" / "test.ids").exists()
    assert not (tmp_path / "out").exists()
    found = toy_text.params(folder).instantiate().run(tmp_path / "out")
    whole = toy_text.params(folder).instantiate().run(tmp_path / "undisturbed")
    for name in ("train.ids", "train.lengths", "test.ids", "vocabulary.model", "manifest.json"):
        assert (found.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_disk_that_fills_up_is_reported_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(records.SplitWriter, "entry", full)
    with pytest.raises(errors.InputError, match=r"cannot be prepared: No space left .*Free disk"):
        toy_text.params(folder).instantiate().run(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_makes_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    held = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(errors.InputError, match=r"another process prepares .*out. Wait"):
        toy_text.params(folder).instantiate().run(tmp_path / "out")
    os.close(held)


def test_a_disk_that_does_not_take_it_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.InputError, match=r"cannot be prepared: .*Free disk space, or"):
        toy_text.params(folder).instantiate().run(tmp_path / "file" / "out")


def test_pairs_that_no_corpus_has_are_refused(folder: Path, tmp_path: Path) -> None:
    def refused(text: str, **fields: Any) -> None:
        with pytest.raises(errors.InputError, match=text) as caught:
            toy_text.params(folder, **fields).instantiate().run(tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.iterdir())

    refused("no corpus has the pair 'de:ne' in split 'train'; nearest de:en", pairs=("de:ne",))
    refused(r"a split 'dev' \(there are test, train\)", train_split="dev")
    refused("no corpus to prepare", corpora=[])


def test_text_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    for name in ("de", "en"):
        (tmp_path / f"{name}.train.txt").write_text("\n\n")
    with pytest.raises(errors.InputError, match="no training pair is left"):
        toy_text.params(tmp_path).instantiate().run(tmp_path / "out")


def test_text_without_english_asks_for_the_pairs(tmp_path: Path) -> None:
    for name in ("de.train.txt", "fr.train.txt"):
        (tmp_path / name).write_text("a\n", encoding="utf-8")
    corpora = [text_files.TranslateFolder.Params(folder=str(tmp_path))]
    with pytest.raises(
        errors.InputError, match=r"no corpus has English in split 'train'; name .*de:fr"
    ):
        toy_text.params(tmp_path, corpora=corpora).instantiate().run(tmp_path / "out")
