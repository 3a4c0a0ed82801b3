"""`--mode=decode`: one translation for each line, in order; changed lines are counted."""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.decoding import decode, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary, VocabularyTraining, train
from tests.support.jobs import job
from tests.tasks.mt import toy_text

MAX_LENGTH = 12


@functools.cache
def vocabulary(*targets: str) -> Vocabulary:
    texts = toy_text.sentences(300, 0)
    return train(texts, VocabularyTraining(size=330), targets)


class Copier:
    """A decoder that returns each source."""

    step = 70
    max_length = MAX_LENGTH
    cut = 2

    def __init__(self, *_: Any, targets: tuple[str, ...] = ("en",), **fields: Any) -> None:
        self.vocabulary = vocabulary(*targets)
        self.target_tokens = fields.get("target_tokens", False)
        self.asked: list[list[int]] = []

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        assert all(ids[-1] == END for ids in sources)
        self.asked += map(list, sources)
        for _ in sources:
            progress(1)
        return [list(ids[:-1]) for ids in sources]


def english() -> Copier:
    """Return a decoder of several target languages."""
    return Copier(targets=("de", "en"), target_tokens=True)


def translated(raw: bytes, model: Copier, **fields: Any) -> tuple[list[str], decode.LineCounts]:
    lines = decode.LineTranslator(model, Decode(**fields))
    return list(itertools.chain(*lines.translate(io.BytesIO(raw)))), lines.counts


def test_every_line_has_its_translation_in_order() -> None:
    texts = toy_text.sentences(50, 3)
    texts[7] = texts[20] = ""
    texts[21] = " \t "
    raw = "".join(f"{text}\n" for text in texts).encode()
    for end in (raw, raw.removesuffix(b"\n"), raw.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + raw):
        found, counts = translated(end, Copier(), read_ahead=8)
        assert found == [text.strip() for text in texts]
        assert (counts.lines, counts.empty, counts.replaced) == (50, 3, 0)
    assert translated(b"", Copier())[0] == []
    assert translated(b"\n", Copier())[0] == [""]


def test_lines_end_at_line_feeds_alone() -> None:
    found, _ = translated("bado\u2028keli\x85muna\nriri\n".encode(), Copier())
    assert len(found) == 2
    assert found[1] == "riri"


def test_a_translation_is_one_line_whatever_bytes_it_spells() -> None:
    class Feeding(Copier):
        def translate(self, sources: Any, progress: Any) -> list[list[int]]:
            progress(len(sources))
            feed = self.vocabulary.pieces.index("<0x0A>")
            return [[*ids[:-1], feed, *ids[:-1]] for ids in sources]

    found, _ = translated(b"bado\nkeli\n", Feeding())
    assert len(found) == 2
    assert not any("\n" in line for line in found)


def test_a_long_line_is_split_between_words_and_counted() -> None:
    texts = ["bado", " ".join(toy_text.WORDS[:30]), "keli", "z" * 60]
    model = Copier()
    found, counts = translated("\n".join(texts).encode(), model)
    assert found[:3] == texts[:3]
    assert found[3].replace(" ", "") == texts[3]  # no word to split between
    assert counts == decode.LineCounts(lines=4, split=2)
    assert max(map(len, model.asked)) <= MAX_LENGTH
    assert len(model.asked) > 6


def test_a_long_line_without_words_is_split_between_characters() -> None:
    text = "\u4e2d\u6587z\U0001f600" * 9  # which are bytes of no whole pieces but the z
    model = Copier()
    found, counts = translated(text.encode(), model)
    assert found[0].replace(" ", "") == text
    assert counts.split == 1
    assert max(map(len, model.asked)) <= MAX_LENGTH
    parts = model.vocabulary.decode(model.asked)
    assert len(parts) > 9
    assert not any("\ufffd" in part for part in parts)


def test_a_character_that_has_no_room_is_torn_and_no_byte_is_lost() -> None:
    class Short(Copier):
        max_length = 4

    model = Short()
    text = "z\U0001f600\U0001f600"
    translated(text.encode(), model)
    assert max(map(len, model.asked)) <= 4
    ids = [number for source in model.asked for number in source[:-1]]
    assert model.vocabulary.decode([ids]) == [text]


def test_bad_bytes_are_replaced_and_counted() -> None:
    found, counts = translated(b"bado\nkeli \xff muna\n\xc3\n", Copier(), read_ahead=2)
    assert found[0] == "bado"
    assert found[1].startswith("keli")
    assert found[1].endswith("muna")
    assert counts.replaced == 2


def test_sources_begin_with_the_token_of_the_target() -> None:
    model = english()
    texts = ["bado", " ".join(toy_text.WORDS[:30])]
    found, _ = translated("\n".join(texts).encode(), model, target="en")
    assert found == texts  # without the target token
    first = model.vocabulary.target_id("en")
    assert all(ids[0] == first for ids in model.asked)
    assert max(map(len, model.asked)) <= MAX_LENGTH


def test_a_target_that_is_missing_or_unknown_is_refused() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        translated(b"", english())
    assert str(caught.value) == (
        "decode.target is missing: the model translates to de, en. Try "
        "--params_override=decode.target=de"
    )
    with pytest.raises(errors.InputError, match=r"vocabulary has no <2fr>; its target tokens"):
        translated(b"", english(), target="fr")
    with pytest.raises(errors.ParamsError) as caught:
        translated(b"", Copier(), target="en")
    assert str(caught.value) == (
        "decode.target=en, but the model has one target language, and was trained without a token "
        "for it. Leave it out"
    )


def test_the_token_of_the_only_target_need_not_be_named() -> None:
    model = Copier(target_tokens=True)
    translated(b"bado\n", model)
    (source,) = model.asked
    assert source[0] == model.vocabulary.target_id("en")
    plain = Copier()
    translated(b"bado\n", plain)
    assert plain.asked == [source[1:]]


def decoded(logdir: Path | None, lines: list[str], **fields: Any) -> None:
    """Run the mode with these fields of `Decode`."""
    decode.run(job(Mock(decode=Decode(**fields)), logdir, lines))


@pytest.fixture(autouse=True)
def copier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "Decoder", Copier)


def test_a_file_is_translated_into_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_bytes(b"bado keli\n\nmu \xff\n")
    lines: list[str] = []
    decoded(tmp_path, lines, input=str(source), output=str(target))
    assert target.read_text().startswith("bado keli\n\nmu")
    assert target.read_bytes().count(b"\n") == 3
    assert lines == [
        "2 translations reached their limit of tokens and end there: decode.search.max_length and "
        "decode.search.max_extra set it",
        f"decode step=70 lines=3 empty=1 split=0 replaced=1 to {target}",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "out.en"]


def test_a_pipe_is_read_and_written_and_not_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    os.mkfifo(source)
    os.mkfifo(target)
    writer = threading.Thread(target=source.write_bytes, args=(b"bado\nkeli\n",), daemon=True)
    writer.start()
    reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    decoded(tmp_path, [], input=str(source), output=str(target))
    writer.join(10)
    assert os.read(reader, 100) == b"bado\nkeli\n"
    os.close(reader)
    assert target.is_fifo()


def test_what_ends_early_replaces_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Copier):
        def translate(self, sources: Any, progress: Any) -> list[list[int]]:
            if self.asked:
                raise KeyboardInterrupt
            return super().translate(sources, progress)

    monkeypatch.setattr(translator, "Decoder", Interrupted)
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_text("bado\n" * 9)
    target.write_text("before\n")
    with pytest.raises(KeyboardInterrupt):
        decoded(tmp_path, [], input=str(source), output=str(target), read_ahead=3)
    assert target.read_text() == "before\n"


def test_what_cannot_be_read_or_written_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "in.de"
    source.write_text("bado\n")
    for fields, message in (
        ({"input": "no.de"}, "decode.input=no.de cannot be read: No such file or directory. Name"),
        ({"output": "no/out.en"}, "decode.output=no/out.en cannot be written: No such file or"),
        ({"output": str(tmp_path)}, f"decode.output={tmp_path} cannot be written: Is a directory."),
    ):
        with pytest.raises(errors.InputError, match=re.escape(message)):
            decoded(tmp_path, [], **{"input": str(source), **fields})


def test_the_standard_output_holds_translations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"bado\nkeli\n")))
    lines: list[str] = []
    decoded(tmp_path, lines)
    out, err = capfdbinary.readouterr()
    assert out == b"bado\nkeli\n"
    assert b"decode step=70 lines=2 empty=0 split=0 replaced=0" in err
    assert not lines


def test_a_run_must_be_named() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        decoded(None, [])
    assert str(caught.value) == (
        "--mode=decode needs --logdir=FOLDER, of the run whose newest checkpoint translates, or "
        "--checkpoint"
    )
