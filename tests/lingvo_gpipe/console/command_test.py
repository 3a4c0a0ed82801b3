"""Flags of a command: what they read, what they refuse, how mistakes are told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import command


def known() -> command.Flags:
    made = command.Flags("count", "Counts.\n\n  count --most=3\n")
    made.text("name", "Of what.", "sheep")
    made.number("most", "Where it ends.")
    made.switch("aloud", "Says each.")
    made.repeated("skip", "Leaves one out.")
    made.several("breeds", "Of which.")
    return made


def test_flags_have_their_kinds_and_defaults() -> None:
    values = known().read([])
    assert values is not None
    assert (values.name, values.most, values.aloud) == ("sheep", None, False)
    assert (values.skip, values.breeds) == ([], [])
    given = ["--name=a,b", "--most=3", "--aloud", "--skip=1,2", "--skip=3", "--breeds=x,y"]
    values = known().read(given)
    assert values is not None
    assert (values.name, values.most, values.aloud) == ("a,b", 3, True)
    assert (values.skip, values.breeds) == (["1,2", "3"], ["x", "y"])


def test_a_list_knows_its_own_flags_alone() -> None:
    assert {"name", "most", "aloud", "skip", "breeds"} <= {*known()}
    assert "most" not in {*command.Flags("other", "")}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--mots=3"], r"Unknown command line flag 'mots'\. Did you mean: most\. --help lists"),
        (["--most=few"], "flag --most=few: "),
        (["three"], "'three' stands alone: every argument is a flag"),
    ],
)
def test_what_is_no_flag_is_refused_in_one_line(given: list[str], text: str) -> None:
    with pytest.raises(errors.ParamsError, match=text) as caught:
        known().read(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_is_printed_before_anything_is_read(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert known().read(["--wrong", asked]) is None
    told = capsys.readouterr().out
    assert told.startswith("Counts.\n\n  count --most=3\n")
    assert "--most: Where it ends." in told


def test_a_mistake_is_told_by_the_kind_that_users_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.UserError) as caught:
        hyperparams.Configurable.Params().get("x")
    assert type(caught.value) is not errors.ParamsError
    assert command.mistake(caught.value).startswith("ParamsError: ")
    command.report("a line")
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("utf-8", "runs/gr\\udcfcn → ü"),
        ("latin-1", "runs/gr\\udcfcn \\u2192 ü"),
        ("ascii", "runs/gr\\udcfcn \\u2192 \\xfc"),
    ],
)
def test_what_the_outputs_encoding_lacks_is_told_with_backslashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, told: str
) -> None:
    path = os.fsdecode(b"runs/gr\xfcn")
    with open(tmp_path / "out", "w", encoding=encoding) as out:
        monkeypatch.setattr(sys, "stdout", out)
        command.report(f"{path} → ü")
    assert (tmp_path / "out").read_text(encoding=encoding) == f"{told}\n"


def test_a_full_disk_behind_the_output_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        command.report("a line")
        command.finish()
    assert capsys.readouterr().err == (
        "the end of the output cannot be written: No space left on device\n"
    )
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        command.note("a line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_reader_that_is_gone_is_told_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            command.report("a line")
        with pytest.raises(BrokenPipeError):
            command.finish()
        command.drop_output()
