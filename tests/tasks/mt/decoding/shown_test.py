"""Sentences that evaluations translate: the same ones each time, a few of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lingvo_gpipe import optim, pipelining, task
from lingvo_gpipe.run import tensorboard
from lingvo_gpipe.tasks.mt.decoding import score, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.task import TranslationTask
from tests.tasks.mt import toy_text

HELD_OUT = 7
PIPE: Any = object()


class Repeater:
    """A translator that repeats its sources."""

    asked: Sequence[Sequence[int]]

    def __init__(self, pipe: Any, settings: Decode, *, max_length: int, controls: int) -> None:
        assert pipe is PIPE
        assert controls == 1
        self.settings, self.max_length = settings, max_length

    def translate(
        self, sources: Sequence[Sequence[int]], progress: Callable[[int], None]
    ) -> list[list[int]]:
        type(self).asked = sources
        assert self.settings.num_shapes == 1
        assert max(map(len, sources)) == self.max_length
        progress(len(sources))
        return [list(ids[:-1]) for ids in sources]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    folder = tmp_path_factory.mktemp("shown")
    text = toy_text.write_folder(folder / "text", {"de": 90, "sw": 20}, held_out=HELD_OUT)
    toy_text.params(text).instantiate().run(folder / "out")
    made: Translation = Translation.Params(data_dir=str(folder / "out")).instantiate()
    return made


@pytest.fixture(autouse=True)
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "Translator", Repeater)


def made(source: Translation, count: int) -> score.ShownTranslations:
    return score.ShownTranslations(PIPE, source, Decode(shown=count), "test")


@pytest.mark.parametrize("count", [1, 3, HELD_OUT, 99])
def test_as_many_sentences_of_each_pair_are_shown(source: Translation, count: int) -> None:
    tables = made(source, count)()
    assert list(tables) == ["translations/de:en", "translations/sw:en"]
    for pair in ("de:en", "sw:en"):
        sources, references = zip(*source.records.text("test", pair), strict=True)
        places = [n * HELD_OUT // min(count, HELD_OUT) for n in range(min(count, HELD_OUT))]
        repeated = source.vocabulary.decode(source.vocabulary.encode(list(sources)))
        rows = [[sources[n], repeated[n], references[n]] for n in places]
        wanted = tensorboard.markdown_table(["source", "translation", "reference"], rows)
        assert tables[f"translations/{pair}"] == wanted


def test_pairs_beyond_the_maximum_are_left_out_evenly(
    source: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "_MAX_SHOWN_PAIRS", 1)
    tables = made(source, 3)()
    assert list(tables) == ["translations/de:en"]
    assert len(Repeater.asked) == 3


@pytest.mark.parametrize(("split", "count"), [("test", 0), ("train", 3)])
def test_nothing_is_shown_without_sentences_or_text(
    source: Translation, split: str, count: int
) -> None:
    params = TranslationTask.Params(input=source.params, decode=Decode(shown=count))
    optimizer = optim.Optimizer.Params(name="SGD", learning_rate=0.1)
    params.model = pipelining.PipeliningLayer.Params(layers=[])
    params.train = task.Train(max_steps=1, optimizer=optimizer)
    params.eval.split = split
    assert params.instantiate().texts(PIPE, source) is None
