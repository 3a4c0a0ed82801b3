"""Sentences that evaluations translate: the same ones each time, a few of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lingvo_gpipe import errors, optim, pipelining, task
from lingvo_gpipe.run.views import markdown
from lingvo_gpipe.tasks.mt.decoding import decode_params, shown, translator
from lingvo_gpipe.tasks.mt.decoding.decode_params import Decode
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.task import TranslationTask
from lingvo_gpipe.tasks.mt.text.vocabulary import END
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


def made(source: Translation, count: int, most: int = 999) -> shown.ShownTranslations:
    return shown.ShownTranslations(PIPE, source, Decode(shown=count, max_shown=most), "test")


@pytest.mark.parametrize("count", [1, 3, HELD_OUT, 99])
def test_as_many_sentences_of_each_pair_are_shown(source: Translation, count: int) -> None:
    tables = made(source, count)(lambda: False)
    assert list(tables) == ["translations/de:en", "translations/sw:en"]
    for pair in ("de:en", "sw:en"):
        sources, references = zip(*source.records.text("test", pair), strict=True)
        places = [n * HELD_OUT // min(count, HELD_OUT) for n in range(min(count, HELD_OUT))]
        repeated = source.vocabulary.decode(source.vocabulary.encode(list(sources)))
        rows = [[sources[n], repeated[n], references[n]] for n in places]
        wanted = markdown.table(["source", "translation", "reference"], rows)
        assert tables[f"translations/{pair}"] == wanted


@pytest.mark.parametrize(
    ("most", "pairs", "each"), [(1, ["de"], 1), (3, ["de", "sw"], 1), (5, ["de", "sw"], 2)]
)
def test_more_than_all_pairs_may_show_are_left_out_evenly(
    source: Translation, most: int, pairs: list[str], each: int
) -> None:
    tables = made(source, 3, most)(lambda: False)
    assert list(tables) == [f"translations/{pair}:en" for pair in pairs]
    assert len(Repeater.asked) == each * len(pairs)
    same = made(source, each)(lambda: False)
    assert tables == {name: same[name] for name in tables}


def test_a_sentence_that_training_would_drop_is_not_shown(source: Translation) -> None:
    lengths = source.records.split("test").lengths[:, 0] + 1
    longest = int(sorted(lengths)[len(lengths) // 2])
    short = source.params.copy().set(max_length=longest).instantiate()
    made(short, 99)(lambda: False)
    assert len(Repeater.asked) == (lengths <= longest).sum() < len(lengths)
    assert max(map(len, Repeater.asked)) == longest
    assert all(ids[-1] == END for ids in Repeater.asked)


def test_a_run_that_stops_shows_nothing(source: Translation) -> None:
    assert made(source, 3)(lambda: True) == {}


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


def test_a_number_that_is_too_small_is_refused() -> None:
    with pytest.raises(errors.ParamsError, match=r"decode\.max_shown=0 is too small\. Use 1 or"):
        decode_params.check(Decode(max_shown=0))
    with pytest.raises(errors.ParamsError, match=r"decode\.shown=-1 is too small\. Use 0 or more"):
        decode_params.check(Decode(shown=-1))
