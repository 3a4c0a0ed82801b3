from __future__ import annotations

import csv
import dataclasses
import io
import zlib
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.decoding import scores

WORDS = ["Haus", "the", "dog,", "sees", "a", "tree.", "naïve", "“yes”", "10", "co-op"]
PAIRS = {"de:en": 900, "fr:en": 800, "cs:en": 700, "sw:en": 60, "ab:en": 50, "gsw:en": 40}


def text(
    pair: str, *, seed: int = 0, share: float = 0.3, count: int = 12
) -> scores.PairTranslations:
    """Return made sentences whose hypotheses have about `share` of their words replaced."""
    random = np.random.RandomState(100 * list(PAIRS).index(pair))
    references = [" ".join(random.choice(WORDS, random.randint(3, 12))) for _ in range(count)]
    sources = [reference.upper() for reference in references]
    noise = np.random.RandomState(seed)
    hypotheses = [
        " ".join(str(noise.choice(WORDS)) if noise.rand() < share else w for w in line.split())
        for line in references
    ]
    return scores.PairTranslations(pair, PAIRS[pair], hypotheses, references, sources)


def scored(*texts: scores.PairTranslations) -> scores.ScoreReport:
    return scores.score(texts)


@pytest.fixture(scope="module")
def report() -> scores.ScoreReport:
    return scored(*(text(pair, share=0.6 - PAIRS[pair] / 2000) for pair in PAIRS))


def test_scores_are_those_of_sacrebleu() -> None:
    made = text("de:en")
    row = scored(made).languages[0]
    metrics = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()}
    for name, metric in metrics.items():
        wanted = metric.corpus_score(made.hypotheses, [made.references])
        assert 5 < wanted.score < 95
        assert row.scores[name].value == wanted.score
        assert row.signatures[name] == str(metric.get_signature())
        copied = metric.corpus_score(made.sources, [made.references])
        assert row.copied[name].value == copied.score
        assert copied.score < wanted.score


def test_each_resample_is_the_score_of_its_sentences() -> None:
    made = text("de:en")
    found = scored(made).languages[0]
    # The first numbers of the generator that the pair gives.
    random = np.random.default_rng([0, zlib.crc32(b"de:en")])
    for place in range(3):
        times = random.multinomial(12, np.full(12, 1 / 12))
        drawn = np.repeat(np.arange(12), times).tolist()
        for name, metric in (("BLEU", sacrebleu.BLEU()), ("chrF", sacrebleu.CHRF())):
            wanted = metric.corpus_score(
                [made.hypotheses[n] for n in drawn], [[made.references[n] for n in drawn]]
            )
            assert found.scores[name].samples[place] == wanted.score


def test_intervals_are_about_those_of_sacrebleu() -> None:
    made = text("de:en", count=40)
    found = scored(made).languages[0]
    for name, metric in (("BLEU", sacrebleu.BLEU()), ("chrF", sacrebleu.CHRF())):
        theirs = metric.corpus_score(made.hypotheses, [made.references], n_bootstrap=1000)
        low, high = found.scores[name].interval
        assert (high - low) / 2 == pytest.approx(theirs._ci, rel=0.15)
        assert (high + low) / 2 == pytest.approx(theirs._mean, rel=0.05)


def test_groups_are_means_over_their_pairs(report: scores.ScoreReport) -> None:
    assert [row.name for row in report.languages] == list(PAIRS)
    assert [row.group for row in report.languages] == [g for g in scores.GROUPS for _ in range(2)]
    members = {
        "all": list(PAIRS),
        **{g: list(PAIRS)[2 * n :][:2] for n, g in enumerate(scores.GROUPS)},
    }
    assert [row.name for row in report.groups] == ["high", "mid", "low", "all"]
    for group, pairs in members.items():
        row = report.row(group)
        assert (row.sentences, row.examples) == (12 * len(pairs), sum(PAIRS[p] for p in pairs))
        for kind in ("scores", "copied"):
            for metric in scores.METRICS:
                of_pairs = [getattr(report.row(pair), kind)[metric] for pair in pairs]
                mean = getattr(row, kind)[metric]
                assert mean.value == pytest.approx(np.mean([one.value for one in of_pairs]))
                samples = np.mean([one.samples for one in of_pairs], axis=0)
                np.testing.assert_allclose(mean.samples, samples)
    # The pairs' resamples are independent, so the mean's interval is the narrower one.
    low, high = report.row("all").scores["chrF"].interval
    widths = [np.subtract(*row.scores["chrF"].interval) for row in report.languages]
    assert high - low < 0.7 * -np.mean(widths)


@pytest.mark.parametrize(
    ("numbers", "groups"),
    [
        ([8, 7, 6, 5, 4], "high high mid mid low"),
        ([8, 8, 7, 7, 5, 4], "high high mid mid low low"),
        # Ties across a boundary of the thirds, or across both.
        ([8, 7, 7, 5, 4, 4], "high high high mid low low"),
        ([9, 9, 5], "high high low"),
        ([9, 5, 5], "high low low"),
        ([9, 5, 5, 5], "high low low low"),
        ([9, 9, 5, 5], "high high low low"),
        ([9, 8, 5, 5, 5, 2, 1], "high high mid mid mid low low"),
        ([9, 8, 7, 6, 6, 6, 1], "high high high mid mid mid low"),
        ([5], "all"),
        ([29_000] * 3, "all all all"),
        ([], ""),
    ],
    ids=str,
)
def test_groups_are_thirds_and_pairs_with_equally_many_are_in_one(
    numbers: list[int], groups: str
) -> None:
    names = [chr(ord("a") + place) for place in range(len(numbers))]
    examples = dict(zip(names, numbers, strict=True))
    found = scores.resource_groups(dict(reversed(examples.items())))
    assert [found[name] for name in names] == groups.split()


def test_differences_are_paired() -> None:
    made = text("de:en", share=0.4, count=30)
    worse = dataclasses.replace(made, hypotheses=[*made.hypotheses[:24], *6 * "a"])
    good, bad = (scored(each).row("all").scores["chrF"] for each in (made, worse))
    assert ((good - good).value, (good - good).interval) == (0.0, (0.0, 0.0))
    better = good - bad
    assert better.value == good.value - bad.value
    low, high = better.interval
    assert 0 < low < better.value < high
    # The same resamples for both, so that what the systems share cancels out.
    unpaired = good - scored(dataclasses.replace(worse, pair="fr:en")).row("all").scores["chrF"]
    assert np.std(better.samples) < 0.85 * np.std(unpaired.samples)


@pytest.mark.parametrize("target", ["zh-Hans", "zh_CN", "zho_Hans", "ZH"])
def test_targets_without_spaces_are_cut_otherwise(target: str) -> None:
    lines = ["我们看见一只狗", "他在家"]
    made = scores.PairTranslations(
        f"en:{target}", 5, ["我们看见一只猫", "他在家"], lines, ["we see", "he is"]
    )
    row = scored(made).languages[0]
    assert "|tok:zh|" in row.signatures["BLEU"]
    assert 30 < row.scores["BLEU"].value < 90


def test_the_table_reports_groups_then_languages(report: scores.ScoreReport) -> None:
    lines = scores.table(report).splitlines()
    assert lines[0].split() == [
        "training",
        "sentences",
        *["BLEU", "95", "%", "source"],
        "chrF",
        "95",
        "%",
        "source",
    ]
    assert [line.split()[0] for line in lines[1:11]] == [*scores.GROUPS, "all", *PAIRS]
    assert lines[1].startswith("high (2)")
    assert lines[5].startswith("de:en high")
    low, high = report.row("de:en").scores["chrF"].interval
    assert f"{report.row('de:en').scores['chrF'].value:.2f}  {low:.2f}-{high:.2f}" in lines[5]
    assert lines[-2].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert lines[-1].startswith("chrF|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    short = scores.table(report, languages=False).splitlines()
    assert [line.split()[0] for line in short[1:5]] == [*scores.GROUPS, "all"]
    assert len(short) == len(lines) - len(PAIRS)


def test_tab_separated_values_hold_every_row(report: scores.ScoreReport) -> None:
    rows = list(csv.DictReader(io.StringIO(scores.tsv(report, 70)), delimiter="\t"))
    assert [(row["name"], row["kind"]) for row in rows] == [
        *((name, "group") for name in (*scores.GROUPS, "all")),
        *((name, "pair") for name in PAIRS),
    ]
    for row in rows:
        found = report.row(row["name"])
        assert (row["step"], row["group"], int(row["sentences"])) == (
            "70",
            found.group,
            found.sentences,
        )
        for metric in scores.METRICS:
            low, high = found.scores[metric].interval
            wanted = (found.scores[metric].value, low, high, found.copied[metric].value)
            columns = (metric, *(f"{metric}_{part}" for part in ("low", "high", "source")))
            assert [float(row[column]) for column in columns] == pytest.approx(wanted, abs=1e-4)
            assert row[f"{metric}_signature"] == found.signatures[metric]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    texts = [text("de:en"), text("sw:en")]
    report = scored(*texts)
    path = scores.write(tmp_path / "score", "test", texts, report, 7)
    assert path.read_text(encoding="utf-8") == scores.tsv(report, 7)
    assert (tmp_path / "score/test.txt").read_text(encoding="utf-8").startswith("step 7\n")
    assert scores.read(tmp_path / "score", "test") == (texts, 7)
    (tmp_path / "score/test/de.en.source").unlink()
    refused("de.en.source cannot be read: No such file", tmp_path / "score")
    path.unlink()
    refused("test.tsv cannot be read: .* Make it with --mode=score", tmp_path / "score")


def refused(message: str, folder: Path) -> None:
    with pytest.raises(errors.InputError, match=message) as caught:
        scores.read(folder, "test")
    assert "\n" not in str(caught.value)
