"""Languages are drawn before any training, runs go on, and a report has what was scored."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import images, images_report, languages, many, many_report, runs
from lingvo_gpipe import trainer
from lingvo_gpipe.tasks.mt.decoding import scores
from tests.tasks.image import image_files
from tests.tasks.mt import toy_text

CHOSEN = [languages.Scarce("xx", "toy", ("yy",))]
TINY = many.Size(1, 16, 2, 16)
PLAN = many.Plan(
    sizes={"tiny": TINY},
    dropouts=(0.1,),
    seeds=(0, 1),
    many=TINY,
    deep=TINY,
    steps=(4, 4),
    intervals=(2, 2),
    tuning_rates=(0.0, 1e-4, 1e-3),
    tuning_steps=2,
    vocabulary=(330, 340),
    tokens=(512, 512),
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


def test_a_run_that_is_interrupted_counts_its_cost(text: Path, tmp_path: Path) -> None:
    def program(_: Sequence[str]) -> int:
        raise KeyboardInterrupt

    train = runs.Trainer(tmp_path / "runs", 1, program)
    task = many.Comparison(PLAN, CHOSEN, text, train)._task(TINY, 0.1, 4, "xx:en")
    with pytest.raises(KeyboardInterrupt):
        train.train("a", task, 0)
    assert 0 <= runs.core_minutes(tmp_path / "runs" / "a") < 1


def test_sentences_of_the_training_text_are_left_out(text: Path) -> None:
    trained = (text / "yy/en.train.txt").read_text().splitlines()[0]
    of = scores.PairTranslations("xx:en", 40, ["a", "b"], [trained, "new"], ["s", "t"])
    assert many_report.Seen(text, languages.all_of(CHOSEN)).new(of) == [1]


def test_sentences_that_resemble_one_of_the_training_text_are_left_out(text: Path) -> None:
    (text / "xx/en.train.txt").write_text("Tom needs some water.\nA dog.\n")
    lines = ["Tom needed some water!", "Tom needs water, not wine.", "a DOG", "Tom has some."]
    of = scores.PairTranslations("xx:en", 2, lines, lines, lines)
    assert many_report.Resembled(text).unlike(of) == [1, 3]


def tables_of(page: Path) -> dict[str, list[list[str]]]:
    """Return heading → the rows of the table below it, the head first."""
    tables = {}
    for part in page.read_text(encoding="utf-8").split("## ")[1:]:
        title, *lines = part.splitlines()
        head, _, *rows = (line for line in lines if line.startswith("|"))
        tables[title] = [[c.strip() for c in line.strip("|").split("|")] for line in (head, *rows)]
    return tables


@pytest.mark.reliability_full
def test_a_small_comparison_is_trained_scored_and_reported(text: Path, tmp_path: Path) -> None:
    train = runs.Trainer(tmp_path / "runs", 60, trainer.run)
    comparison = many.Comparison(PLAN, CHOSEN, text, train)
    names = [found.name for found in runs.picked(comparison.kinds(), "")]
    first, second = "alone/xx/tiny_0.1_seed_0", "alone/xx/tiny_0.1_seed_1"
    *names, last, proportional, deep = names
    tuned = [f"continued/xx/{rate}" for rate in PLAN.tuning_rates]
    assert names == ["many", first, first, second, *tuned]
    assert last in tuned
    assert (proportional, deep) == ("proportional", "deep")
    results = runs.read_results(train.results)
    assert all(results[name].translations for name in ("many", first, second, last, "deep"))
    assert [name for name in tuned if results[name].translations] == [last]
    assert [results[name].updates for name in tuned] == [1, 2, 2]
    written, _ = scores.read(tmp_path / "runs/many/score", "test")
    read = many_report.Runs(text, runs.read_results(train.results))
    assert written == [
        dict(read.translations(many_report.KINDS, c))["together"] for c in ("yy", "xx")
    ]
    shutil.rmtree(tmp_path / "runs/many")  # as on another machine
    some = runs.picked(comparison.kinds(), "many,cont")
    assert [each.name for each in some] == ["many", *tuned, last]
    assert not (tmp_path / "runs/many").exists()
    with pytest.raises(SystemExit, match="alone/yy is none of many, alone/xx, continued/xx, prop"):
        runs.picked(comparison.kinds(), "alone/yy")
    page, picture = tmp_path / "many.md", tmp_path / "many.png"
    curves = tmp_path / "curves.png"
    many_report.report(text, train.results, page, picture, CHOSEN, {"xx": curves})
    tables = tables_of(page)
    head, row, *means = tables["chrF of twelve languages"]
    assert head[:5] == ["language", "training", "test", "alone", "± seeds"]
    assert row[:3] == ["xx", "40", "4"]
    assert all(row[3:])
    assert means == [["mean", *row[1:]], ["mean, with relatives", *row[1:]]]
    new = "BLEU of all languages, of sentences that the training text does not have"
    head, little, relatives, xx, yy = tables[new]
    assert head[3:] == [
        "together", "proportional", "deep",
        "proportional − together", "deep − together", "deep − proportional",
    ]  # fmt: skip
    assert (little, relatives) == (["little text", *xx[1:]], ["relatives", *yy[1:]])
    assert [row[0] for row in tables["Cost"]] == [
        "runs", "alone", "continued", "deep", "many", "proportional",
    ]  # fmt: skip
    assert picture.exists()
    assert curves.exists()
    head, example = tables["Examples"]
    assert head == ["language", "English", "alone", "together", "continued"]
    references = (text / "xx/en.test.txt").read_text().splitlines()
    place = min(range(4), key=lambda n: abs(len(references[n].split()) - 10))
    own = runs.read_results(train.results)
    compared = (first, "many", last)
    assert example[2:] == [own[name].translations["xx:en"][place].strip() for name in compared]
    assert example[:2] == ["xx", references[place]]


def test_a_report_leaves_out_what_is_not_there_yet() -> None:
    found = scores.Score(20.0, np.full(10, 20.0))
    minutes = {"alone": 0.0, "continued": 0.0}
    row = many_report.Row("xx", 40, 4, {"together": found}, float("nan"), minutes)
    cells = many_report.table([row], many_report.OWN).splitlines()[-1].strip("|").split("|")
    values = [cell.strip() for cell in cells[3:]]
    assert values == ["", "", "20.0 (20.0 to 20.0)", "", "", "", "", "", ""]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number, name in enumerate(("cat", "dog", "emu")):
        for split, count in (("train", 8), ("test", 2)):
            for n in range(count):
                pixels = image_files.pixels(100 * number + n, 32, 32)
                image_files.write(tmp_path / "pictures" / split / name / f"{n}.png", pixels)
    return tmp_path / "pictures"


def test_shortcuts_of_the_resnet_add_channels_of_zeros() -> None:
    network = images.resnet(4, 10, 8)
    kinds = [type(layer).__name__ for layer in network.layers]
    assert (kinds.count("Conv2D"), kinds.count("ZeroPadding2D")) == (19, 2)
    first = network.layers[kinds.index("ZeroPadding2D")]
    padded = first(np.ones([1, 2, 3, 4], np.float32))
    assert padded.shape == (1, 2, 3, 8)
    assert padded[0, 1, 2].numpy().tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_some_images_of_each_class_are_drawn_by_seed(pictures: Path, tmp_path: Path) -> None:
    def names(seed: int, folder: str) -> list[str]:
        some = images.some_of(pictures, 6, seed, tmp_path / folder)
        assert [len(list((some / "test" / name).iterdir())) for name in ("cat", "emu")] == [2, 2]
        return sorted(str(path.relative_to(some)) for path in (some / "train").glob("*/*"))

    drawn = names(1, "a")
    assert [sum(f"/{name}/" in path for path in drawn) for name in ("cat", "dog", "emu")] == [2] * 3
    assert drawn == names(1, "a") == names(1, "b") != names(2, "a")


@pytest.mark.reliability_full
def test_a_small_comparison_of_networks_is_trained_and_reported(
    pictures: Path, tmp_path: Path
) -> None:
    plan = images.Plan(
        filters=4, width=4, epochs=1, batch_size=8, seeds=(0, 1), pretraining_epochs=1,
        images={6: 2}, tuning_seeds=(1,),
    )  # fmt: skip
    train = runs.Trainer(tmp_path / "runs", 60, trainer.run)
    comparison = images.Comparison(plan, pictures, pictures, train)
    (tuned,) = runs.picked(comparison.kinds(), "tuned")
    assert (tmp_path / "runs/pretrained/checkpoints").exists()  # it was needed
    assert not (tmp_path / "runs/amoebanet").exists()
    results = [found.name for found in runs.picked(comparison.kinds(), "")]
    assert len(results) == 2 * 3 + 1 + 2
    assert results[-2:] == [tuned.name, "scratch/6/1"]
    found = images_report.rows(runs.read_results(train.results).values())
    assert images_report.table(found).count("\n") == 1 + len(found)
    compared = images_report.differences(found)
    assert [(row.name, row.updates) for row in compared[:1]] == [("amoebanet − resnet", 0)]
    assert [row.name for row in compared[2:]] == ["tuned/6 − scratch/6"]
    images_report.draw(found, tmp_path / "images.png")
    by_run = {row.name: row for row in found}
    kinds = {"amoebanet", "resnet", "resnet_minutes", "pretrained", "scratch/6", "tuned/6"}
    assert set(by_run) == kinds
    assert (by_run["amoebanet"].updates, len(by_run["amoebanet"].accuracies)) == (3, 2)
    assert by_run["resnet_minutes"].updates != by_run["resnet"].updates == 3
    starts = [
        (tmp_path / "runs" / kind / "6/1/params.txt").read_text() for kind in ("scratch", "tuned")
    ]
    assert [text.count("classifier/*") for text in starts] == [0, 1]
    assert (tmp_path / "images.png").exists()


@pytest.mark.parametrize(("accuracies", "error"), [((0.5, 0.7), 1.2706), ((0.5,), None)])
def test_the_interval_of_a_mean_is_that_of_students_t(
    accuracies: tuple[float, ...], error: float | None
) -> None:
    by_seed = {str(seed): accuracy for seed, accuracy in enumerate(accuracies)}
    row = images_report.Row("a", 1, 1.0, by_seed)
    assert row.error == pytest.approx(float("nan") if error is None else error, nan_ok=True)


def test_kinds_of_runs_are_compared_by_seed() -> None:
    tuned = images_report.Row("tuned/100", 160, 3.0, {"1": 0.5, "2": 0.9, "3": 0.4})
    scratch = images_report.Row("scratch/100", 160, 2.0, {"2": 0.8, "1": 0.4})
    (row,) = images_report.differences([tuned, scratch])
    assert (row.name, row.updates, row.core_minutes) == ("tuned/100 − scratch/100", 0, 1.0)
    assert row.accuracies == pytest.approx({"1": 0.1, "2": 0.1})
    assert row.error == pytest.approx(0.0)
