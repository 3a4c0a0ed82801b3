"""The text of a plan: what each device holds, what links carry, how long devices wait.

Also that of a search for the largest member of a family of models that fits a memory.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.network.traffic.exchange import Sent
from lingvo_gpipe.network.traffic.links import INPUT
from lingvo_gpipe.plan import (
    auto,
    describe,
    hosts,
    largest,
    more_devices,
    owner_balance,
    slicing,
    step_plan,
)
from lingvo_gpipe.schedule import drawing
from lingvo_gpipe.task import Task

_WIDTH = 100
_MAX_LISTED_CUTS = 16
_MAX_ROWS = 8  # of replicas and of their links; and of devices in a line


def plan(
    task: Task.Params,
    *,
    fit: str | None = None,
    grow: str | None = None,
    profile: bool = False,
    cluster: str | None = None,
    partitions: int | None = None,
    rebuild: largest.Rebuild | None = None,
) -> str:
    """Return the text of the plan of a task's training.

    Args:
        task: the task.
        fit: bytes of a device's memory, such as 8GiB: finds, for each number of partitions, the
            largest value of `grow` with which every device stays within it.
        grow: dotted path of an integer field of the task, or a name that `rebuild` accepts.
        profile: see `step_plan.make`.
        cluster: hosts, as `hosts.parse` reads them; None: not known.
        partitions: K, in place of the task's; with `fit` the only one to try.
        rebuild: sets integers of the recipe that are not fields of the task.

    Raises:
        UserError: the task is not consistent, or only one of `fit` and `grow` is there.
    """
    if (fit is None) != (grow is None):
        missing = "--grow=FIELD" if grow is None else "--fit=8GiB"
        present = "--fit" if grow is None else "--grow"
        raise errors.ParamsError(f"{present} needs {missing}: which field grows, into which memory")
    if fit is None or grow is None:
        task = largest.with_partitions(task, partitions)
        shape = None if cluster is None else hosts.parse(cluster)
        limits = [shape.memory if shape else None, _device_memory(task)]
        limit_bytes = min(filter(None, limits), default=None)
        chosen: list[str] = []
        is_auto = task.model.schedule == schedule.AUTO
        # What auto chooses fits, so that no layer is too large.
        sliced = None if is_auto else _advice(task, limit_bytes)
        try:
            task = auto.resolved(task, chosen.append, profile=profile, cluster=shape)
            planned = step_plan.make_for(task, profile=profile, cluster=shape)
            if profile:
                planned = step_plan.with_update(planned, task)
        except errors.PartitionError as error:
            if is_auto:
                sliced = _advice(auto.smallest(task), limit_bytes)
            raise error if sliced is None else errors.PartitionError(str(sliced)) from error
        note = sliced or owner_balance.advice(task)
        text = "\n".join(
            [
                *(f"{text}\n" for text in chosen),
                render(planned),
                "",
                *([] if note is None else [f"{note}\n"]),
                *more_devices.lines(task, shape, limit_bytes),
            ]
        )
        if profile and task.model.cuts is None and not task.model.cells:
            text += (
                "\nthese cuts are by measured time; for training, which cuts by FLOPs, set them: "
                f"--params_override='model.cuts={planned.analysis.cuts}'"
            )
        return text
    if task.model.schedule == schedule.AUTO:
        raise errors.ParamsError(
            "--fit compares many models, --schedule=auto many schedules of one. Name a schedule"
        )
    if profile:
        raise errors.ParamsError(
            "--profile runs one model, --fit compares many. Leave one of the two out"
        )
    limit_bytes = units.parse_size(fit)
    family = largest.Family(task, grow, rebuild)
    counts = largest.PARTITIONS if partitions is None else (partitions,)
    members = [family.largest(k, limit_bytes) for k in counts]
    if all(member.refusal and member.value is None for member in members):
        raise errors.ParamsError(f"--grow={grow}: {members[0].refusal}")
    return render_largest(grow, limit_bytes, members)


def _advice(task: Task.Params, limit_bytes: int | None) -> slicing.Advice | None:
    return None if limit_bytes is None else slicing.advice(task, limit_bytes)


def _device_memory(task: Task.Params) -> int | None:
    limit = task.model.device_memory
    return None if limit is None else units.parse_size(limit)


def render(plan: step_plan.Plan) -> str:
    """Return a plan as lines of at most 100 columns."""
    lines = [*_head(plan), "", *_partitions(plan), *_memory(plan), "", *_links(plan), ""]
    if plan.cluster is not None and plan.order is not None:
        lines += [
            *hosts.lines(
                plan.cluster,
                plan.order,
                plan.analysis,
                plan.links,
                plan.device_bytes,
                plan.exchange,
                reads_on_worker=plan.reads_on_worker,
            ),
            "",
        ]
    waiting = units.percent(plan.bubble_share)
    step = f" of {plan.timeline.makespan_s:.3g} s" if plan.in_seconds else ""
    lines.append(
        f"bubble: devices wait {waiting} of the step{step}, {more_devices.links_text(plan)}"
    )
    if plan.step_s > plan.timeline.makespan_s:
        share = units.percent(1.0 - plan.timeline.makespan_s / plan.step_s)
        lines.append(
            f"step with what replicas send each other: at most {plan.step_s:.3g} s, {share} of it "
            "for that"
        )
    if plan.update_s is not None:
        lines.append(
            f"call of the step, and update where devices own most weights: {plan.update_s:.3g} s"
        )
    lines.append(drawing.grid(plan.analysis.table, _WIDTH))
    return "\n".join(lines)


def _head(plan: step_plan.Plan) -> Iterator[str]:
    analysis = plan.analysis
    policies = _policies([cell.recompute_policy for cell in analysis.cells])
    replicas = f"R={plan.num_replicas} replicas of " if plan.num_replicas > 1 else ""
    yield (
        f"{units.count(plan.parameters)} parameters in {len(analysis.layers)} layers; "
        f"{replicas}{describe.devices_text(analysis.table)}, "
        f"{units.things(len(analysis.sizes), 'micro-batch')} of "
        f"{describe.sizes_text(analysis.sizes)}, recompute {','.join(policies)}"
    )
    if plan.num_groups > 1:
        yield describe.groups_text(plan.num_groups)
    if plan.profiled:
        some = any(cell.is_estimate for cell in plan.cells)
        least = ", ~ where loops count by formula" if some else ""
        yield f"costs: measured on this machine; peak activations: traced programs{least}"
    else:
        yield "costs: FLOPs, or as stated; peak activations: estimate by formula (--profile traces)"
    yield f"cuts: {_cuts(analysis.cuts)}"


def _cuts(cuts: Sequence[int]) -> str:
    """Return the number of layers of each cell, or that of cells where there are many."""
    if len(cuts) <= _MAX_LISTED_CUTS:
        return str(tuple(cuts))
    least, most = min(cuts), max(cuts)
    layers = units.things(least, "layer") if least == most else f"{least} to {most} layers"
    return f"{len(cuts)} cells of {layers}"


def _policies(policies: Sequence[str]) -> Sequence[str]:
    return policies[:1] if len(set(policies)) == 1 else policies


def _partitions(plan: step_plan.Plan) -> list[str]:
    columns = {
        "weights": [cell.parameter_bytes for cell in plan.cells],
        "gradients": [cell.gradient_bytes for cell in plan.cells],
        "optimizer": [cell.slot_bytes for cell in plan.cells],
    }
    if any(cell.copy_bytes for cell in plan.cells):
        columns["copies"] = [cell.copy_bytes for cell in plan.cells]
    activations = "activations" if plan.profiled else "~activations"
    columns[activations] = [cell.activation_bytes for cell in plan.cells]
    # An update comes after copies and activations are freed.
    if any(cell.update_bytes > cell.copy_bytes + cell.activation_bytes for cell in plan.cells):
        columns["or update"] = [cell.update_bytes for cell in plan.cells]
    columns["total"] = [cell.total_bytes for cell in plan.cells]
    table = plan.analysis.table
    shared = table.num_cells > table.num_devices
    rows = [["cell", *["device"][:shared], "n", "cost", *columns, "live", "layers"]]
    for k, cell in enumerate(plan.cells):
        sizes = {name: units.size(sizes[k]) for name, sizes in columns.items()}
        if plan.profiled and cell.is_estimate:
            sizes[activations] = "~" + sizes[activations]
        rows.append(
            [
                str(k),
                *[str(table.device_of(k))][:shared],
                str(len(cell.layers)),
                units.percent(cell.cost_share),
                *sizes.values(),
                str(cell.live_micro_batches),
                _layers_text(cell.layers),
            ]
        )
    align = "r" * (len(rows[0]) - 1) + "l"
    lines = units.table(rows, align)
    if max(map(len, lines)) <= _WIDTH:
        return lines
    # Full names get lines of their own.
    lines = units.table([row[:-1] for row in rows], align[:-1])
    return [*lines, "", *(f"cell {row[0]}: {row[-1]}" for row in rows[1:])]


def _layers_text(names: Sequence[str]) -> str:
    """Return first … last, shortened only if they do not fit on a line of their own."""
    room = _WIDTH - len("cell 999: ")
    if len(names) == 1:
        return units.shortened(names[0], room)
    half = (room - len(" … ")) // 2
    return f"{units.shortened(names[0], half)} … {units.shortened(names[-1], half)}"


def _memory(plan: step_plan.Plan) -> Iterator[str]:
    devices, num_devices = plan.device_bytes, plan.analysis.table.num_devices
    if len(plan.cells) > num_devices and plan.num_replicas == 1:
        yield f"devices with all their cells, activations counted once: {_sizes(devices)}"
    if len(plan.cells) > 1 and plan.num_replicas == 1:
        yield (
            f"all devices together, where they share one memory: at most "
            f"{units.size(plan.together_bytes)} at once"
        )
    if plan.num_replicas > 1:
        most = units.size(plan.heaviest_bytes)
        yield f"cells: in the replica that needs most for one; the heaviest device needs {most}:"
        yield from _replicas(devices, plan.num_replicas)
    limit = plan.analysis.params.device_memory
    if limit is not None:
        over = plan.heaviest_bytes - units.parse_size(limit)
        fits = "every device stays within it"
        if over > 0:
            fits = (
                f"the heaviest device needs {units.size(over)} more than that. Lower it by as "
                "much, or use more partitions or micro-batches"
            )
        yield f"device_memory {limit}: {fits}"


def _replicas(devices: Sequence[int], num_replicas: int) -> Iterator[str]:
    """Yield the bytes of each replica's devices; replicas that need as much share a line."""
    num_devices = len(devices) // num_replicas
    sizes = [_sizes(devices[r * num_devices : (r + 1) * num_devices]) for r in range(num_replicas)]
    groups = [(text, len(list(same))) for text, same in itertools.groupby(sizes)]
    first = 0
    for text, count in groups[:_MAX_ROWS]:
        name = f"replica {first}" if count == 1 else f"replicas {first} to {first + count - 1}"
        yield f"  {name}: {text}"
        first += count
    if first < num_replicas:
        rest = devices[first * num_devices :]
        yield f"  the others: {units.size(min(rest))} to {units.size(max(rest))} a device"


def _sizes(devices: Sequence[int]) -> str:
    return ", ".join(map(units.size, devices[:_MAX_ROWS])) + ", …" * (len(devices) > _MAX_ROWS)


def _links(plan: step_plan.Plan) -> list[str]:
    rows = [["link, per step", "forward", "back", ""]]
    for link in plan.links:
        source = "input" if link.source == INPUT else f"cell {link.source}"
        names = ", ".join(dict.fromkeys(link.names))
        rows.append(
            [
                f"{source} → cell {link.target}",
                units.size(link.forward_bytes),
                units.size(link.backward_bytes),
                units.shortened(names, 60),
            ]
        )
    return [*units.table(rows, "lrrl"), *_exchanged(plan)]


def _by_link(exchanged: Iterable[Sent]) -> collections.Counter[tuple[int, int]]:
    """Return (from, to) → bytes."""
    sizes: collections.Counter[tuple[int, int]] = collections.Counter()
    for sent in exchanged:
        sizes[sent.source, sent.target] += sent.size
    return sizes


def _exchanged(plan: step_plan.Plan) -> Iterator[str]:
    """Yield what replicas send each other: a table, unless hosts list their links."""
    if plan.num_replicas == 1:
        return
    mean = units.size(plan.exchange.sent_bytes)
    yield ""
    yield f"each replica sends {mean} of weights and gradients a step, on average"
    if plan.cluster is not None:
        return
    weights, gradients = map(_by_link, (plan.exchange.weights(), plan.exchange.gradients()))
    ends = sorted(weights | gradients, key=lambda ends: (-weights[ends] - gradients[ends], ends))
    rows = [["link of replicas, per step", "weights", "gradients"]]
    for source, target in sorted(ends[:_MAX_ROWS]):
        link = source, target
        rows.append(
            [
                f"device {source} → device {target}",
                units.size(weights[link]),
                units.size(gradients[link]),
            ]
        )
    yield from units.table(rows, "lrr")
    if len(ends) > _MAX_ROWS:
        yield f"and {len(ends) - _MAX_ROWS} more, of no more"


def render_largest(grow: str, limit_bytes: int, members: Sequence[largest.LargestMember]) -> str:
    """Return a table of the largest members, a row per number of partitions."""
    planned = [member.plan for member in members if member.plan is not None]
    replicas = f", R={planned[0].num_replicas}" if planned and planned[0].num_replicas > 1 else ""
    within = f"whose every device stays within {units.size(limit_bytes)}"
    lines = [f"largest {grow} {within}{replicas}", ""]
    head = (
        "K",
        grow,
        "parameters",
        "layers",
        "weights",
        "~activations",
        "heaviest device",
        "bubble",
    )
    rows: list[tuple[str, ...]] = [head]
    for member in members:
        if member.plan is None or member.value is None:
            least = "" if member.plan is None else units.size(member.plan.heaviest_bytes)
            answer = "none" if member.refusal else "none fits"
            rows.append((str(member.num_partitions), answer, "", "", "", "", least, ""))
            continue
        variables = member.plan.analysis.variables.values()
        rows.append(
            (
                str(member.num_partitions),
                f"{'' if member.is_largest else '≥ '}{member.value}",
                units.count(member.plan.parameters),
                str(len(member.plan.analysis.layers)),
                units.size(sum(spec.size_bytes for spec in variables)),
                units.size(max(cell.activation_bytes for cell in member.plan.cells)),
                units.size(member.plan.heaviest_bytes),
                units.percent(member.plan.bubble_share),
            )
        )
    lines += units.table(rows, "rrrrrrrr")
    lines += ["", "weights: of all devices; activations: peak of the device with most, by formula"]
    for member in members:
        if member.refusal:
            lines.append(f"K={member.num_partitions}: {member.refusal}")
    return "\n".join(lines)
