"""A plan of replicas names the slices with which owners of large layers are even."""

from __future__ import annotations

from typing import Any

import pytest

from lingvo_gpipe import optim, pipelining, task
from lingvo_gpipe.plan import owner_balance, report, slicing, step_plan
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.lm.input import Tokens


def language(*, tie: bool = False, vocabulary: int = 8_000, **model: Any) -> Any:
    """Return a language model most of whose bytes are its two tables."""
    flat = transformer.language_model(4, units=64, heads=2, hidden=64, vocabulary=vocabulary)
    if tie:
        flat[-1].tie = {"kernel": "embedding/table"}
    settings = {"num_partitions": 2, "num_micro_batches": 16, "num_replicas": 4, **model}
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(layers=flat, **settings),
        input=Tokens.Params(batch_size=16, data_dir="missing", length=8),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.1), max_steps=1
        ),
    )


@pytest.mark.parametrize("tie", [False, True])
def test_slices_that_balance_owners_are_advised(tie: bool) -> None:
    params = language(tie=tie)
    advice = owner_balance.advice(params)
    assert advice is not None
    assert advice.layers == ("embedding", "softmax")
    assert set(advice.slices) == {"embedding", "softmax"}
    assert len(set(advice.slices.values())) == 1
    before = step_plan.make_for(params).heaviest_bytes
    after = step_plan.make_for(slicing.with_slices(params, advice.slices)).heaviest_bytes
    assert (advice.before_bytes, advice.after_bytes) == (before, after)
    assert after < 0.7 * before
    text = report.plan(params)
    assert f'--params_override="model.slices={advice.slices}" (--mode=reslice for a run' in text
    # The override that the text names can be set, and asks for no more.
    params.override(f"model.slices={advice.slices}")
    assert owner_balance.advice(params) is None
    assert "--mode=reslice" not in report.plan(params)


def test_the_fewer_slices_are_taken_where_they_are_nearly_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = language()
    taken = {}
    for share in (0.0, 1.0):
        monkeypatch.setattr(owner_balance, "_NEARLY_EQUAL_SHARE", share)
        advice = owner_balance.advice(params)
        assert advice is not None
        taken[share] = advice.slices["softmax"], advice.after_bytes
    assert taken[0.0] == (8, min(heaviest for _, heaviest in taken.values()))
    assert taken[1.0][0] == 4


def test_nothing_is_advised_where_nothing_is_gained() -> None:
    assert owner_balance.advice(language(num_replicas=1)) is None
    assert owner_balance.advice(language(vocabulary=100)) is None  # tables are not the largest
    assert owner_balance.advice(language(vocabulary=3)) is None  # more slices than rows
