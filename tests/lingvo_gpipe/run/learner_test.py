"""Mini-batches of one update are weighted by their content, not equally."""

from __future__ import annotations

import itertools
import types
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, optim
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.run import learner
from tests import sameness
from tests.networks import pipelines, sameness_nets
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


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_beginning_of_the_last_mini_batch_is_known(
    num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"point": tf.zeros([8, 4]), "label": tf.zeros([8], tf.int32)}
    learned = learner.Learner(tiny_task(), fields)
    ticks = map(float, itertools.count(1))
    monkeypatch.setattr(learner, "time", types.SimpleNamespace(time=lambda: next(ticks)))
    learned.update([fields] * num_batches)
    assert learned.last_batch == learner.LastBatch(float(num_batches), num_batches)


class NotesSeeds(layers.Identity):
    """x → x; notes the seeds of its calls that are made eagerly."""

    seeds: ClassVar[list[int]] = []

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        del theta
        if tf.executing_eagerly():
            self.seeds.append(int(ctx.seed[0]))
        return inputs


def test_what_is_not_finite_is_looked_for_by_the_seeds_of_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask of the second mini-batch may be the cause, so it must be drawn again."""
    params = tiny_task(accumulate=2)
    params.model.layers = [*params.model.layers[:-1], NotesSeeds.Params(), params.model.layers[-1]]
    batch = next(iter(params.input.instantiate().batches(1)))
    learned = learner.Learner(params, params.input.instantiate().element_spec(training=True))
    NotesSeeds.seeds.clear()
    assert learned.first_nonfinite([batch, batch], 5) is None
    assert len(NotesSeeds.seeds) == len(set(NotesSeeds.seeds)) == 4
    given: list[int] = []

    def explain(error: tf.errors.OpError, _: Any, **found: Any) -> errors.UserError:
        given.append(found["first_micro_batch"])
        return errors.StepError(str(error))

    monkeypatch.setattr(learned.pipe, "explain", explain)
    learned._explained(tf.errors.InternalError(None, None, "x"), [batch] * 2)
    assert given == [0, 2]


def traced(params: Any, count: int = 1) -> list[tf.Graph]:
    """Return the graphs of an update by mini-batches of the tiny task that assign variables."""
    params.model.devices = ("/device:CPU:1", "/device:CPU:2")
    batches = params.input.instantiate().batches(1)
    fields = next(iter(batches))
    learned = learner.Learner(params, fields)
    learned.pipe.executor.follow_progress()
    learned.update([fields] * count)
    functions = learned._update_by_one, learned._apply
    return [c.graph for function in functions for c in function._concretes.values()]


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({"finite_guard": False}, 1),
        ({"clip_norm": 1.0, "average": optim.Average.Params(decay=0.9)}, 1),
        ({"loss_scale": optim.LossScale.Params(initial=8.0)}, 1),
        ({"loss_scale": optim.LossScale.Params(initial=8.0), "accumulate": 2}, 2),
    ],
)
def test_a_variable_is_read_before_it_is_assigned(train: dict[str, Any], count: int) -> None:
    """TensorFlow orders nothing there: every read that is used leads to the assignment."""
    (graph,) = traced(tiny_task(**train), count)
    operations = graph.get_operations()
    used = {tensor.op for operation in operations for tensor in operation.inputs}
    assigned = {op.inputs[0].ref(): op for op in operations if op.type == "AssignVariableOp"}
    assert len(assigned) > 10
    for read in operations:
        if read.type == "ReadVariableOp" and read in used and read.inputs[0].ref() in assigned:
            assert read in pipelines.before(assigned[read.inputs[0].ref()]), read.name


def test_a_device_reports_its_assignments_once() -> None:
    """Every control edge between processes is a message; there were over a hundred."""
    (graph,) = traced(tiny_task(clip_norm=1.0))
    messages = {
        earlier
        for operation in graph.get_operations()
        if not operation.device and operation.type != "ReadVariableOp"  # that is at its variable
        for earlier in operation.control_inputs
        if earlier.device.endswith(("CPU:1", "CPU:2"))
    }
    assert sorted(one.device[-5:] for one in messages) == ["CPU:1", "CPU:2"]
    assert {one.type for one in messages} == {"NoOp"}


def test_a_device_reports_once_whether_its_statistics_are_finite() -> None:
    """A value for each of AmoebaNet-D's 202 statistics took half of the chief's time."""
    (graph,) = traced(tiny_task())
    flags = {
        tensor.ref(): tensor.op.device[-5:]
        for operation in graph.get_operations()
        if not operation.device
        for tensor in operation.inputs
        if tensor.dtype == tf.bool and tensor.op.device.endswith(("CPU:1", "CPU:2"))
    }
    assert list(flags.values()) == ["CPU:2"]  # two statistics of one batch norm
