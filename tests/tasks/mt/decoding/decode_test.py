"""`--mode=decode`: one translation for each line, in order; changed lines are reported."""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lingvo_gpipe import errors, registry
from lingvo_gpipe.tasks.mt.decoding import decode, text_streams, translator
from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode
from lingvo_gpipe.tasks.mt.text.vocabulary import END, Vocabulary, VocabularyTraining, train
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
    vocabulary = vocabulary("en")
    target_tokens = False
    cut = 0

    def __init__(self, *_: Any, **where: Any) -> None:
        self.where = where
        self.asked: list[list[int]] = []

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        assert all(ids[-1] == END for ids in sources)
        self.asked += map(list, sources)
        for _ in sources:
            progress(1)
        return [list(ids[:-1]) for ids in sources]


class English(Copier):
    """Of several target languages."""

    vocabulary = vocabulary("de", "en")
    target_tokens = True


class OneTarget(Copier):
    """Of one target language, whose token begins every source."""

    target_tokens = True


class Cutter(Copier):
    """Two of its translations reach their limit."""

    cut = 2


def translated(raw: bytes, model: Copier, **fields: Any) -> tuple[list[str], decode.LineCounts]:
    counts = decode.LineCounts()
    lines = decode.LineTranslator(model, Decode(**fields), counts)
    found = [line for some in lines.translate(io.BytesIO(raw), lambda: None) for line in some]
    return found, counts


def test_every_line_has_its_translation_in_order() -> None:
    texts = toy_text.sentences(50, 3)
    texts[7] = texts[20] = ""
    texts[21] = " \t "
    raw = "".join(f"{text}\n" for text in texts).encode()
    for end in (raw, raw.removesuffix(b"\n"), raw.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + raw):
        found, counts = translated(end, Copier(), read_ahead=8)
        assert found == [text.strip() for text in texts]
        assert (counts.lines, counts.empty, counts.replaced) == (50, 3, [])
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


def test_a_long_line_is_split_between_words_and_reported() -> None:
    texts = ["bado", " ".join(toy_text.WORDS[:30]), "keli", "z" * 60]
    model = Copier()
    found, counts = translated("\n".join(texts).encode(), model)
    assert found[:3] == texts[:3]
    assert found[3].replace(" ", "") == texts[3]  # no word to split between
    assert counts.split == [2, 4]
    assert max(map(len, model.asked)) <= MAX_LENGTH
    assert len(model.asked) > 6
    assert list(counts.notes(12)) == [
        "longer than 12 tokens, split, between words where there are any: lines 2, 4"
    ]


def test_a_long_line_without_words_is_split_between_characters() -> None:
    text = "\u4e2d\u6587z\U0001f600" * 9  # which are bytes of no whole pieces but the z
    model = Copier()
    found, counts = translated(text.encode(), model)
    assert found[0].replace(" ", "") == text
    assert counts.split == [1]
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


def test_lines_are_counted_while_their_block_is_translated() -> None:
    raw = "\n".join(["bado", " ".join(toy_text.WORDS[:30]), "", "keli", "muna"]).encode()
    counted: list[int] = []
    lines = decode.LineTranslator(Copier(), Decode(), decode.LineCounts(), counted.append)
    (found,) = lines.translate(io.BytesIO(raw), lambda: None)
    assert sum(counted) == len(found) == 5
    assert counted[:3] == [1, 1, 1]
    assert min(counted) >= 0


def test_a_model_that_takes_two_tokens_has_room_for_one() -> None:
    class Short(English):
        max_length = 2

    model = Short()
    translated(b"bado keli\n", model, target="en")
    assert {len(ids) for ids in model.asked} == {3}


def test_bad_bytes_are_replaced_and_reported() -> None:
    found, counts = translated(b"bado\nkeli \xff muna\n\xc3\n", Copier(), read_ahead=2)
    assert found[0] == "bado"
    assert found[1].startswith("keli")
    assert found[1].endswith("muna")
    assert counts.replaced == [2, 3]
    assert list(counts.notes(12)) == ["not UTF-8, bad bytes replaced by U+FFFD: lines 2, 3"]
    counts.replaced[:] = range(1, 14)
    assert next(counts.notes(12)).endswith(": lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more")
    assert counts.summary() == f"lines=3 empty={counts.empty} split=0 replaced=13"


def test_sources_begin_with_the_token_of_the_target() -> None:
    model = English()
    texts = ["bado", " ".join(toy_text.WORDS[:30])]
    found, _ = translated("\n".join(texts).encode(), model, target="en")
    assert found == texts  # without the target token
    first = model.vocabulary.target_id("en")
    assert all(ids[0] == first for ids in model.asked)
    assert max(map(len, model.asked)) <= MAX_LENGTH


def test_a_target_that_is_missing_or_unknown_is_refused() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        translated(b"", English())
    assert str(caught.value) == (
        "decode.target is missing: the model translates to de, en. Try "
        "--params_override=decode.target=de"
    )
    with pytest.raises(errors.InputError, match=r"vocabulary has no <2fr>; its target tokens"):
        translated(b"", English(), target="fr")
    with pytest.raises(errors.ParamsError) as caught:
        translated(b"", Copier(), target="en")
    assert str(caught.value) == (
        "decode.target=en, but the model has one target language, and was trained without a token "
        "for it. Leave it out"
    )


def test_the_token_of_the_only_target_need_not_be_named() -> None:
    model = OneTarget()
    translated(b"bado\n", model)
    (source,) = model.asked
    assert source[0] == model.vocabulary.target_id("en")
    plain = Copier()
    translated(b"bado\n", plain)
    assert plain.asked == [source[1:]]


def job(logdir: Path | None, lines: list[str], **fields: Any) -> registry.Job:
    stop = fields.pop("should_stop", lambda: False)
    return registry.Job(
        model="toy",
        task=Mock(decode=Decode(**fields)),
        logdir=logdir,
        checkpoint=None,
        report=lines.append,
        should_stop=stop,
        rebuild=Mock(),
    )


@pytest.fixture(autouse=True)
def copier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "Decoder", Copier)


def test_a_file_is_translated_into_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_bytes(b"bado keli\n\nmu \xff\n")
    lines: list[str] = []
    decode.run(job(tmp_path, lines, input=str(source), output=str(target)))
    assert target.read_text().startswith("bado keli\n\nmu")
    assert target.read_bytes().count(b"\n") == 3
    assert lines == [
        "not UTF-8, bad bytes replaced by U+FFFD: line 3",
        f"decode step=70 lines=3 empty=1 split=0 replaced=1 to {target}",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "out.en"]


def test_a_pipe_or_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_bytes(b"bado\nkeli\n")
    os.mkfifo(target)
    reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    decode.run(job(tmp_path, [], input=str(source), output=str(target)))
    assert os.read(reader, 100) == b"bado\nkeli\n"
    os.close(reader)
    assert target.is_fifo()
    other, link = tmp_path / "other.en", tmp_path / "link.en"
    other.write_text("")
    link.symlink_to(other)
    decode.run(job(tmp_path, [], input=str(source), output=str(link)))
    assert link.is_symlink()
    assert other.read_text() == "bado\nkeli\n"


def test_the_standard_output_holds_translations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"bado\nkeli\n")))
    lines: list[str] = []
    decode.run(job(tmp_path, lines))
    out, err = capfdbinary.readouterr()
    assert out == b"bado\nkeli\n"
    assert b"decode step=70 lines=2 empty=0 split=0 replaced=0" in err
    assert not lines


def test_translations_that_were_cut_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "Decoder", Cutter)
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_bytes(b"bado\n")
    lines: list[str] = []
    decode.run(job(tmp_path, lines, input=str(source), output=str(target)))
    assert lines[0] == (
        "2 translations reached their limit of tokens and end there: decode.search.max_length and "
        "decode.search.max_extra set it"
    )


def test_a_pipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "out.en"
    os.mkfifo(pipe)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"bado\nkeli\n",), daemon=True)
    writer.start()
    decode.run(job(tmp_path, [], input=str(pipe), output=str(target)))
    writer.join(10)
    assert target.read_bytes() == b"bado\nkeli\n"


def test_lines_of_a_pipe_are_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{text}\r" for text in toy_text.sentences(400, 5)]
    lines += ["", "keli\x85muna\u2028riri", "bado"]
    raw = b"\xef\xbb\xbf" + "\n".join(lines).encode()
    assert io.DEFAULT_BUFFER_SIZE < len(raw) < 65536  # is read in pieces, and fits into a pipe
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_bytes(raw)
    decode.run(job(tmp_path, [], input=str(source), output=str(target)))
    of_file = target.read_bytes()
    reader, writer = os.pipe()
    os.write(writer, raw)
    os.close(writer)
    with open(reader, encoding="utf-8") as piped:
        monkeypatch.setattr("sys.stdin", piped)
        decode.run(job(tmp_path, [], output=str(target), read_ahead=100))
    assert target.read_bytes() == of_file
    assert of_file.count(b"\n") == 403


def test_a_stop_ends_the_wait_for_lines_and_for_who_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_streams, "_POLL_INTERVAL_S", 0.0)
    reader, writer = os.pipe()
    os.write(writer, b"bado\nke")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def give_up() -> None:
        os.close(writer)
        pipe.write_bytes(b"")

    late = threading.Timer(20, give_up)
    late.daemon = True
    late.start()
    with open(reader, encoding="utf-8") as piped:
        monkeypatch.setattr("sys.stdin", piped)
        for source in (None, str(pipe)):
            lines: list[str] = []
            asked = itertools.count()
            stopped = job(
                tmp_path,
                lines,
                input=source,
                output=str(tmp_path / "out.en"),
                should_stop=lambda asked=asked: next(asked) > 5,
            )
            decode.run(stopped)
            assert lines == [f"stopped after 0 lines: {tmp_path / 'out.en'} is not written"]
    late.cancel()
    os.close(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_nobody_asks_whether_to_stop_before_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first poll on, signals are only polled; while the model loads nothing polls."""
    asked: list[int] = []

    class Loading(Copier):
        def __init__(self, *_: Any, **where: Any) -> None:
            super().__init__(**where)
            assert not asked

    monkeypatch.setattr(translator, "Decoder", Loading)
    text = tmp_path / "text"
    text.write_text("bado\n")
    lines: list[str] = []

    def should_stop() -> bool:
        asked.append(1)
        return False

    fields = {"input": str(text), "output": str(tmp_path / "out")}
    decode.run(job(tmp_path, lines, should_stop=should_stop, **fields))
    assert asked
    assert (tmp_path / "out").read_text() == "bado\n"


def test_a_translation_appears_above_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    text = tmp_path / "text"
    text.write_text("bado\nkeli\n")
    with open(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        decode.run(job(tmp_path, [], input=str(text), read_ahead=1))
        written = b""
        while b"decode step=" not in written:  # a terminal's reader may receive it in parts
            written += os.read(master, 1 << 16)
    shown = written.decode()
    os.close(master)
    assert "translating:" in shown
    for word in ("bado", "keli"):
        assert shown[shown.index(word) - 1] in "\r\n"


def test_a_full_disk_at_the_standard_output_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"bado\n")))

    def write(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = SimpleNamespace(buffer=SimpleNamespace(write=write))
    monkeypatch.setattr("sys.stdout", full)
    with pytest.raises(errors.InputError) as caught:
        decode.run(job(tmp_path, []))
    assert str(caught.value) == (
        "the standard output cannot be written: No space left on device. Free disk space"
    )


def test_a_stop_leaves_no_half_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    source, target = tmp_path / "in.de", tmp_path / "out.en"
    source.write_text("bado\n" * 9)
    target.write_text("before\n")
    lines: list[str] = []
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 6

    stopped = job(
        tmp_path,
        lines,
        input=str(source),
        output=str(target),
        read_ahead=3,
        should_stop=should_stop,
    )
    decode.run(stopped)
    assert target.read_text() == "before\n"
    assert lines == [f"stopped after 3 lines: {target} is not written"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "out.en"]


def test_what_cannot_be_read_or_written_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "in.de"
    source.write_text("bado\n")
    with pytest.raises(errors.InputError) as caught:
        decode.run(job(tmp_path, [], input=str(tmp_path / "no.de")))
    assert str(caught.value) == (
        f"decode.input={tmp_path / 'no.de'} cannot be read: No such file or directory. Name "
        "another file"
    )
    target = tmp_path / "no" / "out.en"
    with pytest.raises(errors.InputError) as caught:
        decode.run(job(tmp_path, [], input=str(source), output=str(target)))
    assert str(caught.value) == (
        f"decode.output={target} cannot be written: No such file or directory. Name another file, "
        "or free disk space"
    )


def test_an_output_that_takes_no_more_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.de", tmp_path / "pipe"
    source.write_text("bado\n" * 50)
    with pytest.raises(errors.InputError) as caught:
        decode.run(job(tmp_path, [], input=str(source), output="/dev/full"))
    assert str(caught.value) == (
        "decode.output=/dev/full cannot be written: No space left on device. Name another file, or "
        "free disk space"
    )
    os.mkfifo(target)
    reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)

    class Lonely(Copier):
        def translate(self, sources: Any, progress: Any) -> list[list[int]]:
            os.close(reader)
            return super().translate(sources, progress)

    monkeypatch.setattr(translator, "Decoder", Lonely)
    with pytest.raises(errors.InputError, match=r"pipe cannot be written: Broken pipe\. Name"):
        decode.run(job(tmp_path, [], input=str(source), output=str(target)))


def test_a_closed_input_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(errors.InputError, match=r"input is closed. Name a file by decode\.input"):
        decode.run(job(tmp_path, []))


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    source = tmp_path / "in.de"
    source.write_text("bado\n")
    with pytest.raises(errors.InputError, match=r"decode\.output=.* is a folder\. Name a file in"):
        decode.run(job(tmp_path, [], input=str(source), output=str(tmp_path)))


def test_a_run_must_be_named() -> None:
    with pytest.raises(errors.ParamsError) as caught:
        decode.run(job(None, []))
    assert str(caught.value) == (
        "--mode=decode needs --logdir=FOLDER, of the run whose newest checkpoint translates, or "
        "--checkpoint"
    )
