"""Words of the old dialect are found in prose, with their line, and in nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import dialect

ROOT = Path(__file__).parents[2]


def found(path: str, text: str) -> list[tuple[int, str]]:
    return [
        (match.line, match.text)
        for passage in dialect.passages(path, text)
        for match in dialect.matches(passage)
    ]


def names(sentence: str) -> list[str]:
    (passage,) = dialect.passages("a.py", f'"""{sentence}"""')
    return [match.rule.name for match in dialect.matches(passage)]


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("It tells the size of each.", "tell"),
        ("The task is told the mean.", "told"),
        ("A layer gives a loss.", "gives"),
        ("Metrics that the network does not give.", "give"),
        ("Give a list of lines.", "Give a …"),
        ("It is normalised over its last side.", "sides of a tensor"),
        ("One has no batch side.", "sides of a tensor"),
        ("Return the mean over all sides but that of the batch.", "sides of a tensor"),
        ("Two doors lead there.", "door"),
        ("Move it behind slot 2.", "behind"),
        ("Prepare it anew.", "anew"),
        ("unit: of what is counted.", "of what"),
        ("placement 'gpus' is none; nearest 'gpu'", "is none"),
        ("It is read as it is kept.", "as it is kept"),
        ("A model in words: its layers.", "in words"),
        ("Figures for people: bytes with units.", "for people"),
        ("Whoever reads it is gone.", "whoever"),
        ("Who reads it does so.", "whoever"),
        ("'8 giraffes' is no size", "is no …"),
        ("tie names 'k', which it has not", "which it has not"),
        ("B0 stands before its own F0.", "stands"),
        ("Padded by so many zeros.", "so many"),
        ("A layer is handed a tuple.", "handed"),
        ("The cells after the one in hand.", "in hand"),
        ("The plan reckons with them.", "reckon"),
        ("The last was taken in silence.", "in silence"),
        ("Equal but for rounding.", "but for"),
        ("RMSProp as TensorFlow 1 has it.", "as … has it"),
        ("A rule of one's own.", "one's own"),
        ("Mend its permissions.", "mend"),
        ("Mishaps of a run.", "mishap"),
        ("Why it cannot be had.", "be had"),
        ("A full disk ends no training.", "ends no …"),
        ("A recipe wants False.", "wants"),
        ("Where they shall be.", "shall"),
        ("What training comes to.", "what it comes to"),
        ("Bytes, held against hand.", "held against"),
        ("Rooms of the package.", "rooms"),
    ],
)
def test_each_rule_finds_its_phrase(sentence: str, name: str) -> None:
    assert names(sentence) == [name]


def test_every_rule_has_an_example() -> None:
    (mark,) = test_each_rule_finds_its_phrase.pytestmark  # type: ignore[attr-defined]
    assert {name for _, name in mark.args[1]} == {rule.name for rule in dialect.RULES}


@pytest.mark.parametrize(
    "sentence",
    [
        "Set another --logdir, or give more text. Give a seed. It is given.",
        "One loss scale is tried before giving up.",
        "Side by side, both sides, the source side and its longer side; a side effect.",
        "It is left behind. It leaves nothing; the new path is behind a flag.",
        "It is None unless set; there is none. Of these, it is none of them.",
        "It is no longer read; there is no file; they are no more than two.",
        "It stands for the mean, and stands alone.",
        "So many that they fit no device; computed by hand; on the other hand.",
        "It takes the place of what was there.",
        "The process who is to write asks who sends what to whom.",
        "A user wants none. Amend the commit.",
    ],
)
def test_plain_english_passes(sentence: str) -> None:
    assert names(sentence) == []


def test_python_prose_is_docstrings_comments_and_texts() -> None:
    text = '''
"""One line.

It tells `told` and
gives ``told``.

>>> tell("it is told")
'it is told'
"""
told = {"told": 1}["told"]  # is told here
raise ValueError(
    f"{told} is none # anew; "
    "Give a number; "
    r"that stands\\nbehind"
)
# what is kept as
# it is kept
'''
    assert sorted(found("a.py", text)) == [
        (4, "tells"),
        (5, "gives"),
        (10, "is told"),
        (12, "anew"),
        (12, "is none"),
        (14, "behind"),
        (14, "stands"),
        (16, "as it is kept"),
    ]


def test_arguments_are_names_and_their_text_is_prose() -> None:
    text = '''
def f(told, behind):
    """Return it.

    Args:
        told: what is handed on.
        behind: seconds.
    """
'''
    assert found("a.py", text) == [(6, "handed")]


def test_markdown_prose_is_without_code_and_addresses() -> None:
    text = """# Anew

It [tells](https://anew.org) `gives` it.

    it tells
    it gives

- a list
    that tells

```
it tells
```
"""
    assert found("a.md", text) == [(1, "Anew"), (3, "tells"), (9, "tells")]


def test_comments_of_other_files_are_read() -> None:
    assert found("Makefile", "all: ## Made anew.\n\techo anew # anew\n") == [
        (1, "anew"),
        (2, "anew"),
    ]


@pytest.mark.parametrize(
    ("flags", "code", "lines"),
    [
        ([], 1, ["a.py:1: tells — ", "     1 tell", "     1 in all"]),
        (["--most=1"], 0, []),
        (["--count"], 0, ["     1 tell", "     1 in all"]),
    ],
)
def test_command_counts_and_refuses(
    tmp_path: Path, flags: list[str], code: int, lines: list[str]
) -> None:
    (tmp_path / "a.py").write_text('"""It tells."""\n')
    (tmp_path / "b.py").symlink_to("a.py")
    run = subprocess.run(
        [sys.executable, "-m", "tools.dialect", f"--repo={tmp_path}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stderr
    shown = run.stdout.splitlines()
    assert len(shown) == len(lines)
    assert all(line.startswith(start) for line, start in zip(shown, lines, strict=True))
