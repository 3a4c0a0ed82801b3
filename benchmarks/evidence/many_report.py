"""A page of tables and a picture of `benchmarks.evidence.many`, from what its runs have translated.

`python -m benchmarks.evidence.many_report --text=FOLDER --results=FILE --page=FILE --picture=FILE
--curves CODE=FILE` reads the results that are there. The languages with little text come first:
their own models are compared with the model of all languages. Then all languages, for which kinds
of that model are compared. A score of a language's own models is the mean over their seeds;
intervals of 95 % are of 1,000 paired resamples of the test sentences. Each table is written again
without the sentences that stand in the training text of any language of the set, on either side;
those of the languages with little text also without sentences that resemble one of their own
training text.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.evidence import languages
from benchmarks.evidence.runs import Result, read_results
from benchmarks.support import markdown
from lingvo_gpipe.tasks.mt.decoding import score, scores

# Column → its runs' names, in which `*` stands for each kind and seed.
OWN = {"alone": "alone/{}/*", "together": "many", "continued": "continued/{}/*"}
KINDS = {"together": "many", "proportional": "proportional", "deep": "deep"}
_WORDS = 10  # of an example, about
_ALIKE = 0.6  # share of their words that two sentences have in common
_INTRODUCTION = (
    "`benchmarks.evidence.many_report` wrote this page. What was done is said in "
    "[evidence.md](evidence.md).",
    "*alone* is the mean of a language's own models, and *± seeds* their standard deviation. "
    "*together* is the model of all languages, *continued* the same trained on for the language, "
    "*proportional* at T=1, *deep* with twice the layers. Means are of the languages that all "
    "systems have translated. In brackets are intervals of 95 %, of 1,000 paired resamples of the "
    "sentences.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Scores of one language, or the mean over languages.

    Attributes:
        name: code of the language, or of what the mean is.
        training: pairs.
        sentences: that are scored.
        scores: system → its score, for the systems that have translated it.
        deviation: of the seeds of its own models; NaN for fewer than two.
        minutes: system → core minutes of the runs that the language has of its own.
    """

    name: str
    training: int
    sentences: int
    scores: Mapping[str, scores.Score]
    deviation: float
    minutes: Mapping[str, float]


class Seen:
    """The sentences of the training text of all languages of the set, and their English."""

    def __init__(self, text: Path, codes: Sequence[str]) -> None:
        """Read the text."""
        self._sentences: set[str] = set()
        for code in codes:
            for side in ("en", code):
                path = text / code / f"{side}.train.txt"
                self._sentences.update(path.read_text(encoding="utf-8").splitlines())

    def new(self, of: scores.PairTranslations) -> list[int]:
        """Return the places of the sentences that the training text has on neither side."""
        return [
            n
            for n, sides in enumerate(zip(of.sources, of.references, strict=True))
            if self._sentences.isdisjoint(sides)
        ]


class Resembled:
    """The English of the training text of each language, by its words."""

    def __init__(self, text: Path) -> None:
        """Read the text of a language when it is first asked for.

        Args:
            text: folder with a folder of text for each language.
        """
        self._text = text

    def unlike(self, of: scores.PairTranslations) -> list[int]:
        """Return the places of the sentences that no training sentence of the language resembles.

        Two sentences resemble each other if they have three fifths of their English words in
        common, such as "Tom needs water." and "Tom needed water."
        """
        trained = self._trained(of.pair.partition(":")[0])
        places = []
        for place, line in enumerate(of.references):
            words = _words(line)
            if all(len(words & each) < _ALIKE * len(words | each) for each in trained):
                places.append(place)
        return places

    @functools.cache  # noqa: B019 (one object for a report)
    def _trained(self, code: str) -> list[frozenset[str]]:
        path = self._text / code / "en.train.txt"
        return [_words(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _words(line: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", line.lower()))


Kept: TypeAlias = Callable[[scores.PairTranslations], Sequence[int]]
"""Places of the sentences of a language that are scored."""


class Runs:
    """The results of runs, and the test sentences that they translated."""

    def __init__(self, text: Path, results: Mapping[str, Result]) -> None:
        """Read the text of a language when it is first asked for.

        Args:
            text: folder with a folder of text for each language.
            results: name → result.
        """
        self._text = text
        self._training = languages.count(text)
        self.results = results

    def of(self, name: str) -> list[Result]:
        """Return the results of the runs with a name, in which `*` stands for any part."""
        return [found for run, found in self.results.items() if fnmatch.fnmatchcase(run, name)]

    def translations(
        self, systems: Mapping[str, str], code: str
    ) -> Iterator[tuple[str, scores.PairTranslations]]:
        """Yield (system, translations) of a language, for each run that has translated it."""
        pair = f"{code}:en"
        for system, name in systems.items():
            for found in self.of(name.format(code)):
                if pair in found.translations:
                    yield (
                        system,
                        scores.PairTranslations(
                            pair,
                            self._training[code],
                            found.translations[pair],
                            self._lines(code, "en"),
                            self._lines(code, code),
                        ),
                    )

    def _lines(self, code: str, language: str) -> list[str]:
        path = self._text / code / f"{language}.test.txt"
        lines = path.read_text(encoding="utf-8").splitlines()
        return score.spaced(lines, languages.SENTENCES)

    def minutes(self, system: str, code: str) -> float:
        """Return the core minutes of all runs that one language has in a system."""
        return sum(found.core_minutes for found in self.of(OWN[system].format(code)))

    def row(
        self, systems: Mapping[str, str], code: str, metric: str, kept: Kept | None = None
    ) -> Row | None:
        """Score the translations of a language; None if there are none.

        Args:
            systems: its columns.
            code: of the language.
            metric: one of `scores.METRICS`.
            kept: chooses the sentences; None: all.
        """
        texts = list(self.translations(systems, code))
        if not texts:
            return None
        by_system: dict[str, list[scores.Score]] = {}
        places = range(len(texts[0][1].references)) if kept is None else kept(texts[0][1])
        for system, text in texts:
            some = (
                [lines[n] for n in places]
                for lines in (text.hypotheses, text.references, text.sources)
            )
            of_some = scores.PairTranslations(text.pair, text.examples, *some)
            value = scores.score([of_some]).row(text.pair).scores[metric]
            by_system.setdefault(system, []).append(value)
        seeds = [value.value for value in by_system.get("alone", [])]
        return Row(
            code,
            text.examples,
            len(places),
            {system: mean(of_seeds) for system, of_seeds in by_system.items()},
            statistics.stdev(seeds) if len(seeds) > 1 else float("nan"),
            {system: self.minutes(system, code) for system in systems if "{}" in systems[system]},
        )


def mean(of: Sequence[scores.Score]) -> scores.Score:
    """Return the mean of scores, and that of their resamples."""
    return scores.Score(
        statistics.fmean(score.value for score in of), np.mean([s.samples for s in of], axis=0)
    )


def mean_row(name: str, rows: Sequence[Row]) -> Row:
    """Return the means over languages, of the systems that all of them have."""
    systems = [name for name in rows[0].scores if all(name in each.scores for each in rows)]
    return Row(
        name,
        round(statistics.fmean(each.training for each in rows)),
        round(statistics.fmean(each.sentences for each in rows)),
        {name: mean([each.scores[name] for each in rows]) for name in systems},
        statistics.fmean(each.deviation for each in rows),
        {name: statistics.fmean(each.minutes[name] for each in rows) for name in rows[0].minutes},
    )


def table(rows: Sequence[Row], systems: Mapping[str, str]) -> str:
    """Return a markdown table: scores, and the differences of the systems."""
    first, *others = systems
    pairs = list(itertools.combinations(systems, 2))
    own = [name for name, place in systems.items() if "{}" in place]
    seeds = ["± seeds"] if own else []
    head = ["language", "training", "test", first, *seeds, *others]
    head += [f"{other} − {one}" for one, other in pairs]
    head += [f"{name}, core minutes" for name in own]
    lines = [head]
    for each in rows:
        found = each.scores
        values = [_cell(found[name]) if name in found else "" for name in systems]
        if own:
            values.insert(1, "" if math.isnan(each.deviation) else f"{each.deviation:.1f}")
        lines.append([each.name, f"{each.training:,}", f"{each.sentences:,}", *values])
        lines[-1] += [
            _cell(found[other] - found[one], "+") if {one, other} <= found.keys() else ""
            for one, other in pairs
        ]
        lines[-1] += [f"{each.minutes[name]:.0f}" if each.minutes[name] else "" for name in own]
    return markdown.table(lines)


def _cell(score: scores.Score, sign: str = "") -> str:
    low, high = score.interval
    return f"{score.value:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def draw(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Draw each system's score of each language with little text."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    axes = picture.subplots()
    for number, system in enumerate(OWN):
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


def draw_curves(runs: Runs, code: str, path: Path) -> None:
    """Draw the loss and the accuracy on `valid` of each model that was trained on one language."""
    from matplotlib import figure

    picture = figure.Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    panels = picture.subplots(1, 2)
    kinds = {found.name: found for found in runs.of(f"alone/{code}/*_seed_0")}
    kinds |= {found.name: found for found in runs.of(f"continued/{code}/*")}
    for name, found in kinds.items():
        system, *_, kind = name.removesuffix("_seed_0").split("/")
        label, style = kind.replace("_", ", dropout "), "--" if kind.startswith("small") else "-"
        if system == "continued":
            label, style = f"continued, rate {kind}", "k--" if kind == "0.0002" else "k-"
            if float(kind) == 0:
                label, style = "together", "k*"
        updates, accuracies, losses = zip(*found.evaluations, strict=True)
        for axes, values in zip(panels, (losses, accuracies), strict=True):
            axes.plot(updates, values, style, label=label)
    for axes, what in zip(panels, ("loss per token", "accuracy"), strict=True):
        axes.set(xlabel="update", ylabel=f"{what} on valid, {code}")
        axes.grid(alpha=0.3)
    panels[1].legend()
    picture.savefig(path, format="png", metadata={"Software": None})


def examples(runs: Runs, codes: Sequence[str]) -> str:
    """Return a markdown table with one sentence of each language, and its translations.

    It is the first of the test set whose English is nearest to ten words.
    """
    lines = [["language", "English", *OWN]]
    for code in codes:
        texts = dict(reversed(list(runs.translations(OWN, code))))  # of the first seed
        if texts:
            references = next(iter(texts.values())).references
            lengths = [len(line.split()) for line in references]
            place = min(range(len(lengths)), key=lambda n: abs(lengths[n] - _WORDS))
            found = [texts[system].hypotheses[place] if system in texts else "" for system in OWN]
            cells = [references[place], *found]
            lines.append([code, *(cell.replace("|", "\\|") for cell in cells)])
    return markdown.table(lines).replace("---:", "---")


def report(
    text: Path,
    results: Path,
    page: Path,
    picture: Path,
    chosen: Sequence[languages.Scarce],
    curves: Mapping[str, Path],
) -> None:
    """Write the page and the pictures of the results in a file.

    Args:
        text: folder with a folder of text for each language.
        results: the file.
        page: to write.
        picture: to write.
        chosen: the languages with little text.
        curves: code of a language → picture to write of its models' training.
    """
    runs = Runs(text, read_results(results))
    for code, path in curves.items():
        draw_curves(runs, code, path)
    relatives_of = {each.code: each.relatives for each in chosen}
    scarce = list(relatives_of)
    every = languages.all_of(chosen)
    parts = ["# Scores of languages with little text", *_INTRODUCTION]
    all_kept: dict[str, Kept | None] = {
        "": None,
        ", of sentences that the training text does not have": Seen(text, every).new,
    }
    unlike = {", of sentences that no training sentence resembles": Resembled(text).unlike}
    for metric, (note, kept) in itertools.product(scores.METRICS, (all_kept | unlike).items()):
        rows = [row for code in scarce if (row := runs.row(OWN, code, metric, kept))]
        done = [row for row in rows if row.scores.keys() == OWN.keys()]
        groups = {
            "mean": done,
            "mean, with relatives": [row for row in done if relatives_of[row.name]],
            "mean, without": [row for row in done if not relatives_of[row.name]],
        }
        means = [mean_row(name, some) for name, some in groups.items() if some]
        parts += [f"## {metric} of twelve languages{note}", table([*rows, *means], OWN)]
        if metric == "chrF" and kept is None:
            draw(rows, metric, picture)
    for metric, (note, kept) in itertools.product(scores.METRICS, all_kept.items()):
        rows = [row for code in every if (row := runs.row(KINDS, code, metric, kept))]
        little = [row for row in rows if row.name in scarce]
        relatives = [row for row in rows if row.name not in scarce]
        means = [mean_row("little text", little), mean_row("relatives", relatives)]
        parts += [f"## {metric} of all languages{note}", table([*means, *rows], KINDS)]
    parts += ["## Examples", examples(runs, scarce)]
    costs: dict[str, float] = {}
    for name in sorted(runs.results):
        kind = name.partition("/")[0]
        costs[kind] = costs.get(kind, 0.0) + runs.results[name].core_minutes
    lines = [["runs", "core minutes"], *([kind, f"{costs[kind]:.0f}"] for kind in costs)]
    parts += ["## Cost", markdown.table(lines)]
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    """Write the report of the runs that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of each language's text")
    parser.add_argument("--results", type=Path, required=True, help="of the runs")
    parser.add_argument("--page", type=Path, required=True, help="Markdown to write")
    parser.add_argument("--picture", type=Path, required=True, help="PNG to write")
    parser.add_argument(
        "--curves", nargs="*", default=[], help="CODE=FILE: PNG of a language's training to write"
    )
    options = parser.parse_args()
    chosen = languages.choose(languages.count(options.text))
    curves = {code: Path(path) for code, path in (each.split("=") for each in options.curves)}
    report(options.text, options.results, options.page, options.picture, chosen, curves)


if __name__ == "__main__":
    main()
