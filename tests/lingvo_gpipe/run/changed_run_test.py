"""A run goes on with other partitions, micro-batches, schedule and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.run import loop
from tests.tiny_task import Points, stop_after, tiny_task

SEEN: list[bytes] = []


class Seen(layers.Identity):
    """x → x; appends each example to SEEN, in the forward pass of its micro-batch."""

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta
        return seen(inputs) if ctx.training else inputs


@tf.custom_gradient
def seen(x: tf.Tensor) -> Any:
    def note(rows: Any) -> Any:
        SEEN.extend(row.tobytes() for row in rows)
        return rows

    y = tf.numpy_function(note, [x], x.dtype, stateful=False)
    return tf.ensure_shape(y, x.shape), lambda upstream: upstream


# Parts of a run: to which step, and how. Of the mini-batches of 12 examples, that of step 3 has the
# last six of the first epoch and the first six of the second.
PARTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"num_partitions": 2, "num_micro_batches": 2, "schedule": "gpipe"}),
    (4, {"num_partitions": 3, "num_micro_batches": 6, "schedule": "1f1b"}),
    (5, {"num_partitions": 1, "num_micro_batches": 1, "schedule": "gpipe"}),
    (
        7,
        {
            "num_partitions": 2,
            "num_micro_batches": 4,
            "cells_per_device": 2,
            "schedule": "interleaved",
        },
    ),
]


def test_each_example_is_seen_once_an_epoch_while_partitions_and_schedule_change(
    tmp_path: Path,
) -> None:
    SEEN.clear()
    done = 0
    for until, fields in PARTS:
        lines: list[str] = []
        params = tiny_task(max_steps=7)
        params.train.optimizer.learning_rate = 0.01 * until
        params.input.batch_size = 12
        first, *others = params.model.layers
        seen_first = Seen.Params(name="seen", reads=("point",))
        params.model.layers = [seen_first, first.set(reads=("x",)), *others]
        params.model.set(recompute="never", **fields)
        stop = stop_after(until - done)
        result = loop.run(params, tmp_path, should_stop=stop, report=lines.append)
        assert result.step == until
        done = until
    assert lines[0] == "params changed since the last checkpoint:"
    assert "    model.num_partitions: 1 -> 2" in lines
    assert "    train.optimizer.learning_rate: 0.05 -> 0.07" in lines
    assert "restored step=5" in lines
    points = Points.Params(batch_size=12).instantiate().arrays()["train"]["point"]
    ids = {row.tobytes(): number for number, row in enumerate(points)}
    found = [ids[row] for row in SEEN]
    assert len(ids) == 42
    assert sorted(found) == sorted([*range(42), *range(42)])
    assert len(set(found[:36])) == len(set(found[48:])) == 36
