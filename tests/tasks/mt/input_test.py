"""Mini-batches as TensorFlow sees them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.text import records
from tests.tasks.mt import toy_model, toy_text

SIZES = {"de": 300, "sw": 40}
FIELDS = {"source", "target", "label", "weight", "language"}
PACKED = {"source_segment", "source_position", "target_segment", "target_position"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = toy_text.write_folder(tmp_path_factory.mktemp("text"), SIZES)
    output = tmp_path_factory.mktemp("records") / "both"
    toy_text.params(text).instantiate().run(output)
    return output


def params_of(folder: Path, **fields: Any) -> Any:
    made = {"batch_size": 800, "max_length": 80, "num_shapes": 3} | fields
    return Translation.Params(data_dir=str(folder), **made)


def taken(batches: Any, count: int | None = None) -> list[dict[str, np.ndarray[Any, Any]]]:
    found = itertools.islice(iter(batches), count)
    return [{name: value.numpy() for name, value in batch.items()} for batch in found]


def sentences(batch: dict[str, Any]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return (language, source, label) of every sentence of a mini-batch, by its segments."""
    found = []
    for row in range(len(batch["source"])):
        sides = []
        for field, side in (("source", "source"), ("label", "target")):
            ids = batch[field][row]
            segment = batch.get(f"{side}_segment", batch[field] > 0)[row]
            count = int(segment.max())
            sides.append([tuple(ids[segment == n].tolist()) for n in range(1, count + 1)])
        language = int(batch["language"][row])
        found += [(language, *both) for both in zip(*sides, strict=False)]
    return found


def written(folder: Path, split: str) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return the same of all records of a split."""
    found = records.Records(folder).split(split)
    rows = []
    for index, span in enumerate(found.spans):
        for number in range(span.first, span.first + span.count):
            source, target = found.example(number)
            rows.append((index, (*source.tolist(), 3), (*target.tolist(), 3)))
    return sorted(rows)


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_of_training_has_every_sentence_once(folder: Path, packing: bool) -> None:
    made = params_of(folder, packing=packing, temperature=1.0).instantiate()
    first, second = (len(made.plan(1).epoch(epoch)) for epoch in (0, 1))
    found = taken(made.batches(1), first + second)
    for epoch in (found[:first], found[first:]):
        rows = sorted(row for batch in epoch for row in sentences(batch))
        assert rows == written(folder, "train")
    assert set(found[0]) == FIELDS | (PACKED if packing else set())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_resumed_training_is_uninterrupted(folder: Path, packing: bool, temperature: float) -> None:
    def read(seed: int, position: int, count: int) -> Any:
        params = params_of(folder, packing=packing, temperature=temperature)
        return taken(params.instantiate().batches(seed, position), count)

    whole = read(1, 0, 60)
    for start in (1, 31):
        np.testing.assert_equal(read(1, start, 60 - start), whole[start:])
    assert not np.array_equal(whole[0]["source"], read(2, 0, 1)[0]["source"])


@pytest.mark.parametrize("packing", [False, True])
def test_fields_fit_each_other(folder: Path, packing: bool) -> None:
    made = params_of(folder, packing=packing).instantiate()
    spec = made.element_spec()
    for batch in taken(made.batches(1), len(made.plan(1).epoch(0))):
        for name, value in batch.items():
            assert value.dtype == spec[name].dtype.as_numpy_dtype
            assert len(value) == len(batch["source"])
        target, label, weight = (batch[name] for name in ("target", "label", "weight"))
        np.testing.assert_array_equal(weight, (label > 0).astype(np.float32))
        begins = target == 2
        empty = batch["source"][:, 1:].max(1) == 0
        if packing:
            segment, position = batch["target_segment"], batch["target_position"]
            np.testing.assert_array_equal(begins & (weight > 0), (position == 0) & (segment > 0))
            np.testing.assert_array_equal(segment > 0, weight > 0)
        else:
            assert begins[:, 0].all()
            assert begins.sum() == len(begins)
        # What the decoder reads is what it was to say one step before.
        inside = (weight[:, 1:] > 0) & ~begins[:, 1:]
        np.testing.assert_array_equal(target[:, 1:][inside], label[:, :-1][inside])
        np.testing.assert_array_equal(label[:, :-1][inside] == 3, False)
        assert (batch["source"][:, 0] > 0).all()
        assert (weight[empty & (batch["source"][:, 0] == 3)] == 0).all()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [None, 70])
def test_an_evaluation_has_every_sentence_once(
    folder: Path, packing: bool, size: int | None
) -> None:
    # What is too long to be trained on is evaluated.
    made = params_of(folder, packing=packing, max_length=8).instantiate()
    found = taken(made.evaluation("test", size))
    assert sorted(row for batch in found for row in sentences(batch)) == written(folder, "test")
    assert len({batch["source"].shape for batch in found}) <= 3


def test_shapes_are_those_reported_and_few(folder: Path) -> None:
    made = params_of(folder, multiple_of=4).instantiate()
    shapes = {batch["source"].shape for batch in taken(made.batches(1), 60)}
    assert shapes == {(shape.rows, shape.length) for shape in made.plan(1).units.shapes}
    assert len(shapes) == 3
    assert all(rows % 4 == 0 for rows, _ in shapes)
    packed = params_of(folder, packing=True).instantiate()
    wanted = packed.element_spec()
    for batch in packed.batches(1):
        assert {name: tf.TensorSpec(v.shape, v.dtype) for name, v in batch.items()} == {
            name: tf.TensorSpec(spec.shape, spec.dtype) for name, spec in wanted.items()
        }
        break


def test_specs_come_from_params_alone() -> None:
    made = params_of(Path("nowhere"), eval_batch_size=80, multiple_of=2).instantiate()
    assert made.element_spec()["source"].shape == [10, 80]
    assert made.element_spec(training=False)["weight"] == tf.TensorSpec([2, 80], tf.float32)
    assert set(made.element_spec()) == FIELDS


def test_what_is_too_long_or_uneven_is_left_out_and_reported(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = records.Records(folder).split("train").lengths
    long = lengths.max(1) + 1 > 9
    uneven = ~long & (lengths.max(1) > 1.2 * lengths.min(1))
    made = params_of(folder, max_length=9, max_ratio=1.2).instantiate()
    with caplog.at_level("INFO", logger="absl"):
        plan = made.plan(1)
    assert int(plan.units.sizes.sum()) == len(lengths) - int((long | uneven).sum())
    assert long.any()
    assert uneven.any()
    assert f"{long.sum()} longer than 9 tokens, {uneven.sum()} of uneven lengths" in caplog.text
    assert not capsys.readouterr().err
    made.batches(1)
    count = len(plan.epoch(0))
    reported = capsys.readouterr().err
    assert f"{count} mini-batches in epoch 0, " in reported
    assert "of 3 shapes, each traced once: " in reported
    made.batches(1, count)
    assert f"{plan.epoch_sizes(1, 2)[0]} mini-batches in epoch 1, " in capsys.readouterr().err


def test_chosen_pairs_alone_are_trained_on(folder: Path) -> None:
    made = params_of(folder, pairs=("sw:en",), temperature=1.0).instantiate()
    found = taken(made.batches(1), len(made.plan(1).epoch(0)))
    wanted = [(0, *row[1:]) for row in written(folder, "train") if row[0] == 1]
    assert sorted(row for batch in found for row in sentences(batch)) == sorted(wanted)


def refused(text: str, params: Any, split: str = "test") -> None:
    def use() -> None:
        made = params.instantiate()
        made.plan(1)
        made.evaluation(split)

    with pytest.raises(errors.InputError, match=text) as caught:
        use()
    assert "\n" not in str(caught.value)


def test_params_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    refused("has no pair 'sv:en'; nearest 'sw:en'", params_of(folder, pairs=("sv:en",)))
    refused("holds no prepared text", params_of(tmp_path / "none"))
    refused("has no split 'dev'; there are", params_of(folder), "dev")
    refused("has no split 'dev'", params_of(folder, train_split="dev"))
    refused("temperature=0.0 is not possible", params_of(folder, temperature=0.0))
    refused("no training example is left: 340 of 340 are longer", params_of(folder, max_length=2))
    refused("input.max_length=1 is too small. Use 2", params_of(folder, max_length=1))
    refused("input.num_shapes=0 is too small", params_of(folder, num_shapes=0))
    refused("were made with vocabulary", params_of(folder, vocabulary_hash="0" * 64))


@pytest.mark.parametrize("packing", [False, True])
def test_a_mini_batch_that_would_have_more_tokens_than_reported_is_refused(
    folder: Path, packing: bool
) -> None:
    fields = {"packing": packing, "multiple_of": 4}
    lengths = records.Records(folder).split("train").lengths
    least = 4 * (80 if packing else int(lengths.max()) + 1)
    (batch,) = taken(params_of(folder, batch_size=least, **fields).instantiate().batches(1), 1)
    assert batch["source"].size <= least
    small = params_of(folder, batch_size=least - 1, **fields)
    refused(
        rf"^input.batch_size={least - 1} is too small for mini-batches of 4 rows "
        rf"\(input.multiple_of\) of {least // 4} tokens. Use {least} or more, or a smaller",
        small,
    )
    # An evaluation has every sentence, however long.
    batches = taken(small.instantiate().evaluation("test", 70))
    assert max(batch["source"].size for batch in batches) > 70


def test_records_are_prepared_where_params_say_how(tmp_path: Path) -> None:
    text = toy_text.write_folder(tmp_path / "text", {"de": 200})
    params = params_of(tmp_path / "out", preparation=toy_text.params(text))
    first = taken(params.instantiate().batches(1), 2)
    again = taken(params.instantiate().batches(1), 2)
    np.testing.assert_array_equal(first[1]["source"], again[1]["source"])
    params.preparation.seed = 9
    match = r"was prepared with other params\. .*=input\.preparation=None\n    seed: 0 -> 9"
    with pytest.raises(errors.InputError, match=match):
        params.instantiate().batches(1)


def test_the_task_takes_size_and_hash_from_the_data(folder: Path) -> None:
    from lingvo_gpipe import pipelining

    layers = toy_model.transformer_layers(1, 16, 1, 64_000, units=8)
    params = task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=layers), input=params_of(folder)
    )
    made = params.input.instantiate()
    made.complete(params)
    size = len(made.vocabulary)
    sizes = {
        value
        for path, value, _ in params.model.iter_paths()
        if path.rpartition(".")[2] == "vocabulary"
    }
    assert sizes == {size}
    assert params.get("input.vocabulary_hash") == made.vocabulary.hash
    assert params.input.instantiate().vocabulary.hash == made.vocabulary.hash
    head: Any = params.model.layers[-1]
    assert head.languages == made.pairs == ("de:en", "sw:en")
    # The numbers of one pair are those of the whole.
    params_of(folder, pairs=("sw:en",)).instantiate().complete(params)
    assert head.languages == ()
    # A run that goes on with other records is another run.
    other = params.copy().set_path("input.vocabulary_hash", "0" * 64)
    (line,) = task.change(params.to_text(), other.to_text()).refused
    assert line.startswith("input.vocabulary_hash: ")


def test_packed_rows_are_refused_by_a_model_that_would_mix_them(folder: Path) -> None:
    made = params_of(folder, packing=True).instantiate()
    for packed in (True, False):
        model = toy_model.transformer_layers(1, 8, 2, 400, units=8, packed=packed)
        own = task.Task.Params(
            model=pipelining.PipeliningLayer.Params(layers=model), input=made.params
        )
        if packed:
            made.complete(own)
            continue
        with pytest.raises(errors.InputError, match="the model would let them see each other"):
            made.complete(own)
