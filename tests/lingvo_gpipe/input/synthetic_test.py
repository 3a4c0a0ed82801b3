"""Synthetic examples: every recipe has some, of the right shapes, and says what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, input, layers, registry, trainer
from lingvo_gpipe import task as tasks
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.run import loop
from lingvo_gpipe.tasks.lm import transformer
from tests import tiny_task

REGISTRY = registry.Registry()
NAMES = REGISTRY.names()


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A recipe that stands for its family, and overrides that make it tiny.

    Attributes:
        name: registered name.
        sizes: sizes of the recipe.
        fields: path → value.
    """

    name: str
    sizes: Mapping[str, int]
    fields: Mapping[str, Any]


FAMILIES = (
    Family("image.digits.MLP", {}, {"input.batch_size": 8}),
    Family(
        "image.imagenet.AmoebaNetD18x256",
        {"num_cells": 2, "filters": 8},
        {
            "input.batch_size": 4,
            "input.height": 75,
            "input.width": 75,
            "model.num_micro_batches": 2,
            "model.dtype": None,
        },
    ),
    Family("image.folder.AmoebaNetSmall", {"filters": 8}, {"input.batch_size": 8}),
    Family("lm.transformer.L3", {}, {"input.batch_size": 2, "input.length": 16}),
    Family("mt.django.Tiny", {}, {"input.batch_size": 512, "input.max_length": 32}),
    Family(
        "mt.multi30k.Multilingual",
        {},
        {"input.batch_size": 512, "input.max_length": 32, "input.num_shapes": 1},
    ),
)


def small(family: Family) -> Any:
    """Return the tiny task of a family, on synthetic examples."""
    if family.name.startswith("lm."):  # its recipes are large in all but depth
        return synthetic.task(tiny_language_model(family))
    recipe = REGISTRY.model(family.name)()
    for size, value in family.sizes.items():
        recipe = recipe.resized(size, value)
    params: Any = recipe.task()
    params.set({**family.fields, "train.max_steps": 1, "model.num_partitions": 2})
    return synthetic.task(params)


def tiny_language_model(family: Family) -> Any:
    params: Any = REGISTRY.model(family.name)().task()
    params.model.layers = transformer.language_model(1, units=16, heads=2, hidden=32, vocabulary=50)
    return params.set({**family.fields, "train.max_steps": 1, "model.num_partitions": 2})


# One of each module: its recipes read the same fields.
FIRST_OF_EACH_MODULE = {name.rpartition(".")[0]: name for name in reversed(NAMES)}.values()


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in FIRST_OF_EACH_MODULE
        else pytest.param(name, marks=pytest.mark.reliability_full)
        for name in NAMES
    ],
)
def test_every_recipe_has_synthetic_examples(name: str) -> None:
    params = REGISTRY.model(name)().task()
    rehearsed = synthetic.task(params)
    assert not synthetic.is_synthetic(params)
    assert synthetic.is_synthetic(rehearsed)
    assert synthetic.task(rehearsed).input == rehearsed.input
    assert hyperparams.from_text(rehearsed.input.to_text()) == rehearsed.input
    own, other = params.input.instantiate(), rehearsed.input.instantiate()
    for training in (True, False):
        assert other.element_spec(training) == own.element_spec(training)
    assert synthetic.notices(rehearsed) == (synthetic.NOTICE,)
    assert synthetic.notices(params) == ()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_reads_the_same_synthetic_examples_at_any_position(family: Family) -> None:
    params = tasks.complete(small(family))
    first, second = (params.input.instantiate() for _ in range(2))
    batches = [batch for batch, _ in zip(first.batches(seed=3), range(3), strict=False)]
    later = next(iter(second.batches(seed=3, position=2)))
    fields = batches[0].keys()
    assert fields == later.keys() >= first.element_spec().keys()
    for field in first.element_spec():
        np.testing.assert_array_equal(batches[2][field], later[field])
        assert np.isfinite(np.asarray(later[field], np.float64)).all()
    label = np.asarray(batches[0]["label"])
    assert label.min() != label.max()
    held_out = list(first.evaluation(params.eval.split))
    assert held_out
    assert synthetic.FILE in first.assets()


RUNS = [
    pytest.param(family, marks=pytest.mark.reliability_full if number else (), id=family.name)
    for number, family in enumerate(FAMILIES)
]


@pytest.mark.parametrize("family", RUNS)
def test_a_family_is_trained_on_synthetic_examples(family: Family, tmp_path: Path) -> None:
    lines: list[str] = []
    params = small(family)
    result = loop.run(params, tmp_path / "run", evaluate=True, report=lines.append)
    assert result.step == 1
    assert lines.count(synthetic.NOTICE) == 2
    assert (tmp_path / "run" / synthetic.FILE).read_text() == f"{synthetic.NOTICE}\n"


def tiny(**fields: Any) -> Any:
    return tiny_task.one_layer_task(max_steps=1, **fields)


def test_an_input_of_ones_own_has_random_examples_in_the_range_of_its_layers() -> None:
    params = tiny()
    params.model.set(num_partitions=9, schedule="auto")  # of no interest here
    params = synthetic.task(params)
    assert params.input.ranges == {"label": 3}
    source = params.input.instantiate()
    batch = next(iter(source.batches(seed=0)))
    assert batch["point"].shape == (8, 4)
    assert len(set(np.asarray(batch["point"]).ravel().tolist())) >= 16  # some are alike
    labels = [int(n) for part in source.evaluation("any") for n in part["label"]]
    assert len(labels) == 20
    assert set(labels) == {0, 1, 2}


def test_labels_of_a_keras_loss_are_drawn_over_its_classes() -> None:
    params = tiny()
    dense = layers.Dense.Params(units=3, reads=("point",))
    kind = "SparseCategoricalCrossentropy"
    params.model.layers = [dense, layers.Loss.Params(loss=kind, config={"from_logits": True})]
    assert synthetic.task(params).input.ranges == {"label": 3}


class Words(input.InMemory):
    """A field that no synthetic example has."""

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        return {
            "point": tf.TensorSpec([4]),
            "label": tf.TensorSpec([], tf.int32),
            "word": tf.TensorSpec([], tf.string),
        }

    def arrays(self) -> Mapping[str, Mapping[str, Any]]:
        raise AssertionError("no data is read")


def test_a_field_that_has_no_synthetic_examples_is_named() -> None:
    params = tiny()
    params.input = Words.Params(batch_size=8)
    with pytest.raises(
        errors.InputError, match=r"Words.*no synthetic examples.*'word'.*Params\.synthetic"
    ):
        synthetic.task(params).input.instantiate().batches(seed=0)


def test_a_run_is_not_continued_on_other_examples(tmp_path: Path) -> None:
    on_data, on_made = tmp_path / "data", tmp_path / "made"
    loop.run(tiny(), on_data)
    loop.run(synthetic.task(tiny()), on_made)
    longer = tiny()
    longer.train.max_steps = 2
    for params, folder in ((longer, on_made), (synthetic.task(longer), on_data)):
        with pytest.raises(errors.TrainingError, match=r"other params \(input\.class: "):
            loop.run(params, folder)
    lines: list[str] = []
    loop.run(longer, tmp_path / "third", start=str(on_made / "checkpoints"), report=lines.append)
    assert any("trained on made-up examples" in line for line in lines)
    assert loop.run(synthetic.task(longer), on_made).step == 2


def test_a_flag_asks_for_synthetic_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = trainer.run(["--params_package=tests", *arguments])
        return code, *capsys.readouterr()

    model = "--model=image.folder.AmoebaNetSmall"
    for mode in ("describe", "plan"):
        code, out, _ = run(model, "--data=made", f"--mode={mode}")
        assert code == 0
        assert "cell 0" in out
    code, _, err = run(model, "--data=mine", "--mode=describe")
    assert code == 1
    assert err.startswith(
        "ParamsError: argument --data: invalid choice: 'mine' (choose from 'made'"
    )
    for kind, params in (("data", tiny()), ("made", synthetic.task(tiny()))):
        loop.run(params, tmp_path / kind)
    code, out, _ = run("--mode=eval", f"--logdir={tmp_path / 'made'}")
    assert code == 0
    assert out.splitlines()[0].startswith(synthetic.NOTICE)
    code, _, err = run("--mode=eval", f"--logdir={tmp_path / 'data'}", "--data=made")
    assert code == 1
    assert "holds a run on data" in err
