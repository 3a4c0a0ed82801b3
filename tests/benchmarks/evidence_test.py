"""Languages are drawn before any training, runs go on, and a report has what was scored."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.evidence import languages, many, many_report, runs
from benchmarks.support.scalars import Point
from lingvo_gpipe import trainer
from lingvo_gpipe.tasks.mt.decoding import scores
from tests.tasks.mt import toy_text

CHOSEN = [languages.Scarce("xx", "toy", ("yy",))]
TINY = many.Size(1, 16, 2, 16)
PLAN = many.Plan(
    sizes={"tiny": TINY},
    dropouts=(0.1,),
    seeds=(0, 1),
    many=TINY,
    deep=TINY,
    steps=4,
    many_steps=4,
    many_hours=0.0,
    tuning_steps=2,
    vocabulary=(330, 340),
    tokens=(512, 512),
    evaluations=2,
    dtype="float32",
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = toy_text.write_folder(tmp_path / "text", {"xx": 40, "yy": 60}, held_out=4)
    for path in folder.glob("*/*.test.txt"):
        shutil.copy(path, path.with_name(path.name.replace("test", "valid")))
    return folder


def test_languages_have_little_text_and_their_relatives_more() -> None:
    codes = " ".join((*languages.BRANCHES.values(), languages.ISOLATED)).split()
    assert len(codes) == len(set(codes))
    pairs = {code: 1_000 if number % 2 else 5_000 for number, code in enumerate(codes)}
    chosen = languages.choose(pairs, seed=1)
    assert [pairs[each.code] for each in chosen] == [1_000] * 12
    assert len({each.branch for each in chosen}) == 8 + 1
    for each in chosen[:8]:
        assert each.relatives
        of_branch = languages.BRANCHES[each.branch].split()
        assert all(code in of_branch and pairs[code] == 5_000 for code in each.relatives)
    assert chosen == languages.choose(pairs, seed=1) != languages.choose(pairs, seed=2)


@pytest.mark.parametrize(
    ("values", "settled"), [([4, 3, 2.99], True), ([4, 3, 2.9], False), ([4, 3, 3.5], True)]
)
def test_a_loss_has_settled_when_it_falls_by_less_than_a_hundredth(
    values: Sequence[float], settled: bool
) -> None:
    points = [Point(10 * n, 0.0, value) for n, value in enumerate(values, start=8)]
    assert runs.has_settled(points) is settled


def test_a_sitting_ends_and_the_next_one_goes_on(text: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def program(arguments: Sequence[str]) -> int:
        asked.append(arguments[0])
        return int(len(asked) == 2)

    train = runs.Trainer(tmp_path / "runs", 1, program)
    task = many.Comparison(PLAN, CHOSEN, text, train)._task(TINY, 0.1, 4, "xx:en")
    train.train("a", task, 0)
    with pytest.raises(RuntimeError, match="the trainer failed with 1"):
        train.train("b", task, 0)
    with pytest.raises(runs.SittingOver):
        runs.Trainer(tmp_path / "runs", -1, program).train("b", task, 0)
    again = runs.Trainer(tmp_path / "runs", 1, program)
    assert again.train("a", task, 0) == tmp_path / "runs" / "a"  # done
    again.train("b", task, 0)
    task.train.max_steps += 1
    again.train("a", task, 0)
    assert asked == ["--mode=train_eval"] * 4


def test_sentences_of_the_training_text_are_left_out(text: Path) -> None:
    trained = (text / "yy/en.train.txt").read_text().splitlines()[0]
    of = scores.PairTranslations("xx:en", 40, ["a", "b"], [trained, "new"], ["s", "t"])
    new = many_report.Seen(text, languages.all_of(CHOSEN)).new(of)
    assert (new.hypotheses, new.references, new.sources) == (["b"], ["new"], ["t"])


@pytest.mark.reliability_full
def test_a_small_comparison_is_trained_scored_and_reported(text: Path, tmp_path: Path) -> None:
    train = runs.Trainer(tmp_path / "runs", 60, trainer.run)
    for system, code, folder in many.Comparison(PLAN, CHOSEN, text, train).scores():
        assert (folder / "test.tsv").exists(), (system, code)
    many_report.report(text, tmp_path / "runs", tmp_path / "report", CHOSEN)
    with (tmp_path / "report/many_chrF.tsv").open(encoding="utf-8", newline="") as file:
        row, mean = csv.DictReader(file, delimiter="\t")
    assert (row["language"], row["training"], row["sentences"]) == ("xx", "40", "4")
    assert all(row[system] for system in many_report.SYSTEMS)
    assert mean["alone"] == row["alone"]
    cost = json.loads((tmp_path / "report/many_costs.json").read_text())
    assert set(cost) == {"alone", "many", "continued", "proportional", "deep"}
    assert (tmp_path / "report/many.png").exists()
