"""Parameters, statistics, FLOPs and shapes of AmoebaNets, compared with known numbers.

Counts and FLOPs are those of the reference's own graph (tensorflow/tpu, `amoeba_net/`); the
parameters of the registered models are in `tests/params/image/imagenet_test.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import network, pipelining
from lingvo_gpipe.plan import describe
from tests.networks.amoeba_nets import amoeba_net

# Genotype, L, D, classes → parameters used by inference.
COUNTS = {
    ("B", 18, 512, 1000): 557_277_864,
    ("A", 18, 448, 1001): 468_158_353,
    ("A", 18, 192, 1001): 88_512_945,
    ("A", 6, 32, 10): 1_078_302,
    ("B", 6, 32, 10): 813_422,
    ("D", 6, 32, 10): 672_242,
}
STATISTICS = {("B", 18, 512, 1001): 487_616, ("D", 18, 544, 1001): 434_380}
# GFLOPs per image at 224², 331² and 480², 2 per multiply-add, convolutions and dense alone.
GFLOPS = {
    ("B", 18, 512): (130.153, 301.410, 597.588),
    ("A", 18, 448): (109.278, 253.042, 501.743),
    ("D", 18, 208): (18.764, 43.412, 86.140),
    ("D", 18, 256): (28.387, 65.683, 130.323),
    ("D", 18, 416): (74.813, 173.130, 343.487),
    ("D", 18, 544): (127.848, 295.878, 587.000),
    ("D", 36, 544): (242.695, 562.682, 1114.358),
    ("D", 72, 512): (418.463, 971.141, 1921.462),
}
# D(18, 256) at 224²: layer → output side, channels, parameters, MFLOPs.
LAYERS = {
    "stem_conv": (111, 32, 928, 21.3),
    "stem_cell_0": (56, 192, 18_464, 157.8),
    "stem_cell_1": (28, 384, 86_592, 287.4),
    "normal_0": (28, 1024, 528_640, 822.1),
    "normal_1": (28, 1024, 741_632, 1156.1),
    **{f"normal_{n}": (28, 1024, 905_472, 1413.0) for n in range(2, 6)},
    "reduction_0": (14, 1536, 1_956_096, 2074.5),
    "normal_6": (14, 2048, 2_826_752, 1104.7),
    "normal_7": (14, 2048, 3_351_040, 1310.2),
    **{f"normal_{n}": (14, 2048, 3_613_184, 1413.0) for n in range(8, 12)},
    "reduction_1": (7, 3072, 7_811_584, 2074.5),
    "normal_12": (7, 4096, 11_289_600, 1104.7),
    "normal_13": (7, 4096, 13_386_752, 1310.2),
    **{f"normal_{n}": (7, 4096, 14_435_328, 1413.0) for n in range(14, 18)},
    "classifier": (None, 1001, 4_101_097, 8.2),
}


def settings(*model: Any, side: int, **fields: Any) -> tuple[Any, dict[str, tf.TensorSpec]]:
    flat = amoeba_net(*model, **fields)
    image = tf.TensorSpec([1, side, side, 3])
    params = pipelining.PipeliningLayer.Params(layers=flat)
    return params, {"image": image, "label": tf.TensorSpec([1], tf.int32)}


@functools.cache
def analysed(*model: Any, side: int, **fields: Any) -> network.Analysis:
    return network.analyze(*settings(*model, side=side, **fields))


def counts(*model: Any, **fields: Any) -> describe.Counts:
    return describe.counts(analysed(*model, **fields))


@pytest.mark.parametrize("model", COUNTS)
def test_parameters_are_those_of_the_reference(model: Any) -> None:
    found = counts(*model, side=224)
    assert (found.parameters, found.auxiliary) == (COUNTS[model], 0)


@pytest.mark.parametrize("model", STATISTICS)
def test_statistics_are_those_of_the_reference(model: Any) -> None:
    assert counts(*model, side=224).statistics == STATISTICS[model]


@pytest.mark.parametrize(
    ("genotype", "count"), [("A", 2_309_450), ("B", 1_784_906), ("D", 1_492_058)]
)
def test_parameters_with_the_small_stem(genotype: str, count: int) -> None:
    model = (genotype, 6, 48, 10)
    assert counts(*model, side=32, stem="small").parameters == count
    assert len(analysed(*model, side=32, stem="small").layers) == 10


@pytest.mark.parametrize(
    ("model", "side", "count"),
    [
        (("B", 18, 512, 1001), 224, 768_432),
        (("B", 18, 512, 1001), 331, 1_081_572),
        (("B", 18, 512, 1001), 480, 1_786_137),
        (("D", 18, 256, 1001), 224, 663_984),
    ],
)
def test_the_auxiliary_head_is_counted_apart(model: Any, side: int, count: int) -> None:
    found = counts(*model, side=side, auxiliary_weight=0.4)
    parameters = counts(*model, side=224).parameters
    assert (found.parameters, found.auxiliary) == (parameters, count)


@pytest.mark.parametrize("model", GFLOPS)
@pytest.mark.parametrize(
    ("place", "side"),
    [
        (0, 224),
        pytest.param(1, 331, marks=pytest.mark.sameness_grid),
        pytest.param(2, 480, marks=pytest.mark.sameness_grid),
    ],
)
def test_flops_are_those_of_the_reference(model: Any, place: int, side: int) -> None:
    layers = analysed(*model, 1001, side=side).layers
    total = sum(info.meta.flops_forward for info in layers)
    assert round(total / 1e9, 3) == GFLOPS[model][place]


def test_each_layer_of_d_18_256_is_the_reference_s() -> None:
    layers = analysed("D", 18, 256, 1001, side=224).layers
    found = {}
    for info in layers:
        shape = info.meta.outputs.shape.as_list()
        size = sum(v.size for v in info.meta.variables if not v.is_state)
        side = shape[1] if len(shape) == 4 else None
        found[info.name] = (side, shape[-1], size, round(info.meta.flops_forward / 1e6, 1))
    assert found == LAYERS
    assert list(found)[3:11] == [*(f"normal_{n}" for n in range(6)), "reduction_0", "normal_6"]


@pytest.mark.parametrize(
    ("side", "sides"), [(331, (165, 83, 42, 42, 21, 11)), (480, (239, 120, 60, 60, 30, 15))]
)
def test_sides_at_other_sizes(side: int, sides: tuple[int, ...]) -> None:
    shapes = {i.name: i.meta.outputs.shape for i in analysed("D", 18, 256, 1001, side=side).layers}
    names = ("stem_conv", "stem_cell_0", "stem_cell_1", "normal_5", "reduction_0", "reduction_1")
    assert tuple(shapes[name][1] for name in names) == sides
