"""Cells with the policy `recompute_grad` under schedules that split backwards into I and W."""

from __future__ import annotations

from typing import Any

import pytest

from lingvo_gpipe import layers
from tests import sameness
from tests.networks import pipelines
from tests.sameness import Case

SPLIT = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1"


def graphs(given: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the graphs of the programs of cell 1, by phase."""
    settings = {"num_partitions": 2, "num_micro_batches": 2, "schedule": SPLIT, **fields}
    own = pipelines.pipe(given, **settings)
    pipelines.step_graph(own)
    return dict(own.executor.programs[1].graphs)


def products(programs: dict[str, Any]) -> dict[str, int]:
    return {phase: pipelines.count(graph)["MatMul"] for phase, graph in programs.items()}


def waits(programs: dict[str, Any]) -> dict[str, int]:
    """Return how many zeros are made of gradients: `tf.recompute_grad` makes one per call."""
    return {phase: pipelines.count(graph)["SelectV2"] for phase, graph in programs.items()}


def test_a_split_backward_goes_through_tf_recompute_grad() -> None:
    found = graphs(pipelines.mlp(), cuts=(2, 5), recompute="recompute_grad")
    # Four layers: I computes four again and goes back by all inputs, W by all weights.
    assert products(found) == {"F": 4, "I": 8, "W": 4}
    assert waits(found) == {"F": 0, "I": 1, "W": 0}
    plain = graphs(pipelines.mlp(), cuts=(2, 5), recompute="full", fuse=False)
    assert products(plain) == products(found)
    assert waits(plain) == {"F": 0, "I": 0, "W": 0}


@pytest.mark.parametrize("recompute", ["full", "recompute_grad"])
def test_the_recomputation_that_only_weights_need_is_in_the_input_gradient(recompute: str) -> None:
    """Of two linear layers, the gradients of inputs need no output."""
    widths = (7, 6, 8, 4, 9, 3)
    stack = [layers.Dense.Params(name=f"d{n}", units=units) for n, units in enumerate(widths)]
    found = graphs(
        [*stack, layers.MeanSquaredError.Params(name="error")],
        num_partitions=3,
        cuts=(2, 2, 3),
        schedule="zb_h1",
        recompute=recompute,
    )
    # The first layer again, then back by two inputs; by two weights.
    assert products(found) == {"F": 2, "I": 3, "W": 2}
    assert waits(found)["I"] == (recompute == "recompute_grad")


def test_a_recomputed_layer_leaves_its_weights_to_the_weight_gradient() -> None:
    deep = [pipelines.dense(f"d{n}", 6, recompute=True) for n in range(3)]
    given = [*deep, pipelines.dense("d3", 3), layers.MeanSquaredError.Params(name="error")]
    found = graphs(given, cuts=(1, 4), recompute="full", fuse=False)
    assert products(found)["W"] == 3


@pytest.mark.parametrize(
    ("net", "schedule", "recompute"),
    [
        ("mixed", "zb_v", "recompute_grad"),  # outputs without gradients come first
        ("recomputed", "zb_v", "full"),
        ("recomputed", "zb_h1", "recompute_grad"),
    ],
)
def test_gradients_are_those_of_the_plain_network(net: str, schedule: str, recompute: str) -> None:
    case = Case(net, 2, 3, schedule, "losses inside", recompute)
    assert sameness.check(case) <= 1e-10


def test_compiled_gradients_are_those_of_the_plain_network() -> None:
    case = Case("skip", 2, 3, "zb_h1", "losses inside", "recompute_grad")
    assert sameness.check(case, jit_compile=True) <= 1e-10
