"""Flags of a command: accepted and refused values."""

from __future__ import annotations

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.console.flags import Flags


def known() -> Flags:
    flags = Flags("Counts.\n\n  count --most=3\n")
    flags.text("name", "What is counted.")
    flags.number("most", "Where it ends.")
    flags.switch("aloud", "Says each.")
    flags.repeated("skip", "Leaves one out.")
    return flags


def test_flags_have_their_kinds_and_defaults() -> None:
    values = known().read([])
    assert (values.name, values.most, values.aloud, values.skip) == (None, None, False, [])
    values = known().read(["--name=a,b", "--most", "-3", "--aloud", "--skip=1,2", "--skip=3"])
    assert (values.name, values.most, values.aloud) == ("a,b", -3, True)
    assert values.skip == ["1,2", "3"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mots=3"], "unknown flag --mots; nearest '--most'. --help lists all flags"),
        (["--most=few"], "argument --most: invalid int value: 'few'. --help lists all flags"),
        (["--name"], "argument --name: expected one argument. --help lists all flags"),
        (
            ["three"],
            "unknown flag three; there are '--aloud', '--help', '--most', '--name', '--skip', "
            "'-h'. --help lists all flags",
        ),
        (["--name="], "--name= is empty. Give a value, or leave it out"),
    ],
)
def test_other_arguments_are_refused_in_one_line(arguments: list[str], text: str) -> None:
    with pytest.raises(errors.ParamsError) as caught:
        known().read(arguments)
    assert str(caught.value) == text


def test_help_is_printed_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        known().read(["--help", "--wrong"])
    printed = capsys.readouterr().out
    assert printed.startswith("Counts.\n\n  count --most=3\n")
    assert "Leaves one out." in printed
