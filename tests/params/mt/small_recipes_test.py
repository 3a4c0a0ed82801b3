"""The translation models that two cores can train: equal sizes, equal tokens, a start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import network, registry
from lingvo_gpipe import task as tasks
from lingvo_gpipe.plan import describe
from lingvo_gpipe.run import loop
from tests.tasks.mt import toy_text

REGISTRY = registry.Registry()
MULTI30K = REGISTRY.names("mt.multi30k.*")
MANY = REGISTRY.names("mt.many.*")
LANGUAGES = {"cs": 30, "de": 60, "fr": 40}


def made(name: str) -> Any:
    return REGISTRY.model(name)().task()


def parameters(name: str) -> int:
    params = made(name)
    return describe.counts(network.analyze(params.model, describe.fields_of(params))).parameters


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mt.django.Tiny", 1_442_208),
        ("mt.multi30k.De", 6_010_688),
        ("mt.many.ShallowWide", 6_639_872),
        ("mt.many.DeepNarrow", 6_648_512),
    ],
)
def test_parameters_are_those_of_the_closed_form(name: str, count: int) -> None:
    assert parameters(name) == count


def test_the_models_of_multi30k_differ_in_data_and_batches_alone() -> None:
    first = made("mt.multi30k.Multilingual")
    names = {"Multilingual", "De", "Fr", "Cs", "Batch16k", "Batch64k"}
    assert {name.rpartition(".")[2] for name in MULTI30K} == names
    for name in MULTI30K:
        assert made(name).model == first.model
    for name in ("De", "Fr", "Cs"):
        own = made(f"mt.multi30k.{name}")
        assert own.input.pairs == (f"{name.lower()}:en",)
        assert own.train == first.train
        own.input.pairs = first.input.pairs
        assert own.input == first.input


def test_wide_and_deep_have_equal_sizes_and_all_else() -> None:
    wide, deep = (parameters(name) for name in ("mt.many.ShallowWide", "mt.many.DeepNarrow"))
    assert abs(wide - deep) < 0.01 * wide
    assert min(wide, deep) >= 4_000_000
    shallow, narrow = (made(name) for name in ("mt.many.ShallowWide", "mt.many.DeepNarrow"))
    assert len(shallow.model.layers) < len(narrow.model.layers)
    assert (shallow.input, shallow.train) == (narrow.input, narrow.train)
    assert shallow.input.temperature == 5.0


def test_batches_of_every_size_see_the_same_tokens() -> None:
    seen = {}
    for name, size in (("De", 4_096), ("Batch16k", 16_384), ("Batch64k", 65_536)):
        params = made(f"mt.multi30k.{name}")
        rows, length = params.input.instantiate().element_spec()["source"].shape
        assert rows * length * params.train.accumulate == size
        seen[name] = size * params.train.max_steps
    assert len(set(seen.values())) == 1
    assert made("mt.multi30k.Batch64k").train.max_steps >= 100


@pytest.fixture(name="text", scope="module")
def write_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write made text in the layout that the recipes read."""
    folder = toy_text.write_folder(tmp_path_factory.mktemp("text"), LANGUAGES)
    for path in folder.glob("*/*.test.txt"):
        shutil.copy(path, path.with_name(path.name.replace(".test.", ".valid.")))
    return folder


@pytest.mark.parametrize("field", ["multi30k", "many"])
def test_the_first_model_prepares_what_all_of_its_field_read(
    field: str, text: Path, tmp_path: Path
) -> None:
    for name in {"multi30k": MULTI30K, "many": MANY}[field]:
        params = made(name)
        params.input.set(data_dir=str(tmp_path / field))
        params.input.preparation.corpora[0].folder = str(text)
        completed = tasks.complete(params)
        source = completed.input.instantiate()
        wanted = [f"{language}:en" for language in LANGUAGES]
        if name.rpartition(".")[2] not in ("Multilingual", "ShallowWide", "DeepNarrow"):
            (wanted,) = ([pair] for pair in wanted if pair in params.input.pairs)
        assert list(source.pairs) == wanted
        size = len(source.vocabulary)
        assert size < 8_000
        assert completed.model.layers[-1].vocabulary == size
        batch = next(iter(source.batches(seed=0)))
        assert batch["source"].shape[0] % params.model.num_micro_batches == 0
        evaluated = [rows["weight"].numpy() for rows in source.evaluation(params.eval.split)]
        assert sum(weight.sum() for weight in evaluated) > 20 * len(wanted)


@pytest.mark.slow
def test_django_trains_and_evaluates_with_nothing_but_its_wheel(tmp_path: Path) -> None:
    params = made("mt.django.Tiny")
    params.input.set(
        data_dir=str(tmp_path / "records"), batch_size=256, max_length=32, num_shapes=1
    )
    params.input.preparation.set(pairs=("fy:en",))
    params.input.preparation.vocabulary.size = 400
    params.model.num_micro_batches = 2
    params.train.max_steps = 2
    result = loop.run(params, tmp_path / "run", evaluate=True)
    assert result.step == 2
    assert np.isfinite(result.metrics["log_perplexity"])
