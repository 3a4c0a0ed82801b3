"""The registered Transformer-L compared with the paper's Table 1."""

from __future__ import annotations

import pytest

from lingvo_gpipe import registry
from lingvo_gpipe.plan import step_plan

GIB = 2**30
# Parameters, partitions, "parameter memory" in GiB: the paper prints 11.7 for the first, which is
# the neighbouring cell's 3.15 (282,178,816 × 12 bytes). Last the plan's activations in GiB, as
# docs/translation.md lists them beside the paper's.
TABLE = {
    "L3": (282_178_816, 1, 3.15, 34.3),
    "L13": (785_761_536, 1, 8.8, 6.2),
    "L103": (5_318_006_016, 8, 59.5, 44.6),
    "L415": (21_029_786_880, 32, 235.1, 178.0),
    "L1663": (83_876_910_336, 128, 937.9, 711.4),
}
REGISTRY = registry.Registry()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sameness_grid) if name == "L1663" else name
        for name in TABLE
    ],
)
def test_weights_and_slots_have_the_bytes_of_table_1(name: str) -> None:
    parameters, partitions, memory, activations = TABLE[name]
    told = step_plan.make_for(REGISTRY.model(f"lm.transformer.{name}")().task())
    assert told.parameters == parameters
    assert len(told.cells) == partitions
    held = sum(cell.parameter_bytes + cell.slot_bytes for cell in told.cells)
    assert held == 12 * parameters
    assert held / GIB == pytest.approx(memory, rel=0.005)
    peaks = sum(cell.activation_bytes for cell in told.cells)
    assert round(peaks / GIB, 1) == activations


@pytest.mark.parametrize(("name", "partitions"), [("L415", 32), ("L1663", 128)])
def test_the_largest_have_the_paper_s_partitions(name: str, partitions: int) -> None:
    model = REGISTRY.model(f"lm.transformer.{name}")().task().model
    assert model.num_partitions == partitions
    assert sum(p.name.startswith("layer_") for p in model.layers) == int(name.removeprefix("L"))
