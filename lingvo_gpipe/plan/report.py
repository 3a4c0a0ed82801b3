"""The text of a plan: what each device holds, what links carry, how long devices wait.

Also that of a search for the largest member of a family of models that fits a memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.network.traffic import INPUT
from lingvo_gpipe.plan import auto, describe, hosts, largest, step_plan
from lingvo_gpipe.schedule import drawing
from lingvo_gpipe.task import Task

_WIDTH = 100
_MAX_LISTED = 16  # cuts and devices in a line


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
        cluster: hosts, as `hosts.parse` reads them; None: not known. Not read with `fit`.
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
        shape = None if cluster is None else hosts.parse(cluster)
        return _plan(largest.with_partitions(task, partitions), shape, profile=profile)
    if task.model.schedule == schedule.AUTO:
        raise errors.ParamsError(
            "--fit compares many models, --schedule=auto many schedules of one. Name a schedule"
        )
    if profile:
        raise errors.ParamsError(
            "--profile runs one model, --fit compares many. Leave one of the two out"
        )
    limit_bytes = units.parse_size(fit)
    member = largest.family(task, grow, rebuild)
    counts = largest.PARTITIONS if partitions is None else (partitions,)
    members = [largest.find(member, k, limit_bytes) for k in counts]
    if all(member.refusal for member in members):
        raise errors.ParamsError(f"--grow={grow}: {members[0].refusal}")
    return render_largest(grow, limit_bytes, members)


def _plan(task: Task.Params, cluster: hosts.Hosts | None, *, profile: bool) -> str:
    """Return the text of one plan."""
    lines: list[str] = []
    resolved = auto.resolved(task, lines.append, profile=profile, cluster=cluster)
    planned = step_plan.make_for(resolved, profile=profile, cluster=cluster)
    if profile:
        planned = step_plan.with_update(planned, resolved)
    lines += [render(planned), ""]
    if profile and resolved.model.cuts is None:
        lines.append(
            "these cuts are by measured time; for training, which cuts by FLOPs, set them: "
            f"--params_override='model.cuts={planned.analysis.cuts}'"
        )
    return "\n".join(lines).rstrip()


def render(plan: step_plan.Plan) -> str:
    """Return a plan as lines of at most 100 columns."""
    lines = [*_head(plan), "", *_cells(plan), *_memory(plan), "", *_links(plan), ""]
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
    step = f" of {plan.timeline.makespan_s:.3g} s" if plan.in_seconds else ""
    lines += [f"bubble: devices wait {units.percent(plan.bubble_share)} of the step{step}"]
    if plan.cluster is not None:
        lines.append(plan.links_text)
    if plan.step_s > plan.timeline.makespan_s:
        lines.append(f"step with what replicas send each other: at most {plan.step_s:.3g} s")
    if plan.update_s is not None:
        lines.append(
            f"call of the step, and update where devices own most weights: {plan.update_s:.3g} s"
        )
    lines.append(drawing.grid(plan.analysis.table, _WIDTH))
    return "\n".join(lines)


def _head(plan: step_plan.Plan) -> Iterator[str]:
    analysis = plan.analysis
    policies = dict.fromkeys(cell.recompute_policy for cell in analysis.cells)
    if len(policies) > 1:
        recompute = ",".join(cell.recompute_policy for cell in analysis.cells)
    else:
        (recompute,) = policies
    replicas = f"R={plan.num_replicas} replicas of " if plan.num_replicas > 1 else ""
    yield (
        f"{units.count(plan.parameters)} parameters in {len(analysis.layers)} layers; "
        f"{replicas}{describe.devices_text(analysis.table)}, "
        f"{units.things(len(analysis.sizes), 'micro-batch')} of "
        f"{describe.sizes_text(analysis.sizes)}, recompute {recompute}"
    )
    if plan.profiled:
        some = any(cell.is_estimate for cell in plan.cells)
        least = ", ~ where loops count by formula" if some else ""
        yield f"costs: measured on this machine; peak activations: traced programs{least}"
    else:
        yield "costs: FLOPs, or as stated; peak activations: estimate by formula (--profile traces)"
    cuts = analysis.cuts
    if len(cuts) <= _MAX_LISTED:
        yield f"cuts: {cuts}"
    else:
        layers = "1 layer" if max(cuts) == 1 else f"{min(cuts)} to {max(cuts)} layers"
        yield f"cuts: {len(cuts)} cells of {layers}"


def _cells(plan: step_plan.Plan) -> list[str]:
    """Return a table with a row for each cell."""
    activations = "activations" if plan.profiled else "~activations"
    columns = {
        "weights": [cell.parameter_bytes for cell in plan.cells],
        "gradients": [cell.gradient_bytes for cell in plan.cells],
        "optimizer": [cell.slot_bytes for cell in plan.cells],
        "copies": [cell.copy_bytes for cell in plan.cells],
        activations: [cell.activation_bytes for cell in plan.cells],
        # An update comes after copies and activations are freed.
        "or update": [cell.update_bytes for cell in plan.cells],
        "total": [cell.total_bytes for cell in plan.cells],
    }
    if not any(columns["copies"]):
        del columns["copies"]
    if all(cell.update_bytes <= cell.copy_bytes + cell.activation_bytes for cell in plan.cells):
        del columns["or update"]
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
    """Yield what the devices of all replicas need, and whether that fits."""
    devices, heaviest = plan.device_bytes, plan.heaviest_bytes
    if plan.num_replicas > 1:
        yield (
            f"cells: in the replica that needs most for one; a device needs "
            f"{units.size(min(devices))} to {units.size(heaviest)}"
        )
    elif len(plan.cells) > 1:
        if len(plan.cells) > len(devices):
            sizes = ", ".join(map(units.size, devices[:_MAX_LISTED]))
            more = ", …" * (len(devices) > _MAX_LISTED)
            yield f"devices with all their cells, activations counted once: {sizes}{more}"
        yield (
            f"all devices together, where they share one memory: at most "
            f"{units.size(plan.together_bytes)} at once"
        )
    limit = plan.analysis.params.device_memory
    if limit is not None:
        over = heaviest - units.parse_size(limit)
        fits = "every device stays within it"
        if over > 0:
            fits = (
                f"the heaviest device needs {units.size(over)} more than that. Lower it by as "
                "much, or use more partitions or micro-batches"
            )
        yield f"device_memory {limit}: {fits}"


def _links(plan: step_plan.Plan) -> Iterator[str]:
    """Yield a table of what cells send each other, and what replicas do."""
    has_hosts = plan.cluster is not None and plan.order is not None
    rows = [["link, per step", "forward", "back", *["over", "seconds"][: 2 * has_hosts], ""]]
    for link in plan.links:
        source = "input" if link.source == INPUT else f"cell {link.source}"
        over: list[str] = []
        if plan.cluster is not None and plan.order is not None:
            over = hosts.link_texts(plan.cluster, plan.order, plan.analysis, link)
        rows.append(
            [
                f"{source} → cell {link.target}",
                units.size(link.forward_bytes),
                units.size(link.backward_bytes),
                *over,
                units.shortened(", ".join(dict.fromkeys(link.names)), 60 - 25 * has_hosts),
            ]
        )
    yield from units.table(rows, "lrrlrl" if has_hosts else "lrrl")
    if plan.num_replicas > 1:
        mean = units.size(plan.exchange.sent_bytes)
        yield f"each replica sends {mean} of weights and gradients a step, on average"


def render_largest(grow: str, limit_bytes: int, members: Sequence[largest.LargestMember]) -> str:
    """Return a table of the largest members, a row per number of partitions."""
    planned = [member.plan for member in members if member.plan is not None]
    replicas = f", R={planned[0].num_replicas}" if planned and planned[0].num_replicas > 1 else ""
    within = f"whose every device stays within {units.size(limit_bytes)}"
    head = ["K", grow, "parameters", "layers", "weights", "~activations", "heaviest device"]
    rows = [[*head, "bubble"]]
    for member in members:
        plan = member.plan
        if plan is None or member.value is None:
            least = "" if plan is None else units.size(plan.heaviest_bytes)
            answer = "none" if member.refusal else "none fits"
            rows.append([str(member.num_partitions), answer, "", "", "", "", least, ""])
            continue
        weights = sum(spec.size_bytes for spec in plan.analysis.variables.values())
        rows.append(
            [
                str(member.num_partitions),
                f"{'' if member.is_largest else '≥ '}{member.value}",
                units.count(plan.parameters),
                str(len(plan.analysis.layers)),
                units.size(weights),
                units.size(max(cell.activation_bytes for cell in plan.cells)),
                units.size(plan.heaviest_bytes),
                units.percent(plan.bubble_share),
            ]
        )
    lines = [
        f"largest {grow} {within}{replicas}",
        "",
        *units.table(rows, "rrrrrrrr"),
        "",
        "weights: of all devices; activations: peak of the device with most, by formula",
    ]
    lines += [f"K={m.num_partitions}: {m.refusal}" for m in members if m.refusal]
    return "\n".join(lines)
