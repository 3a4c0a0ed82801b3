"""`--mode=score`, and the sentences that evaluations show."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from lingvo_gpipe import errors, optim, pipelining, registry
from lingvo_gpipe.run import tensorboard
from lingvo_gpipe.task import Eval, Train
from lingvo_gpipe.tasks.mt import task
from lingvo_gpipe.tasks.mt.decoding import score, scores, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.text import vocabulary
from tests.support import tensorboard_files
from tests.support.jobs import job
from tests.tasks.mt import toy_model, toy_text

SIZES = {"de": 300, "sw": 40, "cs": 200}
PIPE: Any = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("score")
    text = toy_text.write_folder(made / "text", SIZES)
    toy_text.params(text).instantiate().run(made / "out")
    return made / "out"


def params(folder: Path, **fields: Any) -> Any:
    """Return a task that needs a moment to be built."""
    return task.TranslationTask.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=toy_model.transformer_layers(1, 16, 2, 330, units=8, head_dim=4),
            num_partitions=2,
        ),
        input=Translation.Params(data_dir=str(folder), batch_size=256, max_length=40, num_shapes=1),
        train=Train(optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.1), max_steps=0),
        eval=Eval(split="test"),
        score=scores.Scoring(**fields),
    )


class Reverser:
    """A decoder that returns the first half of each source's ids."""

    step = 70
    cut = 3
    asked: Sequence[Sequence[int]]

    def __init__(self, params: Any, *, logdir: Path | None, checkpoint: str | None) -> None:
        self.vocabulary = params.input.instantiate().vocabulary
        self.where = (logdir, checkpoint)

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        type(self).asked = sources
        assert all(ids[-1] == vocabulary.END for ids in sources)
        progress(len(sources))
        return [list(ids[len(ids) // 2 : -1]) for ids in sources]


@pytest.fixture
def reversed_by(monkeypatch: pytest.MonkeyPatch) -> type[Reverser]:
    monkeypatch.setattr(translator, "Decoder", Reverser, raising=False)
    return Reverser


def test_a_run_is_translated_and_scored(
    folder: Path, tmp_path: Path, reversed_by: type[Reverser]
) -> None:
    lines: list[str] = []
    made = job(params(folder), tmp_path, lines)
    registry.mode("score", made.task)(made)
    source = made.task.input.instantiate()
    assert len(reversed_by.asked) == 3 * 20
    texts, step = scores.read(tmp_path / "score", "test")
    assert step == 70
    assert [text.pair for text in texts] == ["de:en", "cs:en", "sw:en"]
    for text in texts:
        language = text.pair.partition(":")[0]
        assert text.examples == SIZES[language]
        pairs = list(zip(text.sources, text.references, strict=True))
        assert pairs == source.records.text("test", text.pair)
        ids = source.vocabulary.encode(text.sources)
        halves = [row[(len(row) + 1) // 2 :] for row in ids]
        assert list(text.hypotheses) == source.vocabulary.decode(halves)
    wanted = [
        sacrebleu.CHRF().corpus_score(text.hypotheses, [text.references]).score for text in texts
    ]
    assert lines[0].startswith("score step=70 split=test BLEU=")
    assert lines[0].endswith(f" chrF={sum(wanted) / 3:.2f}")
    rows = ("high", "mid", "low", "all", "de:en", "cs:en", "sw:en")
    assert tuple(line.split()[0] for line in lines[2:9]) == rows
    assert f"  {wanted[0]:.2f}  " in lines[6]
    assert lines[-2].startswith("3 translations reached their limit of tokens")
    assert lines[-1] == (f"wrote {tmp_path}/score/test.tsv, translations in {tmp_path}/score/test")
    curves = tensorboard_files.curves(tmp_path / "score")
    tags = {f"test/{metric}/{row}" for metric in scores.METRICS for row in rows}
    assert set(curves) == {*tags, "test/scores"}
    ((step, value),) = curves["test/BLEU/all"]
    assert step == 70
    assert f"BLEU={value:.2f} " in lines[0]


def test_sentences_are_spread_over_the_part(folder: Path) -> None:
    source = params(folder).input.instantiate()
    whole, few = (score.sentences_to_translate(source, "test", most) for most in (None, 7))
    assert [(part.pair, len(part.ids)) for part in few] == [
        (pair, 7) for pair in ("cs:en", "de:en", "sw:en")
    ]
    for all_of, part in zip(whole, few, strict=True):
        places = [0, 2, 5, 8, 11, 14, 17]
        for side in ("ids", "sources", "references"):
            assert getattr(part, side) == [getattr(all_of, side)[place] for place in places]
    assert [len(part.ids) for part in score.sentences_to_translate(source, "test", 99)] == [
        20,
        20,
        20,
    ]
    assert score.sentences_to_translate(source, "test", 99) == whole


def test_pairs_of_the_input_alone_are_scored(folder: Path) -> None:
    made = params(folder)
    made.input.pairs = ("sw:en",)
    (part,) = score.sentences_to_translate(made.input.instantiate(), "test")
    assert (part.pair, part.examples) == ("sw:en", 40)


def test_nothing_is_written_without_a_run(
    folder: Path, tmp_path: Path, reversed_by: type[Reverser]
) -> None:
    del reversed_by
    lines: list[str] = []
    made = job(params(folder), None, lines, checkpoint=str(tmp_path / "some"))
    score.run(made)
    assert lines[0].startswith("score step=70 ")
    assert list(tmp_path.iterdir()) == []


def test_records_of_another_vocabulary_are_refused(
    folder: Path, tmp_path: Path, reversed_by: type[Reverser], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(reversed_by):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.vocabulary = argparse.Namespace(hash="0" * 64)

    monkeypatch.setattr(translator, "Decoder", Other)
    refused(errors.InputError, "were made with vocabulary", params(folder), tmp_path)


def refused(kind: type[errors.UserError], message: str, given: Any, logdir: Path | None) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        score.run(job(given, logdir, []))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_scored_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "Decoder", None, raising=False)  # none gets so far
    for field, value, kind, message in (
        ("split", "train", errors.ParamsError, "is trained on, and its text is not stored. Score"),
        ("split", "dev", errors.InputError, "has no split 'dev'; there are test, train"),
        ("max_sentences", 0, errors.InputError, "split 'test' has no sentence of "),
    ):
        refused(kind, message, params(folder, **{field: value}), tmp_path)
    refused(errors.ParamsError, "--mode=score needs --logdir=FOLDER", params(folder), None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    refused(
        errors.InputError,
        "sacreBLEU, which computes the scores, is not installed",
        params(folder),
        tmp_path,
    )


class Repeater:
    """A translator that repeats its sources."""

    asked: Sequence[Sequence[int]]

    def __init__(self, pipe: Any, settings: Decode, *, max_length: int, controls: int) -> None:
        assert (pipe, settings.num_shapes, controls) == (PIPE, 1, 1)
        self.max_length = max_length

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        type(self).asked = sources
        assert max(map(len, sources)) == self.max_length
        progress(len(sources))
        return [list(ids[:-1]) for ids in sources]


@pytest.mark.parametrize("count", [3, 99])
def test_as_many_sentences_of_each_pair_are_shown(
    folder: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "Translator", Repeater)
    source = params(folder).input.instantiate()
    tables = score.ShownTranslations(PIPE, source, Decode(shown=count), "test")()
    assert list(tables) == [f"translations/{pair}" for pair in source.pairs]
    for pair in source.pairs:
        sources, references = zip(*source.records.text("test", pair), strict=True)
        places = [n * 20 // min(count, 20) for n in range(min(count, 20))]
        repeated = source.vocabulary.decode(source.vocabulary.encode(list(sources)))
        rows = [[sources[n], repeated[n], references[n]] for n in places]
        wanted = tensorboard.markdown_table(["source", "translation", "reference"], rows)
        assert tables[f"translations/{pair}"] == wanted
    monkeypatch.setattr(score, "_MAX_SHOWN_PAIRS", 1)
    score.ShownTranslations(PIPE, source, Decode(shown=3), "test")()
    assert len(Repeater.asked) == 3


@pytest.mark.parametrize(("split", "count"), [("test", 0), ("train", 3)])
def test_nothing_is_shown_without_sentences_or_text(folder: Path, split: str, count: int) -> None:
    given = params(folder)
    given.decode.shown, given.eval.split = count, split
    assert given.instantiate().texts(PIPE, given.input.instantiate()) is None
