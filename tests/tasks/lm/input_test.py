"""Rows of ids from a file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe.run import export
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.lm.input import Tokens


def source(folder: Path, **fields: Any) -> Tokens:
    settings: dict[str, Any] = {
        "data_dir": str(folder),
        "batch_size": 2,
        "length": 4,
        "shuffle": False,
    } | fields
    made: Tokens = Tokens.Params(**settings).instantiate()
    return made


def test_every_id_is_a_target_once_and_the_label_of_the_one_before(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(100, 115, dtype=np.uint16))
    np.save(tmp_path / "test.npy", np.arange(9))
    own = source(tmp_path)
    first = next(iter(own.batches(seed=0)))
    assert {name: (v.shape, v.dtype) for name, v in first.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in own.element_spec().items()
    }
    np.testing.assert_array_equal(first["target"], np.arange(100, 108).reshape(2, 4))
    np.testing.assert_array_equal(first["label"], np.arange(101, 109).reshape(2, 4))
    np.testing.assert_array_equal(first["weight"], np.ones((2, 4)))
    assert own.num_examples("train") == 3  # two ids are left
    (tested,) = own.evaluation("test")
    np.testing.assert_array_equal(tested["label"], np.arange(1, 9).reshape(2, 4))


def test_a_language_model_serves_the_probabilities_of_the_ids_that_follow() -> None:
    serving = Tokens.Params(data_dir="", batch_size=2, length=4).instantiate().serving()
    layers = transformer.language_model(1, units=4, heads=2, hidden=4, vocabulary=7)
    model = pipelining.PipeliningLayer.Params(layers=layers)
    served = export.InferenceNetwork(model, serving.signature)
    for number, variable in enumerate(served.by_path.values()):
        variable.assign(tf.random.stateless_normal(variable.shape, (1, number)))
    ids = tf.constant([[1, 2, 3, 4], [1, 2, 0, 0], [6, 2, 3, 4]])
    shares = served(serving.fields({"target": ids}))["probabilities"]
    np.testing.assert_allclose(tf.reduce_sum(shares, -1), np.ones((3, 4)), rtol=1e-6)
    np.testing.assert_array_equal(shares[0, :2], shares[1, :2])  # what comes later does not count
    assert float(tf.reduce_max(tf.abs(shares[0, 3] - shares[2, 3]))) > 1e-3


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((3, 4), np.int32), r"train.npy holds int32 \[3, 4\], expected integers \[n\]"),
        (np.zeros(9), r"train.npy holds float64 \[9\], expected integers \[n\]"),
        (np.zeros(4, np.int32), "split 'train' has no examples"),
    ],
    ids=("matrix", "floats", "short"),
)
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, array: Any, text: str) -> None:
    np.save(tmp_path / "train.npy", array)
    with pytest.raises(errors.InputError, match=text):
        source(tmp_path).batches(seed=0)


def test_a_folder_or_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"input.data_dir=.* has no .npy file. Write"):
        source(tmp_path / "none").batches(seed=0)
    (tmp_path / "train.npy").write_text("not an array of ids")
    with pytest.raises(errors.InputError, match=r"train.npy cannot be read: "):
        source(tmp_path).batches(seed=0)
    with pytest.raises(errors.InputError, match=r"input.length=0 is too small. Use 1 or more"):
        source(tmp_path, length=0)


def test_an_epoch_has_every_row_once(tmp_path: Path) -> None:
    ids = np.random.RandomState(0).randint(0, 99, 43).astype(np.int32)
    np.save(tmp_path / "train.npy", ids)
    own = source(tmp_path, batch_size=5, shuffle=True)
    found = set()
    for batch in itertools.islice(own.batches(seed=1), 2):
        assert {name: (v.shape, v.dtype) for name, v in batch.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in own.element_spec().items()
        }
        found |= {
            (*target, label[-1])
            for target, label in zip(batch["target"].numpy(), batch["label"].numpy(), strict=True)
        }
        np.testing.assert_array_equal(batch["weight"], np.ones((5, 4)))
    assert found == {tuple(ids[row : row + 5]) for row in range(0, 40, 4)}


def test_missing_ids_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(40))
    with pytest.raises(errors.InputError, match="no split 'test'; there are train"):
        source(tmp_path).num_examples("test")
