"""Activations read from traced programs are those that TensorFlow requests."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from benchmarks.support import tensor_bytes
from lingvo_gpipe import layers, network
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.plan import activations, measuring, step_plan
from tests.lingvo_gpipe.plan.networks import floats, pipe


def regression(*own: Any) -> tuple[Any, dict[str, tf.TensorSpec]]:
    spec = floats(512, 128)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


def images() -> tuple[Any, dict[str, tf.TensorSpec]]:
    own = []
    for _ in range(4):
        own += [
            layers.Conv2D.Params(filters=16, use_bias=False),
            layers.BatchNorm.Params(),
            layers.Activation.Params(activation="relu"),
        ]
    spec = floats(8, 32, 32, 16)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


def sequences() -> tuple[Any, dict[str, tf.TensorSpec]]:
    own = [layers.TransformerLayer.Params(units=64, heads=4, hidden=256) for _ in range(2)]
    spec = floats(16, 64, 64)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


CASES = {
    "dense": regression(*(layers.Dense.Params(units=128, activation="relu") for _ in range(8))),
    "gelu": regression(
        *(
            layers.Residual.Params(body=[layers.Dense.Params(units=128, activation="gelu")])
            for _ in range(8)
        )
    ),
    "images": images(),
    "sequences": sequences(),
}


@pytest.mark.parametrize("name", CASES)
def test_a_backward_holds_what_is_requested_from_the_allocator(name: str) -> None:
    params, fields = CASES[name]
    analysis = network.analyze(params.copy().set(fuse=False), fields)
    made = [info.params.instantiate() for info in analysis.layers]
    programs = cell_programs.CellPrograms(0, analysis, made, jit=False)
    (cell,) = analysis.cells
    given, upstream = measuring.values(analysis, cell)

    def backward() -> Any:
        return programs.run(cell, "B", given, upstream).as_nest()

    (traced,) = activations.traced(analysis)
    assert not traced.is_estimate
    backward()
    # The machine decides which operations run at the same time: a busy one may hold one or two
    # tensors more in most runs, never fewer. Bytes requested from the allocator count, not those it
    # returns: if memory is fragmented, it returns blocks of up to twice the size.
    held = min(tensor_bytes.peak(backward) for _ in range(5))
    assert traced.peaks["B"] == pytest.approx(held, rel=0.1)


def test_traced_activations_are_in_the_plan_and_said_to_be() -> None:
    params, fields = CASES["gelu"]
    (by_formula,) = step_plan.make(params, fields).cells
    profiled = step_plan.make(params, fields, profile=True)
    (needs,) = activations.traced(network.analyze(params, fields))
    imports = 2 * 512 * 128 * 4
    (cell,) = profiled.cells
    assert profiled.profiled
    # The last cell's only micro-batch runs as one program.
    assert cell.activation_bytes == needs.peaks["FB"] + imports
    # The formula knows two tensors per gelu; its gradient keeps more.
    assert by_formula.activation_bytes < cell.activation_bytes


def test_a_kept_forward_leaves_what_tensorflow_keeps_of_it() -> None:
    block = layers.Residual.Params(body=[layers.Dense.Params(units=128, activation="gelu")])
    params, fields = regression(block)
    params.set(recompute="never", num_micro_batches=4)
    (needs,) = activations.traced(network.analyze(params, fields))
    one = 512 // 4 * 128 * 4
    # Of gelu the half of the sum, the sum by √2 and erfc of it; the error's difference.
    assert needs.residual == pytest.approx(4 * one, rel=1e-3)
    (cell,) = step_plan.make(params, fields, profile=True).cells
    working = max(needs.peaks["BK"], needs.peaks["K"] - needs.residual)
    # x and target of all four, and what each keeps.
    assert cell.activation_bytes == 4 * (2 * one + needs.residual) + working


def test_a_loop_holds_what_its_formula_predicts_and_is_an_estimate() -> None:
    lstm = adapter.from_keras(keras.layers.LSTM(64))
    params = pipe(lstm, layers.MeanSquaredError.Params(), num_partitions=2, cuts=(1, 1))
    fields = {"x": floats(32, 50, 64), "target": floats(32, 64)}
    analysis = network.analyze(params, fields)
    looped, plain = activations.traced(analysis)
    estimate = memory_formulas.cell_bytes(analysis, analysis.cells[0])
    assert looped.is_estimate
    assert looped.peaks["F"] >= estimate.peaks["F"] > 50 * 32 * 64 * 4
    assert looped.peaks["B"] == estimate.peaks["B"]
    assert not plain.is_estimate


def test_a_cell_without_a_backward_holds_its_forward_alone() -> None:
    params, fields = regression(*(layers.Dense.Params(units=128) for _ in range(2)))
    params.set(num_partitions=2, cuts=(1, 2), frozen=("dense/*",))
    frozen, trained = activations.traced(network.analyze(params, fields))
    assert frozen.peaks["F"] >= 512 * 128 * 4
    assert (set(frozen.peaks), frozen.residual, frozen.is_estimate) == ({"F"}, 0, False)
    assert set(trained.peaks) == {"FB"}
