"""Mini-batches of one update are weighted by their content, not equally."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import optim
from lingvo_gpipe.run import learner
from tests import sameness
from tests.networks import sameness_nets
from tests.tiny_task import tiny_task

# Rows of the net's mini-batch: 1, 1, 2 and 2 real tokens, and 7, 7, 6 and 5.
FEW, MANY = [1, 6, 3, 9], [0, 4, 8, 7]


def updated(num_micro_batches: int, *batches: list[int]) -> dict[str, Any]:
    """Return the weights after one update by mini-batches of these rows, and its sums."""
    params = tiny_task(optimizer=optim.Optimizer.Params(name="SGD", learning_rate=1.0))
    case = sameness.Case("tied", 2, num_micro_batches, "1f1b", "losses inside", "full")
    params.model = sameness.params(case)
    fields = sameness_nets.TIED.fields()
    given = [{name: tf.gather(v, rows) for name, v in fields.items()} for rows in batches]
    learned = learner.Learner(params, given[0])
    told = learned.update(given)
    values = {path: variable.numpy() for path, variable in learned.pipe.by_path.items()}
    hits = told.sums["accuracy"]
    return values | {"loss": told.loss, "hits": hits["total"], "tokens": hits["weight"]}


def test_mini_batches_of_unequal_weights_are_one_of_both() -> None:
    """Dropout and tied weights too: seeds are counted over the micro-batches of the update."""
    one, several = updated(4, FEW + MANY), updated(2, FEW, MANY)
    assert float(one["tokens"]) == 31.0
    assert one.keys() == several.keys()
    for key in one:
        np.testing.assert_allclose(several[key], one[key], rtol=1e-10, atol=1e-14, err_msg=key)
