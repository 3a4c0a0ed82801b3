"""Tables and a picture of `benchmarks.evidence.many`, from what its runs have translated.

`python -m benchmarks.evidence.many_report --text=FOLDER --folder=RUNS --out=FOLDER` reads the runs
that are there. A score of a language's own models is the mean over their seeds; intervals are of
1,000 paired resamples of the test sentences. Each score is given twice: of all test sentences, and
without those that stand in the training text of any language of the set, on either side.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence import languages
from lingvo_gpipe.tasks.mt.decoding import scores

SYSTEMS = ("alone", "together", "continued", "proportional", "deep")
_FOLDERS = {"together": "many", "proportional": "proportional", "deep": "deep"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Scores of one language, or the mean over languages.

    Attributes:
        name: code of the language, or "mean".
        branch: as in `languages.Scarce`.
        training: pairs.
        sentences: that are scored.
        scores: system → its score.
        deviation: of the seeds of its own models.
    """

    name: str
    branch: str
    training: int
    sentences: int
    scores: Mapping[str, scores.Score]
    deviation: float


class Seen:
    """The sentences of the training text of all languages of the set, and their English."""

    def __init__(self, text: Path, codes: Sequence[str]) -> None:
        """Read the text."""
        self._sentences: set[str] = set()
        for code in codes:
            for side in ("en", code):
                path = text / code / f"{side}.train.txt"
                self._sentences.update(path.read_text(encoding="utf-8").splitlines())

    def new(self, of: scores.PairTranslations) -> scores.PairTranslations:
        """Return the translations of the sentences that the training text has on neither side."""
        places = [
            n
            for n, sides in enumerate(zip(of.sources, of.references, strict=True))
            if self._sentences.isdisjoint(sides)
        ]
        kept = ([lines[n] for n in places] for lines in (of.hypotheses, of.references, of.sources))
        return scores.PairTranslations(of.pair, of.examples, *kept)


def translations(folder: Path, code: str) -> Iterator[tuple[str, scores.PairTranslations]]:
    """Yield (system, translations) of a language, from the runs that are scored."""
    places = [("alone", path) for path in sorted((folder / "alone" / code).glob("*/score"))]
    places += [(system, folder / name / "score") for system, name in _FOLDERS.items()]
    places.append(("continued", folder / "continued" / code / "score"))
    for system, place in places:
        if (place / "test.tsv").exists():
            texts, _ = scores.read(place, "test")
            yield system, next(text for text in texts if text.pair == f"{code}:en")


def row(
    language: languages.Scarce, texts: Sequence[tuple[str, scores.PairTranslations]], metric: str
) -> Row:
    """Score the translations of a language."""
    by_system: dict[str, list[scores.Score]] = {}
    for system, text in texts:
        score = scores.score([text]).row(text.pair).scores[metric]
        by_system.setdefault(system, []).append(score)
    alone = [score.value for score in by_system.get("alone", [])]
    text = texts[0][1]
    return Row(
        language.code,
        language.branch,
        text.examples,
        len(text.references),
        {system: mean(of_seeds) for system, of_seeds in by_system.items()},
        statistics.stdev(alone) if len(alone) > 1 else float("nan"),
    )


def mean(of: Sequence[scores.Score]) -> scores.Score:
    """Return the mean of scores, and that of their resamples."""
    return scores.Score(
        statistics.fmean(score.value for score in of), np.mean([s.samples for s in of], axis=0)
    )


def mean_row(rows: Sequence[Row]) -> Row:
    """Return the means over languages, of the systems that all of them have."""
    systems = [name for name in SYSTEMS if all(name in each.scores for each in rows)]
    return Row(
        "mean",
        "",
        sum(each.training for each in rows),
        sum(each.sentences for each in rows),
        {name: mean([each.scores[name] for each in rows]) for name in systems},
        statistics.fmean(each.deviation for each in rows),
    )


def write(rows: Sequence[Row], path: Path) -> None:
    """Write a line for each language: scores, and their differences to its own models."""
    columns = ["language", "branch", "training", "sentences", "deviation of seeds", *SYSTEMS]
    others = SYSTEMS[1:]
    columns += [f"{system} - alone{part}" for system in others for part in ("", " low", " high")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(columns)
        for each in rows:
            cells: list[object] = [each.name, each.branch, each.training, each.sentences]
            cells.append(f"{each.deviation:.2f}")
            cells += [f"{each.scores[s].value:.2f}" if s in each.scores else "" for s in SYSTEMS]
            for system in others:
                if system in each.scores and "alone" in each.scores:
                    apart = each.scores[system] - each.scores["alone"]
                    cells += [f"{value:+.2f}" for value in (apart.value, *apart.interval)]
                else:
                    cells += [""] * 3
            writer.writerow(cells)


def draw(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Draw each system's score of each language."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    axes = picture.subplots()
    for number, system in enumerate(SYSTEMS[:3]):
        having = [(n, each.scores[system]) for n, each in enumerate(rows) if system in each.scores]
        values = [score.value for _, score in having]
        bounds = np.array([score.interval for _, score in having]).T.reshape(2, -1)
        axes.errorbar(
            [n + 0.2 * (number - 1) for n, _ in having],
            values,
            yerr=np.abs(bounds - values),
            fmt="o",
            capsize=3,
            label=system,
        )
    axes.set_xticks(range(len(rows)), [f"{each.name}\n{each.training:,}" for each in rows])
    axes.set(ylabel=metric, xlabel="language and its training pairs")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    picture.savefig(path, format="png", metadata={"Software": None})


def costs(folder: Path) -> dict[str, float]:
    """Return kind of run → core minutes of all its runs."""
    sums: dict[str, float] = {}
    for path in folder.rglob("cost.json"):
        kind = path.relative_to(folder).parts[0]
        sums[kind] = sums.get(kind, 0.0) + json.loads(path.read_text())["core_minutes"]
    return sums


def report(text: Path, folder: Path, out: Path, chosen: Sequence[languages.Scarce]) -> None:
    """Write `many_METRIC.tsv`, the same of new sentences alone, and a picture."""
    seen = Seen(text, languages.all_of(chosen))
    every = {each: list(translations(folder, each.code)) for each in chosen}
    every = {each: texts for each, texts in every.items() if texts}
    out.mkdir(parents=True, exist_ok=True)
    for metric in scores.METRICS:
        whole = [row(each, texts, metric) for each, texts in every.items()]
        write([*whole, mean_row(whole)], out / f"many_{metric}.tsv")
        if metric == "chrF":
            draw(whole, metric, out / "many.png")
        new = [
            row(each, [(system, seen.new(of)) for system, of in texts], metric)
            for each, texts in every.items()
        ]
        write([*new, mean_row(new)], out / f"many_{metric}_new.tsv")
    (out / "many_costs.json").write_text(json.dumps(costs(folder), indent=1))


def main() -> None:
    """Write the report of the runs that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("text", "folder", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    chosen = languages.choose(languages.count(options.text))
    report(options.text, options.folder, options.out, chosen)


if __name__ == "__main__":
    main()
