"""The families whose largest member is searched: members, generated mini-batches, table rows."""

from __future__ import annotations

import pytest

from benchmarks import largest_step
from lingvo_gpipe import task
from lingvo_gpipe.plan import step_plan


@pytest.mark.parametrize(("name", "sizes"), [("images", (8, 16)), ("translation", (1, 2))])
def test_a_family_grows_and_its_mini_batch_is_made(name: str, sizes: tuple[int, int]) -> None:
    family = largest_step.FAMILIES[name]
    one = family.member()
    task.check(one)
    plans = [step_plan.make_for(family.member(size)) for size in sizes]
    assert plans[0].together_bytes < plans[1].together_bytes
    assert [len(plan.cells) for plan in plans] == [one.model.num_partitions] * 2
    assert len(plans[0].analysis.sizes) == 4
    specs = one.input.instantiate().element_spec(training=True)
    for field, spec in specs.items():
        value = largest_step.made(field, spec)
        assert (value.shape, value.dtype) == (spec.shape, spec.dtype)
    if name == "translation":
        position = largest_step.made("source_position", specs["source_position"])
        assert position.numpy()[:, :3].tolist() == [[0, 1, 2]] * specs["source"].shape[0]
        source = largest_step.made("source", specs["source"]).numpy()
        assert source.min() > 0  # nothing is padding
