"""Text between corpora and records: written in one pass, drawn by temperature."""

from __future__ import annotations

import resource
from pathlib import Path

from lingvo_gpipe.tasks.mt.text import clean_text
from lingvo_gpipe.tasks.mt.text.corpora.faults import SentencePair
from lingvo_gpipe.tasks.mt.text.vocabulary_training import VocabularyTraining
from tests.tasks.mt import toy_text

SIZES = {"de": 300, "sw": 40}


def test_more_texts_than_files_that_may_be_open_are_written_in_their_order(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    texts = {
        (f"l{n}", "en"): clean_text.CleanText("train", f"l{n}", "en", tmp_path / f"{n}.txt", {})
        for n in range(300)
    }
    silent = ("silent", "en")
    texts[silent] = clean_text.CleanText("train", *silent, tmp_path / "silent.txt", {"before": 0})
    found = [
        ((f"l{n}", "en"), SentencePair(f"source {n} {k}", f"target {n} {k}", "here"))
        for k in range(60)
        for n in range(300)
    ]
    already_open = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (already_open + 100, hard))
    try:
        clean_text.append(texts, "one", iter(found))
        clean_text.append(texts, "other", iter(found[:300]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found) > 2 * clean_text._BLOCK
    for n in range(300):
        text = texts[f"l{n}", "en"]
        wanted = [(f"source {n} {k}", f"target {n} {k}") for k in (*range(60), 0)]
        assert list(text.sentences()) == wanted
        assert text.corpora == {"one": 60, "other": 1}
        assert text.count == 61
    assert not list(texts[silent].sentences())
    assert texts[silent].corpora == {"before": 0, "one": 0, "other": 0}


def test_the_vocabulary_sees_languages_by_temperature(tmp_path: Path) -> None:
    lines: dict[float, list[str]] = {}
    texts = []
    folder = toy_text.write_folder(tmp_path / "text", SIZES)
    for language in SIZES:
        pairs = zip(
            *(
                (folder / language / f"{name}.train.txt").read_text().splitlines()
                for name in (language, "en")
            ),
            strict=True,
        )
        path = tmp_path / language
        path.write_text("".join(f"{language} {a}\nen {b}\n" for a, b in pairs))
        texts.append(clean_text.CleanText("train", language, "en", path, {"x": SIZES[language]}))
    for temperature in (1.0, 5.0):
        training = VocabularyTraining(temperature=temperature, sentences=200)
        lines[temperature] = list(clean_text.sample(texts, training, 0))
        assert len(lines[temperature]) == 200
        assert list(clean_text.sample(texts, training, 0)) == lines[temperature]
        assert list(clean_text.sample(texts, training, 1)) != lines[temperature]

    def share(temperature: float, language: str) -> float:
        return sum(line.startswith(f"{language} ") for line in lines[temperature]) / 200

    sizes = {"de": 300, "en": 340, "sw": 40}
    for temperature in (1.0, 5.0):
        total = sum(size ** (1 / temperature) for size in sizes.values())
        for language, size in sizes.items():
            wanted = size ** (1 / temperature) / total
            assert abs(share(temperature, language) - wanted) <= 1 / 200 + 1e-9
