"""A run in groups of micro-batches is the run without them, and is planned as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers
from lingvo_gpipe.network import parts
from lingvo_gpipe.plan import describe, report, step_plan
from lingvo_gpipe.run import evaluation, learner, loop
from lingvo_gpipe.run.profiles import Profiles
from tests.support import saved
from tests.tiny_task import tiny_task


def task_of(group_size: int, **fields: Any) -> Any:
    params = tiny_task(max_steps=6, accumulate=2)
    params.model.set(num_micro_batches=8, group_size=group_size, schedule="1f1b", **fields)
    params.input.eval_batch_size = 13  # one mini-batch, in groups of 4, 4, 3 and 2 examples
    return params


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.sameness_grid), 2])
def test_a_run_in_groups_is_the_run_without_them(tmp_path: Path, num_replicas: int) -> None:
    """Batch norm and dropout too: the groups' micro-batches are those of the mini-batch."""
    whole = loop.run(task_of(128, num_replicas=num_replicas), tmp_path / "whole", evaluate=True)
    params = task_of(2, num_replicas=num_replicas)
    groups = loop.run(params, tmp_path / "groups", evaluate=True)
    assert groups.metrics == pytest.approx(whole.metrics, rel=1e-5)
    expected, found = saved.values(whole.checkpoint), saved.values(groups.checkpoint)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    again = evaluation.run(params, tmp_path / "groups")
    assert again is not None
    assert again.values == pytest.approx(groups.metrics, rel=1e-6)


def test_a_step_in_groups_is_recorded_and_planned(tmp_path: Path) -> None:
    params = task_of(2)
    lines: list[str] = []
    profiles = Profiles(range(2, 3))
    loop.run(params, tmp_path, profiles=profiles, report=lines.append)
    # An update has two mini-batches.
    taken = "step 2, the last of 8 mini-batches or groups:"
    (line,) = [line for line in lines if line.startswith(taken)]
    (step_ms,) = {row.split()[-1] for row in line.splitlines()[2:-1]}
    (compared,) = [line for line in lines if "that its table needs" in line]
    assert f"it took {step_ms} ms, " in compared
    text = "a mini-batch runs as 4 groups of micro-batches, one after the other"
    assert text in report.render(step_plan.make_for(params))
    assert describe.describe(params).startswith(text)


def test_a_plan_counts_all_groups() -> None:
    whole, groups = step_plan.make_for(task_of(128)), step_plan.make_for(task_of(2))
    assert (whole.num_groups, groups.num_groups) == (1, 4)
    assert groups.mini_batch_s == pytest.approx(4 * groups.step_s)
    assert 1.0 < groups.mini_batch_s / whole.mini_batch_s < 1.5  # it fills and drains four times
    assert max(groups.analysis.sizes) == max(whole.analysis.sizes)


def test_a_loss_that_is_a_sum_is_that_of_the_mini_batch() -> None:
    """In groups, and read in parts: its divisor is 1, however the mini-batch runs."""
    found = []
    for most, num_replicas in ((128, 1), (2, 1), (128, 2)):
        params = task_of(most, num_replicas=num_replicas)
        head = layers.Dense.Params(name="head", units=3)
        loss = layers.Loss.Params(
            loss="SparseCategoricalCrossentropy",
            config={"reduction": "sum", "from_logits": True},
            reads=("x", "label"),
        )
        params.model.layers = [*params.model.layers[:-1], head, loss]
        batch = next(iter(params.input.instantiate().batches(1)))
        made = learner.Learner(params, params.input.instantiate().element_spec(training=True))
        held_out = evaluation.evaluate(made.pipe, [batch, batch], step=0, groups=made.groups)
        assert held_out is not None
        given: Any = batch
        if num_replicas > 1:
            given = parts.InParts(
                [parts.ReplicaPart.of(made.pipe.params, n).cut(batch) for n in (0, 1)]
            )
        result = made.update([given])
        found.append((held_out.values["loss"], float(result.loss)))
    assert found[0][0] > 5.0
    for one in found[1:]:
        np.testing.assert_allclose(one, found[0], rtol=1e-5)


def failing(index: int, group_size: int, **layer: Any) -> tuple[Any, dict[str, tf.Tensor]]:
    """Return a learner with eight micro-batches of an example, and a mini-batch."""
    params = task_of(group_size)
    made = learner.Learner(params, params.input.instantiate().element_spec(training=True))
    batch = next(iter(params.input.instantiate().batches(1)))
    point = tf.tensor_scatter_nd_update(batch["point"], [[index, 0]], [layer.get("value", 0.0)])
    return made, {**batch, "point": point}


def test_places_are_those_in_the_mini_batch() -> None:
    made, batch = failing(5, 2, value=np.nan)
    place = made.first_nonfinite([batch], 0)
    assert place == failing(5, 128, value=np.nan)[0].first_nonfinite([batch], 0)
    assert place.endswith("micro-batch 5")
    wrong = {**batch, "label": tf.tensor_scatter_nd_update(batch["label"], [[6]], [99])}
    with pytest.raises(errors.InputError, match="row 6"):
        made.update([wrong])
    cause = tf.errors.InternalError(None, None, "none")
    groups = list(made._groups([batch, batch]))
    numbers = [(group.first, group.num_micro_batches, earlier) for group, earlier in groups]
    assert numbers == [(first, 8, earlier) for earlier in (0, 8) for first in (0, 2, 4, 6)]
    assert "a step failed (none)" in str(made._explained(cause, groups))


def test_counts_that_are_refused_elsewhere_are_refused(tmp_path: Path) -> None:
    for fields in ({"num_replicas": 0}, {"num_micro_batches": 0}):
        params = tiny_task(max_steps=1)
        params.model.set(**fields)
        with pytest.raises(errors.PartitionError, match=next(iter(fields))):
            loop.run(params, tmp_path)


def test_what_a_plan_of_groups_measures_and_keeps() -> None:
    """The programs of a group; sums of gradients from one group to the next."""
    params = task_of(2)
    params.train.accumulate = 1
    assert step_plan.cache_of(params, profile=True).layer_times
