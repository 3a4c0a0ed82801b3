"""A translation run: what it tells of each language, and the vocabulary that it keeps."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from lingvo_gpipe import errors, evaluation, train_loop
from lingvo_gpipe.tasks.mt import records, vocabulary
from tests.tasks.mt import toy_run

PAIRS = ("de:en", "sw:en")
COUNTED = ("language_accuracy", "language_log_perplexity")


def curves(folder: Path) -> dict[str, list[float]]:
    found = event_accumulator.EventAccumulator(str(folder), {"tensors": 0})
    found.Reload()
    return {
        tag: [tf.make_ndarray(event.tensor_proto) for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Give the records and the folder of a run of three updates, and its lines."""
    data = toy_run.prepared(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("run")
    lines: list[str] = []
    train_loop.run(toy_run.task_of(data), folder, evaluate=True, report=lines.append)
    return data, folder, lines


def test_each_language_has_curves_where_it_was_seen(ran: tuple[Path, Path, list[str]]) -> None:
    data, folder, lines = ran
    params = toy_run.task_of(data)
    seen = []
    for batch in itertools.islice(params.input.instantiate().batches(params.model.seed), 3):
        real = tf.reduce_sum(batch["weight"], 1) > 0
        seen.append({PAIRS[n] for n in batch["language"][real].numpy()})
    assert 0 < sum("sw:en" in each for each in seen) < 3
    train, held_out = curves(folder / "train"), curves(folder / "eval")
    for name in COUNTED:
        assert name not in train
        for pair in PAIRS:
            count = sum(pair in each for each in seen)
            assert len(train.get(f"{name}/{pair}", [])) == count
            assert len(held_out[f"{name}/{pair}"]) == 1
    (line,) = [line for line in lines if line.startswith("eval ")]
    assert [word.partition("=")[0] for word in line.split()[1:]] == [
        *("step", "accuracy", "log_perplexity", "loss"),
    ]


def test_shares_are_told_and_the_vocabulary_is_kept(ran: tuple[Path, Path, list[str]]) -> None:
    data, folder, _ = ran
    source = toy_run.task_of(data).input.instantiate()
    told = curves(folder / "train")
    for pair, share in source.shares().items():
        assert [float(value) for value in told[f"sampling_share/{pair}"]] == [pytest.approx(share)]
    assert (folder / records.VOCABULARY).read_bytes() == source.vocabulary.proto


def test_a_run_goes_on_by_its_own_vocabulary_alone(
    ran: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    data, folder, _ = ran
    own = tmp_path / "run"
    shutil.copytree(folder, own)
    lines: list[str] = []
    params = toy_run.task_of(data)
    train_loop.run(params, own, report=lines.append)
    assert "restored step=3" in lines
    assert not any(line.startswith("params changed") for line in lines)
    other = toy_run.task_of(toy_run.prepared(tmp_path, vocabulary=vocabulary.Training(size=320)))
    with pytest.raises(errors.TrainingError, match="holds a run with other params"):
        train_loop.run(other, own)
    with pytest.raises(errors.TrainingError) as caught:
        evaluation.run(other, own)
    assert str(caught.value) == (
        f"{own}/vocabulary.model is not that of the data: the run was begun with another one. "
        "Give the data it was begun with, or another --logdir"
    )
