"""Corpora: layouts, both directions, and every kind of faulty text by file and line."""

from __future__ import annotations

import gzip
import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text.corpora import django_catalogues, text_files
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Faults

GOOD = "eins\nzwei\ndrei\n"
ENGLISH = "one\ntwo\nthree\n"
PAIRS = [("eins", "one"), ("zwei", "two"), ("drei", "three")]


def write(path: Path, text: str | bytes) -> str:
    content = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def read_all(
    params: Any, *pairs: str, split: str = "train"
) -> tuple[list[tuple[str, tuple[str, str]]], dict[str, int], list[str]]:
    """Return the faultless sentences of a split, counts of faults, and the lines of the others."""
    file = io.StringIO()
    faults = Faults(file, params.strict)
    found = params.instantiate().sentence_pairs(split, pairs, faults)
    return list(found), dict(faults.counts), file.getvalue().splitlines()


def read(params: Any, pair: str = "de:en", **more: Any) -> list[tuple[str, str]]:
    return [sentences for _, sentences in read_all(params, pair, **more)[0]]


def aligned(folder: Path, german: str | bytes, english: str | bytes, **fields: Any) -> Any:
    files = {"de": write(folder / "text.de", german), "en": write(folder / "text.en", english)}
    return text_files.Aligned.Params(files={"train": files}, **fields)


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
    assert read(params) == PAIRS
    assert read(params, "en:de") == [(target, source) for source, target in PAIRS]
    assert read(params, split="test") == [("vier", "four")]


def test_a_folder_of_translate_folders_is_taken_whole(tmp_path: Path) -> None:
    for language in ("de", "zh-Hans", ".trash"):
        write(tmp_path / language / f"{language}.train.txt", f"{language}\n")
        write(tmp_path / language / "en.train.txt", "word\n")
    params = text_files.TranslateFolder.Params(folder=str(tmp_path))
    pairs = params.instantiate().pairs("train")
    assert pairs == {("de", "en"), ("en", "de"), ("zh-Hans", "en"), ("en", "zh-Hans")}
    assert read(params, "zh-Hans:en") == [("zh-Hans", "word")]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_aligned_files_are_read_line_by_line(tmp_path: Path, ending: str) -> None:
    files = {
        "de": write(tmp_path / f"text.de{ending}", GOOD.rstrip("\n")),
        "en": write(tmp_path / f"text.en{ending}", ENGLISH),
    }
    params = text_files.Aligned.Params(files={"train": files})
    assert read_all(params, "de:en") == ([("de:en", both) for both in PAIRS], {}, [])


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
def test_columns_of_a_table_are_languages(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.{ending}", "one\t7\teins\ntwo\t8\tzwei\n")
    write(tmp_path / f"b.{ending}", "three\t9\tdrei\n")
    files = {"train": str(tmp_path / f"*.{ending}")}
    params = text_files.TSV.Params(languages=("en", "", "de"), files=files)
    assert params.instantiate().pairs("train") == {("de", "en"), ("en", "de")}
    assert read(params) == PAIRS
    assert read(params, "en:de") == [(target, source) for source, target in PAIRS]


# --- Faulty text ---

SEPARATORS = [*"\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", "\x00"]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("side", [0, 1])
def test_a_separator_inside_a_sentence_shifts_nothing(
    tmp_path: Path, separator: str, side: int
) -> None:
    texts = [GOOD, ENGLISH]
    texts[side] = texts[side].replace("w", f"w{separator}")
    found, counts, (line,) = read_all(aligned(tmp_path, *texts), "de:en")
    assert found == [("de:en", PAIRS[0]), ("de:en", PAIRS[2])]
    assert counts == {"separator": 1}
    where = f"{tmp_path / 'text.de'}:2\t{('de', 'en')[side]}: "
    assert line.startswith(f"separator\t{where}U+{ord(separator):04X} at character ")
    with pytest.raises(errors.InputError, match=r"text.de:2: .*U\+.* Correct it, or leave out st"):
        read(aligned(tmp_path, *texts, strict=True))


def test_separators_are_all_that_python_cuts_at() -> None:
    cuts = {chr(code) for code in range(0x11000) if len(f"a{chr(code)}b".splitlines()) > 1}
    assert {*SEPARATORS, "\n"} - {"\x00"} == cuts


@pytest.mark.parametrize(
    ("german", "kind", "text"),
    [
        (b"eins\nzw\xffei\ndrei\n", "encoding", "de: byte 3 is not UTF-8"),
        (b"eins\n \t \ndrei\n", "empty", "de: sentence is empty"),
        (b"eins\n\ndrei\n", "empty", "de: sentence is empty"),
        (b"eins\n\xe2\x80\x8b\xef\xbb\xbf\x01\ndrei\n", "empty", "de: sentence is empty"),
    ],
)
def test_a_faulty_line_is_named_and_left_out(
    tmp_path: Path, german: bytes, kind: str, text: str
) -> None:
    found, counts, lines = read_all(aligned(tmp_path, german, ENGLISH), "de:en")
    assert found == [("de:en", PAIRS[0]), ("de:en", PAIRS[2])]
    assert counts == {kind: 1}
    assert lines == [f"{kind}\t{tmp_path / 'text.de'}:2\t{text}"]
    with pytest.raises(errors.InputError, match=rf"text.de:2: {text}. Correct it"):
        read(aligned(tmp_path, german, ENGLISH, strict=True))


@pytest.mark.parametrize("german", [b"\xef\xbb\xbf" + GOOD.encode(), b"eins\nzwei\r\ndrei\r\n"])
def test_marks_of_other_systems_are_removed(tmp_path: Path, german: bytes) -> None:
    params = aligned(tmp_path, german, ENGLISH, strict=True)
    assert read(params) == PAIRS


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_files_of_unequal_length_are_refused(tmp_path: Path, ending: str) -> None:
    short = write(tmp_path / f"short{ending}", "eins\nzwei\n")
    long = write(tmp_path / f"long{ending}", ENGLISH)
    for files in ({"de": short, "en": long}, {"de": long, "en": short}):
        params = text_files.Aligned.Params(files={"train": files})
        with pytest.raises(errors.InputError, match=rf"{short} has 2 lines, but {long} has more"):
            read(params)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_by_its_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "de.txt"
    path.write_bytes(f"\ufeff{GOOD}".encode(encoding))
    params = text_files.Aligned.Params(
        files={"train": {"de": str(path), "en": write(tmp_path / "en.txt", ENGLISH)}}
    )
    refused(r"de.txt is UTF-16. Convert it: iconv", params)


def test_a_table_with_another_number_of_columns_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "one\teins\ntwo\nthree\tdrei\tx\nfour\tvier\n")
    params = text_files.TSV.Params(languages=("en", "de"), files={"train": path})
    found, counts, lines = read_all(params, "de:en")
    assert found == [("de:en", ("eins", "one")), ("de:en", ("vier", "four"))]
    assert counts == {"columns": 2}
    assert lines[0] == f"columns\t{path}:2\tline has 1 columns, not 2"
    params.strict = True
    with pytest.raises(errors.InputError, match=r"a.tsv:2: line has 1 columns, not 2"):
        read(params)


# --- Not a corpus ---


def refused(text: str, params: Any) -> None:
    def read_every_split() -> None:
        made = params.instantiate()
        for split in made.splits:
            pairs = [":".join(pair) for pair in made.pairs(split)]
            read_all(params, *pairs, split=split)

    with pytest.raises(errors.InputError, match=text) as caught:
        read_every_split()
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_corpus_are_refused(tmp_path: Path) -> None:
    def folder(name: str) -> Any:
        return text_files.TranslateFolder.Params(folder=str(tmp_path / name))

    refused(
        "corpus folder .*nothing holds no LANG.SPLIT.txt, such as .*en.train", folder("nothing")
    )
    write(tmp_path / "empty" / "de.txt", "")
    refused("holds no LANG.SPLIT.txt, such as .*en.train.txt", folder("empty"))
    write(tmp_path / "alone" / "de.train.txt", GOOD)
    refused("de.train.txt has no translation: split 'train'", folder("alone"))
    write(tmp_path / "twice" / "de.train.txt", GOOD)
    write(tmp_path / "twice" / "de.train.txt.gz", GOOD)
    refused("de.train.txt and .*de.train.txt.gz are the same text", folder("twice"))


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
    with pytest.raises(errors.InputError, match=r"torn.gz cannot be read after line \d+: .*Use an"):
        list(text_files.lines(str(torn)))


def test_tables_and_files_that_make_no_pair_are_refused(tmp_path: Path) -> None:
    refused("must name two", text_files.TSV.Params(languages=("en", ""), files={}))
    refused("must name two", text_files.TSV.Params(languages=("en", "en"), files={}))
    refused("needs two languages", text_files.Aligned.Params(files={"train": {"de": "x"}}))
    lost = {"train": str(tmp_path / "*.tsv")}
    refused("tsv cannot be read", text_files.TSV.Params(languages=("en", "de"), files=lost))


# --- Django's catalogues ---


def test_django_has_some_ninety_languages() -> None:
    django = django_catalogues.Django.Params().instantiate()
    languages = {source for source, target in django.pairs("train") if target == "en"}
    assert len(languages) > 90
    assert {"de", "zh-Hans", "sr-Latn", "pt-BR"} <= languages
    assert not {"en", "en-GB", "en-AU"} & languages


def test_django_is_split_by_the_english_message() -> None:
    params = django_catalogues.Django.Params()
    english: dict[str, set[str]] = {}
    for split in ("train", "valid", "test"):
        found, _, _ = read_all(params, "de:en", "en:de", "fr:en", "sw:en", split=split)
        there, back = ([both for pair, both in found if pair == way] for way in ("de:en", "en:de"))
        assert [both[::-1] for both in back] == there
        assert all("\n" not in source + target for _, (source, target) in found)
        english[split] = {
            "".join(filter(str.isalnum, target.casefold()))
            for pair, (_, target) in found
            if pair.endswith(":en")
        }
    assert all(english.values())
    for one, other in itertools.combinations(english.values(), 2):
        assert not one & other
    assert 0.05 < len(english["test"]) / sum(map(len, english.values())) < 0.15


def test_messages_lose_their_context_and_plurals_are_left_out() -> None:
    import django

    path = Path(django.__file__).parent / "conf" / "locale" / "de" / "LC_MESSAGES" / "django.mo"
    messages = django_catalogues.catalogue(path)
    assert ("January", "Januar") in messages  # "alt. month\x04January" and "January"
    assert all(message and "\x04" not in message for message, _ in messages)
    assert not any("%(num)d" in message for message, _ in messages)


@pytest.mark.parametrize("content", [b"", b"no catalogue at all, but text"])
def test_a_torn_catalogue_is_named(tmp_path: Path, content: bytes) -> None:
    path = Path(write(tmp_path / "x.mo", content))
    with pytest.raises(
        errors.InputError, match=r"x.mo is not a message catalogue: .* Install Django"
    ):
        django_catalogues.catalogue(path)
