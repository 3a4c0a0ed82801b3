from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support import scalars
from benchmarks.translation import compare
from lingvo_gpipe.tasks.mt.decoding import scores
from tests.tasks.mt.decoding import scores_test

PAIRS = ("de:en", "sw:en", "ab:en")


def scored(logdir: Path, pairs: tuple[str, ...], share: float, step: int = 9) -> Path:
    """Write the files of --mode=score into `logdir`."""
    texts = [scores_test.text(pair, share=share) for pair in pairs]
    report = scores.score(texts)
    scores.write(logdir / "score", "test", texts, report, step)
    return logdir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    scored(folder / "all", PAIRS, 0.3)
    scored(folder / "untrained", PAIRS, 0.9)
    for pair in PAIRS:
        scored(folder / pair[:2], (pair,), 0.5)
    return folder


def reported(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> list[list[str]]:
    """Run the program; return the cells of its table."""
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    compare.main()
    lines = capsys.readouterr().out.splitlines()
    return [line[2:-2].split(" | ") for line in lines if line.startswith("|")]


def systems(runs: Path) -> tuple[str, ...]:
    alone = ",".join(str(runs / pair[:2]) for pair in PAIRS)
    return f"untrained={runs}/untrained", f"bilingual={alone}", f"multilingual={runs}/all"


def test_systems_stand_side_by_side(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    picture = f"--picture={tmp_path}/bars.png"
    flags = ("--metric=chrF", "--against=bilingual", picture, "--rows=both")
    head, _, *rows = reported(monkeypatch, capsys, *flags, *systems(runs))
    assert head[3:] == [
        *("copied source", "untrained", "bilingual", "multilingual"),
        *("untrained − bilingual", "multilingual − bilingual"),
    ]
    assert [row[0] for row in rows] == [*scores.GROUPS, "all", *PAIRS]
    shares = {"untrained": 0.9, "bilingual": 0.5, "multilingual": 0.3}
    for pair in PAIRS:
        cells = dict(zip(head, rows[4 + PAIRS.index(pair)], strict=True))
        wanted = {}
        for name, share in shares.items():
            row = scores.score([scores_test.text(pair, share=share)]).languages[0]
            wanted[name] = row.scores["chrF"]
            low, high = wanted[name].interval
            assert cells[name] == f"{wanted[name].value:.2f} ({low:.2f} to {high:.2f})"
            assert cells["copied source"] == f"{row.copied['chrF'].value:.2f}"
        better = wanted["multilingual"] - wanted["bilingual"]
        low, high = better.interval
        text = f"{better.value:+.2f} ({low:+.2f} to {high:+.2f})"
        assert cells["multilingual − bilingual"] == text
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_losses_come_from_the_newest_evaluation(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def read(folder: Path) -> dict[str, list[scalars.Point]]:
        assert folder.name == "eval_test"
        name = folder.parent.name
        if name in ("all", "untrained"):
            found = {
                f"language_log_perplexity/{pair}": [
                    scalars.Point(9, 1.0, 7.0),
                    scalars.Point(9, 2.0, {"all": 2.0, "untrained": 5.0}[name] + place),
                ]
                for place, pair in enumerate(PAIRS)
            }
            return {**found, "log_perplexity": [scalars.Point(9, 1.0, 99.0)]}
        return {"log_perplexity": [scalars.Point(9, 1.0, 3.0)]}

    monkeypatch.setattr(scalars, "read", read)
    head, _, *rows = reported(
        monkeypatch,
        capsys,
        *("--metric=loss", "--evaluations=eval_test", "--against=bilingual", "--rows=both"),
        *systems(runs),
    )
    assert head[:5] == ["", "training", "untrained", "bilingual", "multilingual"]
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert [by_name[pair]["multilingual"] for pair in PAIRS] == ["2.00", "3.00", "4.00"]
    assert [by_name[pair]["multilingual − bilingual"] for pair in PAIRS] == [
        *("-1.00", "+0.00", "+1.00")
    ]
    assert by_name["all"]["untrained"] == "6.00 (5.00 to 7.00)"
    assert by_name["all"]["multilingual − bilingual"] == "+0.00 (-1.00 to +1.00)"


def test_resamples_of_a_loss_are_of_languages() -> None:
    texts = [scores_test.text(pair) for pair in PAIRS]
    report = scores.score(texts)
    found = dict(compare._group_losses(report, dict(zip(PAIRS, (1.0, 2.0, 6.0), strict=True))))
    assert found["all"].value == pytest.approx(3.0)
    assert found["low"].value == 6.0
    assert found["low"].interval == (6.0, 6.0)
    # Means of three values drawn from three: the closed form of their variance.
    assert np.std(found["all"].samples) == pytest.approx(np.std([1, 2, 6]) / 3**0.5, rel=0.1)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, message: str, *arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        reported(monkeypatch, capsys, *arguments)
    assert caught.value.code == 1
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    one, other = f"a={runs}/all", f"b={runs}/de"
    refused(monkeypatch, capsys, "did not translate the same sentences", one, other)
    texts = [scores_test.text(pair, share=0.3) for pair in PAIRS]
    regrouped = [dataclasses.replace(t, examples=-t.examples) for t in texts]
    report = scores.score(regrouped)
    scores.write(tmp_path / "other/score", "test", regrouped, report, 9)
    refused(
        monkeypatch,
        capsys,
        "differ in the languages of a",
        one,
        f"c={tmp_path}/other",
    )
    refused(monkeypatch, capsys, "cannot be read: No such file", one, f"b={tmp_path}")
    refused(monkeypatch, capsys, "--against=c: there are a", "--against=c", one)
    message = "eval has no evaluation of de:en at step 9. Make it by --mode=eval --logdir="
    refused(monkeypatch, capsys, message, "--metric=loss", one)
    monkeypatch.setattr(scalars, "read", lambda _: {"log_perplexity": [scalars.Point(8, 1.0, 3.0)]})
    for system in (one, other):
        refused(monkeypatch, capsys, message, "--metric=loss", system)
