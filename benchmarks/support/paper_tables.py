"""The figures of the GPipe paper's Tables 1, 2 and 3, and the models that they are about.

Source: Huang et al. 2019 (arXiv 1811.06965), as printed, except for two values of Table 1 that the
paper swaps: 282 million times 12 bytes are 3.15 GiB, so that this is the memory of the parameters
of its smallest Transformer, and 11.7 that of its activations.
"""

from __future__ import annotations

import dataclasses

from lingvo_gpipe import registry
from lingvo_gpipe.params.image import imagenet
from lingvo_gpipe.params.lm import transformer
from lingvo_gpipe.task import Task

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Largest:
    """A column of Table 1: the largest model that fits K devices.

    Attributes:
        column: its head.
        size: the model's, as printed.
        recipe: class of the registered model.
        parameters: as printed.
        parameter_memory: as printed, without the unit.
        activation_memory: peak, as printed, of all devices.
    """

    column: str
    size: str
    recipe: type[registry.Model]
    parameters: str
    parameter_memory: float
    activation_memory: float


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    Attributes:
        name: in the tables.
        unit: bytes of the unit in which Table 1 fits 12 bytes for each parameter.
        unit_name: its name.
        device_memory: bytes of a device of Table 1, as text.
        grow: the recipe's size that grows until a device is full.
        columns: of Table 1.
        table_2_name: model of Table 2.
        table_3_name: model of Table 3.
        table_2: M → throughput for K = 2, 4, 8, in that of M = 1, K = 2.
        table_3: for K = 2, 4, 8, in that of K = 2; M = 32.
    """

    name: str
    unit: int
    unit_name: str
    device_memory: str
    grow: str
    columns: tuple[Largest, ...]
    table_2_name: str
    table_3_name: str
    table_2: dict[int, tuple[float, float, float]]
    table_3: tuple[float, float, float]


AMOEBA_NET = Family(
    "AmoebaNet-D",
    10**9,
    "GB",
    "8GB",
    "filters",
    (
        Largest("Naive-1", "(18, 208)", imagenet.AmoebaNetD18x208, "82M", 1.05, 6.26),
        Largest("Pipeline-1", "(18, 416)", imagenet.AmoebaNetD18x416, "318M", 3.8, 3.46),
        Largest("Pipeline-2", "(18, 544)", imagenet.AmoebaNetD18x544, "542M", 6.45, 8.11),
        Largest("Pipeline-4", "(36, 544)", imagenet.AmoebaNetD36x544, "1.05B", 12.53, 15.21),
        Largest("Pipeline-8", "(72, 512)", imagenet.AmoebaNetD72x512, "1.8B", 24.62, 26.24),
    ),
    "AmoebaNet-D (18, 256)",
    "AmoebaNet-D (18, 128)",
    {1: (1.0, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    (1.0, 1.7, 2.7),
)
TRANSFORMER = Family(
    "Transformer",
    GIB,
    "GiB",
    "16GiB",
    "num_layers",
    (
        Largest("Naive-1", "3", transformer.L3, "282.2M", 3.15, 11.7),
        Largest("Pipeline-1", "13", transformer.L13, "785.8M", 8.8, 6.4),
        Largest("Pipeline-8", "103", transformer.L103, "5.3B", 59.5, 50.9),
        Largest("Pipeline-32", "415", transformer.L415, "21.0B", 235.1, 199.9),
        Largest("Pipeline-128", "1663", transformer.L1663, "83.9B", 937.9, 796.1),
    ),
    "Transformer-48",
    "Transformer-24",
    {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
    (1.0, 1.8, 3.3),
)
FAMILIES = {"amoebanet": AMOEBA_NET, "transformer": TRANSFORMER}


def task_of(family: str, table: int, num_partitions: int, num_micro_batches: int) -> Task.Params:
    """Return the task whose speed Table 2 or 3 shows; every forward is recomputed.

    Table 3 is about GPUs without bfloat16, so its models compute in float32. The paper states
    neither the mini-batches nor the width of the Transformers: here they are those of Table 1.

    Args:
        family: a key of `FAMILIES`.
        table: 2 or 3.
        num_partitions: K.
        num_micro_batches: M.
    """
    if family == "amoebanet":
        by_table = {2: imagenet.AmoebaNetD18x256, 3: imagenet.AmoebaNetD18x128}
        recipe: registry.Model = by_table[table]()
    else:
        recipe = transformer.L103().resized("num_layers", 48 if table == 2 else 24)
    task = recipe.task()
    task.model.set(num_partitions=num_partitions, num_micro_batches=num_micro_batches, fuse=False)
    if table == 3:
        task.model.dtype = None
    return task
