"""The GPipe paper's Tables 1, 2 and 3 (Huang et al. 2019), with this library's figures beside them.

`python -m benchmarks.tables [--quick] [--pictures=FOLDER] [--only=1,2,3] [--profile]`.

- Table 1: parameters, their memory at 12 bytes each and peak activations of the paper's models by
  the plan, and the largest model by the plan that fits the same devices with everything that a step
  needs, gradients included. Units are the paper's: its figures at 12 bytes each are GB of 10⁹ bytes
  for AmoebaNet-D, and GiB for Transformers.
- Table 2: throughput for K = 2, 4, 8 and M = 1, 4, 32, in that of K = 2, M = 1. Our mini-batch is
  the same for all of them; the paper adjusted its own to the memory. Cells are those of the
  library's cut by FLOPs. "simulated" is their table by FLOPs, on devices without other costs;
  "waiting cells" is a real step of the executor, whose cells wait in proportion to these FLOPs
  (`benchmarks.support.waiting`). The unit is such that the step takes 0.8 s if all cells are equal,
  so that the mean cell waits at least 20 ms for a micro-batch. "of simulated" divides the time of
  the table, simulated from the waits as they were, by that of the step. With `--profile`, times of
  the layers on this machine count instead of FLOPs, for cut, table and waits: in float32, of a
  micro-batch of M = 32.
- Table 3: throughput for K = 2, 4, 8 and M = 32 in that of K = 2, simulated with links of some
  bandwidths between P100 (9.3 TFLOP/s in float32, the peak of the version for PCIe).

Table 2 is measured in interleaved rounds, each configuration in a process of its own; runs during
which other processes took more than 0.06 cores do not count, unless all were like that. Layers are
measured once; their runs are counted with the others. All else is derived, so that the
machine's load makes no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.support import machine, processes
from lingvo_gpipe.console import units

if TYPE_CHECKING:
    from benchmarks.support import paper_tables
    from lingvo_gpipe.plan import step_plan
    from lingvo_gpipe.plan.measured import profiling
    from lingvo_gpipe.task import Task

PARTITIONS = (2, 4, 8)
ROUNDS, QUICK_ROUNDS = 3, 1
STEP_S = 0.8
AIM = 0.97
P100_FLOPS = "9.3T"
# Free; 16 lanes of PCIe 3.0 of 8 GT/s, 128 bits in 130; a third of it; 10 Gbit/s.
BANDWIDTHS = (None, "15.75GB", "5.25GB", "1.25GB")

Speeds: TypeAlias = dict[tuple[str, int, int], float]
"""Family, K and M → throughput in that of K = 2, M = 1."""


def plan_of(
    family: str,
    table: int,
    K: int,
    M: int,
    bandwidth: str | None = None,
    times: Sequence[profiling.LayerTime] | None = None,
) -> step_plan.Plan:
    """Return the plan of a model of Table 2 or 3; with links, if their bandwidth is known.

    Args:
        family: a key of `paper_tables.FAMILIES`.
        table: 2 or 3.
        K: number of partitions.
        M: number of micro-batches.
        bandwidth: of the links, as text.
        times: of the layers; None: FLOPs.
    """
    from benchmarks.support import paper_tables
    from lingvo_gpipe.plan import describe, hosts, step_plan

    cluster = None
    if bandwidth is not None:
        cluster = hosts.parse(f"1x{K},flops={P100_FLOPS},within={bandwidth}")
    task = paper_tables.task_of(family, table, K, M)
    # Without an optimizer: it would begin TensorFlow before there are K devices.
    plan = step_plan.make(task.model, describe.fields_of(task), cluster=cluster)
    if times is None:
        return plan
    known = step_plan.Known(dict.fromkeys(plan.analysis.variables, 0), times)
    return step_plan.make(task.model, describe.fields_of(task), cluster=cluster, known=known)


def speed(plan: step_plan.Plan) -> float:
    """Return how much faster than on one device a planned step is."""
    whole = sum(cell.forward_s + cell.backward_s for cell in plan.cells)
    return float(whole * len(plan.analysis.sizes) / plan.timeline.makespan_s)


def configured(configuration: str) -> step_plan.Plan:
    """Return the plan of `family,K,M`, or of `family,K,M,FILE` with times of layers."""
    from lingvo_gpipe.plan.measured import profiling

    family, K, M, *file = configuration.split(",")
    times = None
    if file:
        rows = json.loads(Path(file[0]).read_text(encoding="utf-8"))
        times = [profiling.LayerTime(*row) for row in rows]
    return plan_of(family, 2, int(K), int(M), times=times)


def layer_times(family: str) -> dict[str, Any]:
    """Return the times of the layers of a family's model of Table 2, on this machine."""
    from benchmarks.support import paper_tables
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import describe
    from lingvo_gpipe.plan.measured import profiling

    task = paper_tables.task_of(family, 2, 1, max(paper_tables.FAMILIES[family].table_2))
    task.model.dtype = None
    placement.prepare_logical_cpus(1)
    placement.prepare_threads(1, 1)
    times = profiling.layer_times(task.model, describe.fields_of(task), runs=3, warm_up=1)
    return {"times": [dataclasses.astuple(time) for time in times]}


def waits(plan: step_plan.Plan) -> list[tuple[float, float]]:
    """Return seconds of forward and backward of each cell, in proportion to the plan's."""
    mean = statistics.fmean(cell.forward_s + cell.backward_s for cell in plan.cells)
    unit_s = STEP_S / (len(plan.analysis.sizes) + len(plan.cells) - 1) / mean
    return [(unit_s * cell.forward_s, unit_s * cell.backward_s) for cell in plan.cells]


def measure(configuration: str) -> dict[str, Any]:
    """Return the figures of a plan: those of waiting cells, and how much faster than one device.

    Args:
        configuration: what `configured` reads; or `times,family`, for `layer_times`.
    """
    from benchmarks.support import waiting

    if configuration.startswith("times,"):
        return layer_times(configuration.partition(",")[2])
    plan = configured(configuration)
    cells, count = waits(plan), len(plan.analysis.sizes)
    found = waiting.measure_cells(
        [waiting.CellWaits(forward, back / 2, back / 2) for forward, back in cells],
        plan.analysis.params.schedule,
        count,
    )
    return {**found, "speed": sum(map(sum, cells)) * count / found["s"]}


def table_1() -> dict[str, list[list[str]]]:
    """Return rows of text for each family, one per model; a head first."""
    from benchmarks.support import paper_tables

    tables = {}
    for name, family in paper_tables.FAMILIES.items():
        unit = family.unit_name
        head = [
            "",
            "model",
            "parameters: paper",
            "parameters: plan",
            f"parameters at 12 bytes, {unit}: paper",
            f"parameters at 12 bytes, {unit}: plan",
            f"peak activations, {unit}: paper",
            f"peak activations, {unit}: plan",
            "fullest device, GiB",
            f"largest {family.grow} in {family.device_memory}",
            "its parameters",
        ]
        tables[name] = [head, *(_row_1(family, column) for column in family.columns)]
    return tables


def _row_1(family: paper_tables.Family, column: paper_tables.Largest) -> list[str]:
    """Return the row of a model of Table 1."""
    from benchmarks.support import paper_tables
    from lingvo_gpipe.plan import largest, step_plan

    def resized(name: str, value: int) -> Task.Params:
        return column.recipe().resized(name, value).task()

    task = column.recipe().task()
    plan = step_plan.make_for(task)
    member = largest.Family(task, family.grow, resized).largest(
        task.model.num_partitions, units.parse_size(family.device_memory)
    )
    fits = ["none", "-"]
    if member.value is not None and member.plan is not None:
        fits = [str(member.value), units.count(member.plan.parameters)]
    return [
        column.column,
        column.size,
        column.parameters,
        units.count(plan.parameters),
        f"{column.parameter_memory:.2f}",
        f"{12 * plan.parameters / family.unit:.2f}",
        f"{column.activation_memory:.2f}",
        f"{activation_bytes(plan) / family.unit:.2f}",
        f"{plan.heaviest_bytes / paper_tables.GIB:.1f}",
        *fits,
    ]


def activation_bytes(plan: step_plan.Plan) -> int:
    """Return the sum over devices, which have one cell each, of their peaks of activations."""
    return sum(cell.activation_bytes for cell in plan.cells)


def run_table_2(count: int, *, profile: bool) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Run Table 2; return `family,K,M` → what its runs printed, and → the simulated speed.

    Runs that measured layers are among the first, as `times,family`.

    Args:
        count: rounds.
        profile: whether layers are measured first; else FLOPs count.
    """
    from benchmarks.support import paper_tables

    with contextlib.ExitStack() as stack:
        files = dict.fromkeys(paper_tables.FAMILIES, "")
        measured: dict[str, list[Any]] = {}
        if profile:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for name in files:
                run = processes.run(["benchmarks.tables", f"times,{name}"])
                measured[f"times,{name}"] = [run]
                path = Path(folder) / f"{name}.json"
                path.write_text(json.dumps(run["times"]), encoding="utf-8")
                files[name] = f",{path}"
        whole = {name: name + files[name.partition(",")[0]] for name in configurations()}
        found = processes.rounds("benchmarks.tables", list(whole.values()), count)
        simulated = {name: speed(configured(full)) for name, full in whole.items()}
    return {name: found[full] for name, full in whole.items()} | measured, simulated


def table_2(
    found: Mapping[str, Sequence[Any]], simulated: Mapping[str, float]
) -> tuple[dict[str, list[list[str]]], Speeds]:
    """Return rows of text for each family, a head first, and the speeds of waiting cells.

    Args:
        found: what the runs of each configuration printed.
        simulated: speed of each configuration's table.
    """
    from benchmarks.support import paper_tables, processes

    tables: dict[str, list[list[str]]] = {}
    measured: Speeds = {}
    for name, family in paper_tables.FAMILIES.items():
        rows = [["M", "K", "paper", "simulated", "waiting cells", "of simulated", "spread"]]
        first = processes.median(processes.quiet(found[f"{name},2,1"]), "speed")
        for M, printed in family.table_2.items():
            for K, of_paper in zip(PARTITIONS, printed, strict=True):
                configuration = f"{name},{K},{M}"
                runs = processes.quiet(found[configuration])
                measured[name, K, M] = processes.median(runs, "speed") / first
                rows.append(
                    [
                        str(M),
                        str(K),
                        f"{of_paper:.2f}",
                        f"{simulated[configuration] / simulated[f'{name},2,1']:.2f}",
                        f"{measured[name, K, M]:.2f}",
                        f"{processes.median(runs, 'share'):.3f}",
                        processes.spread(runs, "share"),
                    ]
                )
        tables[name] = rows
    return tables, measured


def table_3() -> dict[str, dict[str, tuple[float, ...]]]:
    """Return, for each family, what a line is about → throughput for each K in that of K = 2."""
    from benchmarks.support import paper_tables

    found = {}
    for name, family in paper_tables.FAMILIES.items():
        lines: dict[str, tuple[float, ...]] = {"paper": family.table_3}
        for bandwidth in BANDWIDTHS:
            speeds = [speed(plan_of(name, 3, K, 32, bandwidth)) for K in PARTITIONS]
            title = "free links" if bandwidth is None else f"{bandwidth}/s"
            lines[title] = (1.0, speeds[1] / speeds[0], speeds[2] / speeds[0])
        found[name] = lines
    return found


def lines_of(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text with aligned columns; the first row is their head."""
    return "\n".join(units.table(rows, "l" + "r" * (len(rows[0]) - 1)))


def configurations() -> Iterator[str]:
    """Yield what `measure` is called with."""
    from benchmarks.support import paper_tables

    for name, family in paper_tables.FAMILIES.items():
        for M in family.table_2:
            for K in PARTITIONS:
                yield f"{name},{K},{M}"


def _options() -> argparse.Namespace:
    parser = processes.parser(__doc__)
    parser.add_argument("--pictures", type=Path, help="folder for PNG files; made if needed")
    parser.add_argument("--only", default="1,2,3", help="numbers of tables between commas")
    parser.add_argument("--profile", action="store_true", help="Table 2 by times of layers here")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := sorted(set(options.only) - {"1", "2", "3"}):
        parser.error(f"--only={unknown[0]}: the tables are 1, 2 and 3")
    if options.profile and "2" not in options.only:
        parser.error("--profile is for Table 2, which --only leaves out")
    if options.pictures is not None and options.pictures.is_file():
        parser.error(f"--pictures={options.pictures} is a file. Name a folder")
    return options


def main() -> None:
    """Print the tables, and draw them."""
    options = _options()
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    from benchmarks.support import paper_tables, table_pictures

    print(machine.describe())
    families = paper_tables.FAMILIES
    pictures: dict[str, bytes] = {}
    if "1" in options.only:
        print("\nTable 1: largest models, by the plan; the paper's two swapped values swapped back")
        for name, rows in table_1().items():
            print(f"\n{families[name].name}\n{lines_of([*zip(*rows, strict=True)])}")
            pictures[f"table_1_{name}.png"] = table_pictures.largest(families[name].name, rows)
    if "3" in options.only:
        print("\nTable 3: throughput in that of K=2, M=32, simulated with links of P100")
        found_3 = table_3()
        for name, found in found_3.items():
            rows = [["", *(f"K={K}" for K in PARTITIONS)]]
            rows += [[title, *(f"{x:.2f}" for x in speeds)] for title, speeds in found.items()]
            print(f"\n{families[name].table_3_name}\n{lines_of(rows)}")
        pictures["table_3.png"] = table_pictures.links(found_3)
    found_2, figure = None, "no step was run (--only has no 2)"
    if "2" in options.only:
        count = QUICK_ROUNDS if options.quick else ROUNDS
        by = "times of layers here" if options.profile else "FLOPs"
        print(f"\nTable 2: throughput in that of K=2, M=1, by {by}; rounds: {count}")
        found_2, simulated = run_table_2(count, profile=options.profile)
        tables, measured = table_2(found_2, simulated)
        for name, rows in tables.items():
            print(f"\n{families[name].table_2_name}\n{lines_of(rows)}")
        pictures["table_2.png"] = table_pictures.speeds(measured)
        least = min(
            processes.median(processes.quiet(found_2[name]), "share") for name in configurations()
        )
        figure = f"waiting cells, least share of the simulated speed {least:.3f}"
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for path, content in pictures.items():
            (options.pictures / path).write_bytes(content)
        print(f"pictures: {', '.join(pictures)} in {options.pictures}")
    processes.conclude("tables", figure, f"at least {AIM}", found_2)


if __name__ == "__main__":
    main()
