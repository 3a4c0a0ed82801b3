"""A run in groups of micro-batches is the run without them, and is planned as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.plan import describe, report, step_plan
from lingvo_gpipe.run import eval_mode, loop
from lingvo_gpipe.run.profiles import steps
from tests.tiny_task import tiny_task


def task_of(group_size: int, **fields: Any) -> Any:
    params = tiny_task(max_steps=6, accumulate=2)
    params.model.set(num_micro_batches=8, group_size=group_size, schedule="1f1b", **fields)
    params.input.eval_batch_size = 13  # one mini-batch, in groups of 4, 4, 3 and 2 examples
    return params


def weights(result: loop.Result) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(result.checkpoint)
    keys = reader.get_variable_to_shape_map()
    return {key: reader.get_tensor(key) for key in keys if key != "_CHECKPOINTABLE_OBJECT_GRAPH"}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_run_in_groups_is_the_run_without_them(tmp_path: Path, num_replicas: int) -> None:
    """Batch norm and dropout too: the groups' micro-batches are those of the mini-batch."""
    whole = loop.run(task_of(128, num_replicas=num_replicas), tmp_path / "whole", evaluate=True)
    params = task_of(2, num_replicas=num_replicas)
    groups = loop.run(params, tmp_path / "groups", evaluate=True)
    assert groups.metrics == pytest.approx(whole.metrics, rel=1e-5)
    expected, found = weights(whole), weights(groups)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    again = eval_mode.run(params, tmp_path / "groups")
    assert again is not None
    assert again.values == pytest.approx(groups.metrics, rel=1e-6)


def test_a_step_in_groups_is_recorded_and_planned(tmp_path: Path) -> None:
    params = task_of(2)
    lines: list[str] = []
    profiles = steps.Profiles(range(2, 3))
    loop.run(params, tmp_path, profiles=profiles, report=lines.append)
    # An update has two mini-batches.
    taken = "step 2, the last of its 8 mini-batches or groups: slots took"
    (line,) = [line for line in lines if line.startswith(taken)]
    (step_ms,) = {row.split()[-1] for row in line.splitlines()[2:-1]}
    (compared,) = [line for line in lines if "that its table needs" in line]
    assert f"it took {step_ms} ms, " in compared
    text = "a mini-batch has 8 micro-batches, which run as 4 groups of 2, one after the other"
    assert text in report.render(step_plan.make_for(params))
    assert describe.describe(params).startswith(text)


def test_a_plan_counts_all_groups() -> None:
    whole, groups = step_plan.make_for(task_of(128)), step_plan.make_for(task_of(2))
    assert (whole.num_groups, groups.num_groups) == (1, 4)
    assert groups.mini_batch_s == pytest.approx(4 * groups.step_s)
    assert 1.0 < groups.mini_batch_s / whole.mini_batch_s < 1.5  # it fills and drains four times
    assert max(groups.analysis.sizes) == max(whole.analysis.sizes)


def test_a_group_without_a_micro_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.PartitionError, match="group_size=0, but a group has"):
        loop.run(task_of(0), tmp_path)
