"""Corpora: layouts, both directions, and every kind of faulty text by file and line."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import vocabulary_training
from lingvo_gpipe.tasks.mt.text.corpora import corpus, django_catalogues, text_files
from lingvo_gpipe.tasks.mt.text.corpora.faults import FaultPolicy, Faults, SentencePair

GOOD = "eins\nzwei\ndrei\n"
ENGLISH = "one\ntwo\nthree\n"
PAIRS = [("eins", "one"), ("zwei", "two"), ("drei", "three")]


def write(path: Path, text: str | bytes) -> str:
    content = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def read(
    params: Any, source: str = "de", target: str = "en", split: str = "train"
) -> tuple[list[tuple[str, str]], Faults]:
    faults = Faults(params.policy)
    found = params.instantiate().read(split, {(source, target): faults})
    return [(pair.source, pair.target) for _, pair in found], faults


def aligned(folder: Path, german: str | bytes, english: str | bytes, **policy: Any) -> Any:
    files = {
        "de": write(folder / "text.de", german),
        "en": write(folder / "text.en", english),
    }
    return text_files.Aligned.Params(files={"train": files}, policy=FaultPolicy(**policy))


# --- Layouts ---


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_a_translate_folder_returns_its_splits_both_ways(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"de.train.{ending}", GOOD)
    write(tmp_path / f"en.train.{ending}", ENGLISH)
    write(tmp_path / "de.test.txt", "vier\n")
    write(tmp_path / "en.test.txt", "four")
    write(tmp_path / "README.md", "")
    params = text_files.TranslateFolder.Params(folder=str(tmp_path))
    made = params.instantiate()
    assert set(made.splits) == {"train", "test"}
    assert made.pairs("train") == {("de", "en"), ("en", "de")}
    assert read(params)[0] == PAIRS
    assert read(params, "en", "de")[0] == [(target, source) for source, target in PAIRS]
    assert read(params, split="test")[0] == [("vier", "four")]


def test_a_folder_of_translate_folders_is_taken_whole(tmp_path: Path) -> None:
    for language in ("de", "zh-Hans", ".trash"):
        write(tmp_path / language / f"{language}.train.txt", f"{language}\n")
        write(tmp_path / language / "en.train.txt", "word\n")
    params = text_files.TranslateFolder.Params(folder=str(tmp_path))
    pairs = params.instantiate().pairs("train")
    assert pairs == {("de", "en"), ("en", "de"), ("zh-Hans", "en"), ("en", "zh-Hans")}
    assert read(params, "zh-Hans")[0] == [("zh-Hans", "word")]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_aligned_files_are_read_line_by_line(tmp_path: Path, ending: str) -> None:
    files = {
        "de": write(tmp_path / f"text.de{ending}", GOOD),
        "en": write(tmp_path / f"text.en{ending}", ENGLISH),
    }
    params = text_files.Aligned.Params(files={"train": files})
    found, faults = read(params)
    assert found == PAIRS
    assert not faults.counts
    assert params.instantiate().files() == list(files.values())


def test_a_folder_may_hold_many_languages_side_by_side(tmp_path: Path) -> None:
    for language in ("de", "en", "fr"):
        write(tmp_path / f"{language}.train.txt", f"{language}\n")
    params = text_files.TranslateFolder.Params(folder=str(tmp_path))
    assert len(params.instantiate().pairs("train")) == 6
    names = [os.path.basename(path) for path in params.instantiate().files()]
    assert names == ["de.train.txt", "en.train.txt", "fr.train.txt"]
    assert read(params, "fr", "de")[0] == [("fr", "de")]


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
def test_columns_of_a_table_are_languages(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.{ending}", "one\t7\teins\ntwo\t8\tzwei\n")
    write(tmp_path / f"b.{ending}", "three\t9\tdrei\n")
    files = {"train": str(tmp_path / f"*.{ending}")}
    params = text_files.TSV.Params(languages=("en", "", "de"), files=files)
    assert params.instantiate().pairs("train") == {("de", "en"), ("en", "de")}
    assert params.instantiate().files() == [str(tmp_path / f"{name}.{ending}") for name in "ab"]
    assert read(params)[0] == PAIRS
    assert read(params, "en", "de")[0] == [(target, source) for source, target in PAIRS]


# --- Bad text ---

SEPARATORS = [*"\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", "\x00"]


def test_a_line_feed_inside_what_a_dataset_returns_is_a_fault() -> None:
    faults = Faults(FaultPolicy())
    assert faults.texts((b"one\ntwo", b"three"), ("set train:7", "set train:7")) is None
    assert faults.examples["separator"] == [
        "set train:7: U+000A at character 4 would end the line elsewhere"
    ]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("side", [0, 1])
def test_a_separator_inside_a_sentence_shifts_nothing(
    tmp_path: Path, separator: str, side: int
) -> None:
    texts = [GOOD, ENGLISH]
    texts[side] = texts[side].replace("w", f"w{separator}")
    found, faults = read(aligned(tmp_path, *texts))
    assert found == [PAIRS[0], PAIRS[2]]
    assert faults.counts == {"separator": 1}
    (reported,) = faults.examples["separator"]
    name = "text." + ("de", "en")[side]
    assert reported.startswith(f"{tmp_path / name}:2: U+{ord(separator):04X} at character ")
    with pytest.raises(errors.InputError, match=rf"{name}:2: U\+.*policy.separator=skip$"):
        read(aligned(tmp_path, *texts, separator="fail"))


def test_a_pair_counts_once_whose_sentences_have_the_same_fault(tmp_path: Path) -> None:
    lines: list[tuple[str, str, str]] = []
    params = aligned(tmp_path, b"eins\n\ndrei\n", b"one\n\n\xff\n")
    faults = Faults(params.policy, log=lambda *fault: lines.append(fault))
    assert len(list(params.instantiate().read("train", {("de", "en"): faults}))) == 1
    assert faults.counts == {"empty": 1, "encoding": 1}
    assert [(kind, where) for kind, where, _ in lines] == [
        ("empty", f"{tmp_path / 'text.de'}:2"),
        ("empty", f"{tmp_path / 'text.en'}:2"),
        ("encoding", f"{tmp_path / 'text.en'}:3"),
    ]


def test_bounds_of_length_hold_for_the_split_that_is_trained_on() -> None:
    policy = FaultPolicy(max_characters=2)
    long = SentencePair("abc", "abc", "here")
    assert Faults(policy).fits(long, "learn")
    assert not Faults(policy, "learn").fits(long, "learn")
    assert Faults(policy, "learn").fits(long, "test")


def test_separators_are_all_that_python_cuts_at() -> None:
    cuts = {chr(code) for code in range(0x11000) if len(f"a{chr(code)}b".splitlines()) > 1}
    assert {*SEPARATORS, "\n"} - {"\x00"} == cuts


@pytest.mark.parametrize(
    ("german", "kind", "text"),
    [
        (b"eins\nzw\xffei\ndrei\n", "encoding", "byte 3 of the line is not UTF-8"),
        (b"eins\n \t \ndrei\n", "empty", "sentence is empty"),
        (b"eins\n\ndrei\n", "empty", "sentence is empty"),
        (b"eins\n\xe2\x80\x8b\xef\xbb\xbf\x01\ndrei\n", "empty", "sentence is empty"),
    ],
)
def test_a_bad_line_is_named_and_left_out(
    tmp_path: Path, german: bytes, kind: str, text: str
) -> None:
    found, faults = read(aligned(tmp_path, german, ENGLISH))
    assert found == [PAIRS[0], PAIRS[2]]
    assert faults.counts == {kind: 1}
    assert faults.examples[kind] == [f"{tmp_path / 'text.de'}:2: {text}"]
    with pytest.raises(
        errors.InputError, match=rf"text.de:2: {text}. Correct it.*policy.{kind}=skip"
    ):
        read(aligned(tmp_path, german, ENGLISH, **{kind: "fail"}))


@pytest.mark.parametrize(
    ("rule", "left"),
    [("nmt_nfkc", ["\ufffdx"]), ("identity", ["\ufffdx", "\ufffd", " \u2581\ufffd"])],
)
def test_what_the_normaliser_takes_away_is_empty(rule: str, left: list[str]) -> None:
    faults = Faults(FaultPolicy(), normalise=vocabulary_training.normaliser(rule))
    texts = ["\ufffdx", "\ufffd", " \u2581\ufffd", "\u2581", "\u2581 \u2581"]
    assert [text for text in texts if faults.sentence(text, f"file:{text}")] == left
    assert faults.counts == {"empty": len(texts) - len(left)}
    assert faults.examples["empty"][-1] == f"file:{texts[-1]}: sentence is empty"


@pytest.mark.parametrize(
    ("german", "kind", "line"),
    [
        (b"\xef\xbb\xbf" + GOOD.encode(), "bom", 1),
        (b"eins\nzwei\r\ndrei\n", "carriage_return", 2),
    ],
)
def test_a_mark_is_taken_off_and_counted(
    tmp_path: Path, german: bytes, kind: str, line: int
) -> None:
    found, faults = read(aligned(tmp_path, german, ENGLISH))
    assert found == PAIRS
    assert faults.counts == {kind: 1}
    assert faults.examples[kind][0].startswith(f"{tmp_path / 'text.de'}:{line}: ")
    with pytest.raises(errors.InputError, match=rf"text.de:{line}: .*policy.{kind}=skip"):
        read(aligned(tmp_path, german, ENGLISH, **{kind: "fail"}))


def test_misaligned_files_end_a_run_or_are_left_out_whole(tmp_path: Path) -> None:
    text = "text.de has 2 lines, but .*text.en has 3"
    with pytest.raises(errors.InputError, match=text.replace("text.de has", "text.de: has")):
        read(aligned(tmp_path, "eins\nzwei\n", ENGLISH))
    found, faults = read(aligned(tmp_path, "eins\nzwei\n", ENGLISH, misaligned="skip"))
    assert found == []
    assert faults.counts == {"misaligned": 1}


def test_a_last_line_without_a_line_feed_counts(tmp_path: Path) -> None:
    assert read(aligned(tmp_path, GOOD.rstrip("\n"), ENGLISH))[0] == PAIRS


def test_a_table_with_another_number_of_columns_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "one\teins\ntwo\nthree\tdrei\tx\nfour\tvier\n")
    params = text_files.TSV.Params(languages=("en", "de"), files={"train": path})
    found, faults = read(params)
    assert found == [("eins", "one"), ("vier", "four")]
    assert faults.counts == {"columns": 2}
    assert faults.examples["columns"][0] == f"{path}:2: line has 1 columns, not 2"
    params.policy.columns = "fail"
    with pytest.raises(errors.InputError, match=r"a.tsv:2: line has 1 columns, not 2"):
        read(params)


def test_bounds_of_length_are_counted_only_in_training(tmp_path: Path) -> None:
    english = "o" * 11 + "\ntwo\nt\n"
    params = aligned(tmp_path, GOOD, english, max_characters=10, max_ratio=3.0)
    found, faults = read(params)
    assert found == [("zwei", "two")]
    assert faults.counts == {"long": 1, "ratio": 1}
    assert faults.examples["ratio"] == [f"{tmp_path / 'text.de'}:3: 1 against 4 characters"]
    params.files = {"test": params.files["train"]}
    assert len(read(params, split="test")[0]) == 3


def test_few_examples_of_many_faults_are_kept(tmp_path: Path) -> None:
    _, faults = read(aligned(tmp_path, "\n" * 100, "x\n" * 100))
    assert faults.counts == {"empty": 100}
    assert len(faults.examples["empty"]) == 5


# --- Several pairs of languages in one pass ---


def test_a_table_is_read_once_for_all_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "\ufeffone\teins\tun",
        "two\tzwei",
        "\tdrei\ttrois",
        "four\t\tquatre",
        "five\tf\u2028nf\tcinq\r",
        "six\tsechs\tsix sept huit neuf",
        *["seven\t\tsept"] * 6,
    ]
    path = write(tmp_path / "a.tsv", "".join(f"{line}\n" for line in lines))
    policy = FaultPolicy(max_characters=12)
    params = text_files.TSV.Params(
        languages=("en", "de", "fr"), files={"train": path}, policy=policy
    )
    opened: list[str] = []
    read_lines = text_files.lines

    def counted(path: str) -> Any:
        opened.append(path)
        return read_lines(path)

    monkeypatch.setattr(text_files, "lines", counted)
    wanted = {both: Faults(policy) for both in (("de", "en"), ("fr", "en"), ("fr", "de"))}
    found = list(params.instantiate().read("train", wanted))
    assert opened == [path]
    total, apart = Faults(policy), Faults(policy)
    for both, faults in wanted.items():
        total.add(faults)
        alone = list(params.instantiate().read("train", {both: apart}))
        assert [pair for name, pair in found if name == both] == [pair for _, pair in alone]
    assert (
        total.counts
        == apart.counts
        == {
            "bom": 3,
            "columns": 3,
            "empty": 2 + 1 + 1 + 12,
            "separator": 2,
            "carriage_return": 3,
            "long": 2,
        }
    )
    assert total.examples == apart.examples
    assert len(opened) == 4


def test_lines_of_a_file_are_counted_once(tmp_path: Path) -> None:
    files = {name: write(tmp_path / name, ENGLISH) for name in ("en", "de", "fr")}
    params = text_files.Aligned.Params(files={"train": files})
    counted: list[bytes] = []

    def shown(found: Iterable[bytes]) -> Iterator[bytes]:
        for line in found:
            counted.append(line)
            yield line

    wanted = {(name, "en"): Faults(params.policy, progress=shown) for name in ("de", "fr")}
    assert len(list(params.instantiate().read("train", wanted))) == 6
    assert len(counted) == 9


# --- Not a corpus ---


def refused(text: str, params: Any) -> None:
    def read_all() -> None:
        made = params.instantiate()
        for split in made.splits:
            list(made.read(split, {both: Faults(params.policy) for both in made.pairs(split)}))

    with pytest.raises(errors.InputError, match=text) as caught:
        read_all()
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_corpus_are_refused(tmp_path: Path) -> None:
    def folder(name: str) -> Any:
        return text_files.TranslateFolder.Params(folder=str(tmp_path / name))

    refused("corpus folder .*nothing does not exist", folder("nothing"))
    write(tmp_path / "file", "")
    refused("is not a folder", folder("file"))
    write(tmp_path / "empty" / "de.txt", "")
    refused("holds no LANG.SPLIT.txt, such as .*en.train.txt", folder("empty"))
    write(tmp_path / "alone" / "de.train.txt", GOOD)
    refused("de.train.txt has no translation: split 'train'", folder("alone"))
    write(tmp_path / "twice" / "de.train.txt", GOOD)
    write(tmp_path / "twice" / "de.train.txt.gz", GOOD)
    refused("de.train.txt and .*de.train.txt.gz are the same text", folder("twice"))


@pytest.mark.parametrize("name", [".", "locked"])
def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / "locked" / "de.train.txt", GOOD)
    write(tmp_path / "locked" / "en.train.txt", ENGLISH)
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if os.path.samefile(path, tmp_path / name):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    refused(
        "^corpus folder .* cannot be read: Permission denied. Make it readable, or use another$",
        text_files.TranslateFolder.Params(folder=str(tmp_path)),
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good = write(tmp_path / "en", ENGLISH)

    def pair(path: str) -> Any:
        return text_files.Aligned.Params(files={"train": {"de": path, "en": good}})

    refused(r"missing cannot be read: No such file", pair(str(tmp_path / "missing")))
    plain = tmp_path / "plain.gz"
    plain.write_text(GOOD)
    refused(r"plain.gz cannot be read: Not a gzipped", pair(str(plain)))
    whole = gzip.compress(b"".join(b"%d\n" % n for n in range(100_000)))
    torn = tmp_path / "torn.gz"
    torn.write_bytes(whole[: len(whole) // 2])
    refused(r"torn.gz cannot be read after line \d+: .*Use another file", pair(str(torn)))


def test_tables_and_files_that_make_no_pair_are_refused(tmp_path: Path) -> None:
    refused("must name two", text_files.TSV.Params(languages=("en", ""), files={}))
    refused("must name two", text_files.TSV.Params(languages=("en", "en"), files={}))
    refused("needs two languages", text_files.Aligned.Params(files={"train": {"de": "x"}}))
    lost = {"train": str(tmp_path / "*.tsv")}
    refused("tsv cannot be read", text_files.TSV.Params(languages=("en", "de"), files=lost))


@pytest.mark.parametrize("name", [".", "..", ".de", "a/b", "a b", "", "a\n", "a:b", "\x00"])
def test_names_that_can_name_no_file_are_refused(name: str) -> None:
    for split, language in ((name, "de"), ("valid", name)):
        params = text_files.Aligned.Params(files={split: {"en": "x", language: "x"}})
        with pytest.raises(
            errors.InputError, match=r"^aligned: .* cannot be part of a file name\. "
        ) as caught:
            params.instantiate().check_names()
        assert "\n" not in str(caught.value)


def test_names_of_any_script_are_taken() -> None:
    for name in ("zh-Hans", "pt_BR", "русский", "语", "v1.2", "2016"):
        files = {name: {"en": "x", name: "x"}}
        text_files.Aligned.Params(files=files).instantiate().check_names()


# --- Django's catalogues ---


@pytest.fixture(scope="module")
def django() -> corpus.Corpus:
    return django_catalogues.Django.Params().instantiate()


def test_django_has_some_ninety_languages(django: corpus.Corpus) -> None:
    languages = {source for source, target in django.pairs("train") if target == "en"}
    assert len(languages) > 90
    assert {"de", "zh-Hans", "sr-Latn", "pt-BR"} <= languages
    assert not {"en", "en-GB", "en-AU"} & languages
    assert not django.files()


def test_django_is_split_by_the_english_message(django: corpus.Corpus) -> None:
    english: dict[str, set[str]] = {}
    for split, language in itertools.product(django.splits, ("de", "fr", "sw")):
        faults = Faults(FaultPolicy())
        wanted = {(language, "en"): faults, ("en", language): faults}
        read_both = list(django.read(split, wanted))
        found, back = ([pair for name, pair in read_both if name == each] for each in wanted)
        assert [(p.target, p.source) for p in back] == [(p.source, p.target) for p in found]
        assert all("\n" not in pair.source + pair.target for pair in found)
        english.setdefault(split, set()).update(
            "".join(filter(str.isalnum, pair.target.casefold())) for pair in found
        )
    assert all(english.values())
    for one, other in itertools.combinations(english.values(), 2):
        assert not one & other
    assert 0.05 < len(english["test"]) / sum(map(len, english.values())) < 0.15


def made_catalogue(messages: list[tuple[str, str]], order: str = "<") -> bytes:
    texts = [text.encode() + b"\0" for pair in zip(*messages, strict=True) for text in pair]
    start = 28 + 8 * len(texts)
    table = b""
    for text in texts:
        table += struct.pack(f"{order}2I", len(text) - 1, start)
        start += len(text)
    count = len(messages)
    head = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return head + table + b"".join(texts)


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_catalogue_returns_messages_without_context_and_one_form_of_plurals(
    tmp_path: Path, order: str
) -> None:
    messages = [
        ("", "Content-Type: text/plain"),
        ("month\x04May", "Mai"),
        ("%d hour\0%d hours", "%d Stunde\0%d Stunden"),
        ("a\nb", ""),
    ]
    path = Path(write(tmp_path / "x.mo", made_catalogue(messages, order)))
    assert django_catalogues.catalogue(path) == (
        ("May", "Mai"),
        ("%d hours", "%d Stunden"),
        ("a\nb", ""),
    )


@pytest.mark.parametrize("content", [b"", b"no catalogue at all, but text", "torn"])
def test_a_torn_catalogue_is_named(tmp_path: Path, content: Any) -> None:
    if content == "torn":
        content = made_catalogue([("month", "Monat")])[:-8]
    path = Path(write(tmp_path / "x.mo", content))
    with pytest.raises(
        errors.InputError, match=r"x.mo is not a message catalogue: .* Install Django"
    ):
        django_catalogues.catalogue(path)


def test_a_split_that_leaves_no_training_is_refused() -> None:
    refused("leave nothing to train on", django_catalogues.Django.Params(test_percent=100))
    refused("Use 0 or more", django_catalogues.Django.Params(valid_percent=-1))


@pytest.mark.parametrize("name", ["long.txt", "long.txt.gz"])
def test_a_line_without_end_is_not_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_MAX_LINE_BYTES", 10)
    content = b"short\n" + b"x" * 10 + b"y\n"
    path = write(tmp_path / name, content)
    read = text_files.lines(path)
    assert next(read) == b"short"
    with pytest.raises(
        errors.InputError, match=r"after line 1: the next line has more than 10 bytes"
    ):
        next(read)
