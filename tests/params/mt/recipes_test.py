"""The registered translation models have the published sizes and batches."""

from __future__ import annotations

from typing import Any

import pytest

from lingvo_gpipe import network, registry
from lingvo_gpipe.plan import describe, step_plan

COUNTS = {
    "mt.multilingual.T6x8192x16": (473_745_920, 1),
    "mt.multilingual.T24x8192x16": (1_304_955_392, 4),
    "mt.multilingual.T12x16384x32": (1_304_771_072, 2),
    "mt.multilingual.T32x16384x32": (3_151_596_032, 8),
    "mt.multilingual.T64x16384x32": (6_106_515_968, 16),
    "mt.bilingual.T6x8192x16": (375_409_920, 1),
    "mt.bilingual.DeEn260k": (375_409_920, 1),
    "mt.bilingual.DeEn1m": (375_409_920, 1),
    "mt.bilingual.DeEn4m": (375_409_920, 1),
}
TOKENS = {"DeEn260k": 2**18, "DeEn1m": 2**20, "DeEn4m": 2**22}
REGISTRY = registry.Registry()


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_partitions_are_the_paper_s(name: str) -> None:
    params = REGISTRY.model(name)().task()
    analysis = network.analyze(params.model, describe.fields_of(params))
    assert (describe.counts(analysis).parameters, len(analysis.cuts)) == COUNTS[name]
    assert len(set(analysis.sizes)) == 1  # micro-batches are equal


def test_logits_are_clipped_and_labels_smoothed() -> None:
    for name in COUNTS:
        softmax: Any = REGISTRY.model(name)().task().model.layers[-1]
        assert (softmax.logit_clip, softmax.label_smoothing) == (50.0, 0.1), name


@pytest.mark.parametrize("name", TOKENS)
def test_an_update_has_the_tokens_of_table_5(name: str) -> None:
    params = REGISTRY.model(f"mt.bilingual.{name}")().task()
    rows, length = params.input.instantiate().element_spec()["source"].shape
    assert rows * length * params.train.accumulate == TOKENS[name]


def test_the_heaviest_cell_of_the_largest_model_is_near_the_mean() -> None:
    params = REGISTRY.model("mt.multilingual.T64x16384x32")().task()
    told = step_plan.make_for(params)
    held = [cell.parameter_bytes for cell in told.cells]
    assert sum(held) == 4 * 6_106_515_968
    shares = [cell.cost_share for cell in told.cells]
    assert max(shares) < 1.1 / 16
    names = {name for link in told.links for name in link.names}
    assert "encoder_norm" in names
