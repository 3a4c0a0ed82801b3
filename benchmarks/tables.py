"""The GPipe paper's Tables 1, 2 and 3 (Huang et al. 2019), with this library's plans beside them.

`python -m benchmarks.tables [--only=1,2,3]`. Nothing is run or measured.

- Table 1: parameters, their memory at 12 bytes each and peak activations of the paper's models, and
  the largest model that fits the same devices with everything that a step needs, also gradients.
- Table 2: throughput for K = 2, 4, 8 and M = 1, 4, 32, divided by that of K = 2, M = 1, simulated
  by FLOPs and the automatic cut. Our mini-batch is the same for all of them; the paper adjusted its
  own to the memory.
- Table 3: throughput for K = 2, 4, 8 and M = 32 divided by that of K = 2, simulated with links of
  some bandwidths between P100 (9.3 TFLOP/s in float32, the peak of the version for PCIe).

The paper's figures are as printed (arXiv 1811.06965), except for two values of Table 1 that it
swaps: 282 million times 12 bytes are 3.15 GiB, so that this is the memory of the parameters of its
smallest Transformer, and 11.7 that of its activations. Figures at 12 bytes each are GB of 10⁹ bytes
for AmoebaNet-D, and GiB for Transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.support import processes
from lingvo_gpipe import registry
from lingvo_gpipe.console import units
from lingvo_gpipe.params.image import imagenet
from lingvo_gpipe.params.lm import transformer
from lingvo_gpipe.plan import describe, hosts, largest, step_plan
from lingvo_gpipe.task import Task

PARTITIONS = (2, 4, 8)
P100_FLOPS = "9.3T"
# Free; 16 lanes of PCIe 3.0 of 8 GT/s, 128 bits in 130; a third of it; 10 Gbit/s.
BANDWIDTHS = (None, "15.75GB", "5.25GB", "1.25GB")
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Largest:
    """A column of Table 1: the largest model that fits K devices.

    Attributes:
        column: its head.
        recipe: class of the registered model.
        parameters: as printed.
        parameter_memory: as printed, in the unit of the family.
        activation_memory: peak of all devices as printed, in the unit of the family.
    """

    column: str
    recipe: type[registry.Model]
    parameters: str
    parameter_memory: float
    activation_memory: float


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    Attributes:
        unit: bytes of the unit of Table 1.
        device_memory: of a device of Table 1, as text.
        grow: the recipe's size that grows until a device is full.
        columns: of Table 1.
        model_2: model of Table 2.
        model_3: model of Table 3.
        table_2: M → throughput for K = 2, 4, 8, divided by that of M = 1, K = 2.
        table_3: throughput for K = 2, 4, 8 divided by that of K = 2; M = 32.
    """

    unit: int
    device_memory: str
    grow: str
    columns: tuple[Largest, ...]
    model_2: registry.Model
    model_3: registry.Model
    table_2: dict[int, tuple[float, float, float]]
    table_3: tuple[float, float, float]


FAMILIES = {
    "AmoebaNet-D": Family(
        10**9,
        "8GB",
        "filters",
        (
            Largest("Naive-1", imagenet.AmoebaNetD18x208, "82M", 1.05, 6.26),
            Largest("Pipeline-1", imagenet.AmoebaNetD18x416, "318M", 3.8, 3.46),
            Largest("Pipeline-2", imagenet.AmoebaNetD18x544, "542M", 6.45, 8.11),
            Largest("Pipeline-4", imagenet.AmoebaNetD36x544, "1.05B", 12.53, 15.21),
            Largest("Pipeline-8", imagenet.AmoebaNetD72x512, "1.8B", 24.62, 26.24),
        ),
        imagenet.AmoebaNetD18x256(),
        imagenet.AmoebaNetD18x128(),
        {1: (1.0, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
        (1.0, 1.7, 2.7),
    ),
    "Transformer": Family(
        GIB,
        "16GiB",
        "num_layers",
        (
            Largest("Naive-1", transformer.L3, "282.2M", 3.15, 11.7),
            Largest("Pipeline-1", transformer.L13, "785.8M", 8.8, 6.4),
            Largest("Pipeline-8", transformer.L103, "5.3B", 59.5, 50.9),
            Largest("Pipeline-32", transformer.L415, "21.0B", 235.1, 199.9),
            Largest("Pipeline-128", transformer.L1663, "83.9B", 937.9, 796.1),
        ),
        transformer.L103().resized("num_layers", 48),
        transformer.L103().resized("num_layers", 24),
        {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
        (1.0, 1.8, 3.3),
    ),
}


def speed(
    recipe: registry.Model,
    K: int,
    M: int,
    bandwidth: str | None = None,
    *,
    is_table_3: bool = False,
) -> float:
    """Return how much faster than on one device a planned step with full recomputation is.

    The paper states neither the mini-batches nor the width of the Transformers of Tables 2 and 3:
    here they are those of Table 1. Table 3 is about GPUs without bfloat16, so its models compute in
    float32.

    Args:
        recipe: the model.
        K: number of partitions.
        M: number of micro-batches.
        bandwidth: of the links, as text; None: links take no time.
        is_table_3: whether it is a model of Table 3.
    """
    task = recipe.task()
    task.model.set(num_partitions=K, num_micro_batches=M, fuse=False)
    if is_table_3:
        task.model.dtype = None
    cluster = None
    if bandwidth is not None:
        cluster = hosts.parse(f"1x{K},flops={P100_FLOPS},within={bandwidth}")
    plan = step_plan.make(task.model, describe.fields_of(task), cluster=cluster)
    return sum(plan.timeline.busy_s) / plan.timeline.makespan_s


def table_1(family: Family) -> list[list[str]]:
    """Return rows of text with a column for each model; a head first."""
    unit = "GiB" if family.unit == GIB else "GB"
    names = ["", "parameters: paper", "plan", f"12 bytes each, {unit}: paper", "plan"]
    names += [f"peak activations, {unit}: paper", "plan", "fullest device, GiB"]
    names += [f"largest {family.grow} in {family.device_memory}", "its parameters"]
    columns = [names, *(_column_1(family, column) for column in family.columns)]
    return [list(row) for row in zip(*columns, strict=True)]


def _column_1(family: Family, column: Largest) -> list[str]:
    def resized(value: int) -> Task.Params:
        return column.recipe().resized(family.grow, value).task()

    task = column.recipe().task()
    plan = step_plan.make_for(task)
    limit_bytes = units.parse_size(family.device_memory)
    member = largest.find(resized, task.model.num_partitions, limit_bytes)
    fits = ["none", "-"]
    if member.value is not None and member.plan is not None:
        fits = [str(member.value), units.count(member.plan.parameters)]
    activation_bytes = sum(cell.activation_bytes for cell in plan.cells)
    return [
        column.column,
        column.parameters,
        units.count(plan.parameters),
        f"{column.parameter_memory:.2f}",
        f"{12 * plan.parameters / family.unit:.2f}",
        f"{column.activation_memory:.2f}",
        f"{activation_bytes / family.unit:.2f}",
        f"{plan.heaviest_bytes / GIB:.1f}",
        *fits,
    ]


def table_2(family: Family) -> list[list[str]]:
    """Return rows of text, one for each M and K; a head first."""
    rows = [["M", "K", "paper", "simulated"]]
    first = speed(family.model_2, 2, 1)
    for M, printed in family.table_2.items():
        for K, of_paper in zip(PARTITIONS, printed, strict=True):
            ours = speed(family.model_2, K, M) / first
            rows.append([str(M), str(K), f"{of_paper:.2f}", f"{ours:.2f}"])
    return rows


def table_3(family: Family) -> list[list[str]]:
    """Return rows of text: the paper's, then one for each bandwidth; a head first."""
    rows = [["", *(f"K={K}" for K in PARTITIONS)]]
    rows.append(["paper", *(f"{of_paper:.2f}" for of_paper in family.table_3)])
    for bandwidth in BANDWIDTHS:
        speeds = [speed(family.model_3, K, 32, bandwidth, is_table_3=True) for K in PARTITIONS]
        title = "free links" if bandwidth is None else f"{bandwidth}/s"
        rows.append([title, *(f"{each / speeds[0]:.2f}" for each in speeds)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    tables = {"1": table_1, "2": table_2, "3": table_3}
    for number in processes.parser(__doc__, list(tables)).parse_args(arguments).only:
        for name, family in FAMILIES.items():
            rows = tables[number](family)
            aligned = units.table(rows, "l" + "r" * (len(rows[0]) - 1))
            print(f"\nTable {number}, {name}", *aligned, sep="\n", flush=True)


if __name__ == "__main__":
    main()
