"""Flags of a command: accepted and refused values."""

from __future__ import annotations

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.console.flags import Flags


def known() -> Flags:
    flags = Flags("Counts.\n\n  count --most=3\n")
    flags.text("name", "What is counted.")
    flags.number("most", "Where it ends.")
    flags.switch("aloud", "Says each, 100 % of them.")
    flags.repeated("skip", "Leaves one out.")
    flags.several("breeds", "Of which.")
    flags.optional_text("show", "What is shown.", "*")
    return flags


def test_flags_have_their_kinds_and_defaults() -> None:
    values = known().read([])
    assert values is not None
    assert (values.name, values.most, values.aloud, values.show) == (None, None, False, None)
    assert (values.skip, values.breeds) == ([], [])
    arguments = ["--name=a,b", "--most=3", "--aloud", "--skip=1,2", "--skip=3", "--breeds=x, y"]
    values = known().read(arguments)
    assert values is not None
    assert (values.name, values.most, values.aloud) == ("a,b", 3, True)
    assert (values.skip, values.breeds) == (["1,2", "3"], ["x", "y"])


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--name", "a"], "name", "a"),
        (["-name=a=b"], "name", "a=b"),
        (["-name", "a", "--name=b"], "name", "b"),
        (["--name="], "name", ""),
        (["--most", "-3"], "most", -3),
        (["--aloud=true"], "aloud", True),
        (["--aloud", "--noaloud"], "aloud", False),
        (["--aloud=false"], "aloud", False),
        (["--breeds="], "breeds", []),
        (["--show"], "show", "*"),
        (["--show", "--most=3"], "show", "*"),
        (["--show", "a*"], "show", "a*"),
        (["--show=a*"], "show", "a*"),
    ],
)
def test_flags_are_written_in_several_ways(arguments: list[str], name: str, value: object) -> None:
    values = known().read(arguments)
    assert getattr(values, name) == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mots=3"], "unknown flag --mots; nearest --most. --help lists all flags"),
        (["--qqq", "3"], "unknown flag --qqq; --help lists all flags"),
        (["--mos=3"], "unknown flag --mos; nearest --most. --help lists all flags"),
        (["--most=few"], "flag --most: 'few' is not a whole number. --help lists all flags"),
        (["--aloud=maybe"], "flag --aloud: 'maybe' is not true or false. --help lists all flags"),
        (["--name"], "flag --name: expected one argument. --help lists all flags"),
        (["three"], "'three' stands alone: every argument is a flag. --help lists them"),
        (["--", "three"], "unknown flag --; --help lists all flags"),
    ],
)
def test_other_arguments_are_refused_in_one_line(arguments: list[str], text: str) -> None:
    with pytest.raises(errors.ParamsError) as caught:
        known().read(arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_is_printed_before_anything_is_read(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert known().read(["--wrong", asked]) is None
    printed = capsys.readouterr().out
    assert printed.startswith("Counts.\n\n  count --most=3\n")
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  --")}
    assert list(lines) == ["--name", "--most", "--aloud", "--skip", "--breeds", "--show"]
    assert lines["--aloud"].endswith("Says each, 100 % of them.")
