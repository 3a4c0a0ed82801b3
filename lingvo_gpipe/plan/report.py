"""A plan in words: what each device holds, what links carry, how long devices wait.

And the question the other way round: which member of a family of models still fits (`fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import describe, largest, memory_timeline, step_plan
from lingvo_gpipe.schedule import drawing

_WIDTH = 100


def plan(
    task: Any,
    *,
    fit: str | None = None,
    grow: str | None = None,
    profile: bool = False,
    partitions: int | None = None,
    rebuild: Callable[[str, int], Any] | None = None,
) -> str:
    """Plan the training of a `Task.Params` in words.

    Args:
        task: the task.
        fit: bytes of a device's memory, such as 8GiB: finds the largest value of `grow` whose
            every device fits, for each number of partitions.
        grow: dotted path of an integer field of the task; or what `rebuild` knows.
        profile: see `step_plan.make`.
        partitions: K, in place of the task's own; with `fit` the only one to try.
        rebuild: (name, value) → task with another value of an integer of its recipe, such as a
            number of layers that is no field of the task.

    Raises:
        UserError: the task does not fit together, or `fit` and `grow` are not both right.
    """
    if (fit is None) != (grow is None):
        missing = "--grow=FIELD" if grow is None else "--fit=8GiB"
        given = "--fit" if grow is None else "--grow"
        raise errors.ParamsError(f"{given} needs {missing}: which field grows, into which memory")
    if fit is None or grow is None:
        own = largest.cut(task, partitions)
        planned = step_plan.make_for(own, profile=profile)
        text = render(planned)
        if profile and own.model.cuts is None and not own.model.cells:
            text += (
                "\ncuts are by measured time, those of training by FLOPs unless it is given these: "
                f"--params_override='model.cuts={planned.analysis.cuts}'"
            )
        return text
    if profile:
        raise errors.ParamsError(
            "--profile runs one model and --fit looks at many. Leave one of the two out"
        )
    limit_bytes = units.parse_size(fit)
    family = largest.Family(task, grow, rebuild)
    counts = largest.PARTITIONS if partitions is None else (partitions,)
    found = [family.largest(k, limit_bytes) for k in counts]
    if all(one.refusal for one in found):
        raise errors.ParamsError(f"--grow={grow}: {found[0].refusal}")
    return render_fit(grow, limit_bytes, found)


def render(given: step_plan.Plan) -> str:
    """Return a plan as lines of at most 100 columns."""
    lines = [*_head(given), "", *_partitions(given), *_memory(given), "", *_links(given), ""]
    waiting = units.percent(given.bubble_share)
    step = f" of {given.timeline.makespan_s:.3g} s" if given.profiled else ""
    lines.append(f"bubble: devices wait {waiting} of the step{step}, links taken as free")
    lines.append(drawing.grid(given.analysis.table, _WIDTH))
    return "\n".join(lines)


def _head(given: step_plan.Plan) -> Iterator[str]:
    analysis = given.analysis
    policies = _policies([cell.policy for cell in analysis.cells])
    yield (
        f"{units.count(given.parameters)} parameters in {len(analysis.layers)} layers; "
        f"K={analysis.table.num_devices}, {len(analysis.sizes)} micro-batches of "
        f"{describe.sizes_text(analysis.sizes)}, recompute {','.join(policies)}"
    )
    if given.profiled:
        some = any(cell.is_estimate for cell in given.partitions)
        least = ", ~ loops: by formula at least" if some else ""
        yield f"costs: measured on this machine; peak activations: traced programs{least}"
    else:
        yield "costs: FLOPs, or as stated; peak activations: estimate by formula (--profile traces)"
    yield f"cuts: {analysis.cuts}" if len(analysis.cuts) <= 16 else f"cuts: {len(analysis.cuts)}"


def _policies(policies: Sequence[str]) -> Sequence[str]:
    return policies[:1] if len(set(policies)) == 1 else policies


def _partitions(given: step_plan.Plan) -> list[str]:
    columns = {
        "weights": [cell.parameter_bytes for cell in given.partitions],
        "gradients": [cell.gradient_bytes for cell in given.partitions],
        "optimizer": [cell.slot_bytes for cell in given.partitions],
    }
    if any(cell.copy_bytes for cell in given.partitions):
        columns["copies"] = [cell.copy_bytes for cell in given.partitions]
    activations = "activations" if given.profiled else "~activations"
    columns[activations] = [cell.activation_bytes for cell in given.partitions]
    # In place of copies and activations, which are gone by then.
    if any(
        cell.update_bytes > cell.copy_bytes + cell.activation_bytes for cell in given.partitions
    ):
        columns["or update"] = [cell.update_bytes for cell in given.partitions]
    columns["total"] = [cell.total_bytes for cell in given.partitions]
    rows = [["cell", "n", "cost", *columns, "live", "layers"]]
    for k, cell in enumerate(given.partitions):
        sizes = {name: units.size(sizes[k]) for name, sizes in columns.items()}
        if given.profiled and cell.is_estimate:
            sizes[activations] = "~" + sizes[activations]
        rows.append(
            [
                str(k),
                str(len(cell.layers)),
                units.percent(cell.cost_share),
                *sizes.values(),
                str(cell.live_micro_batches),
                _layers_text(cell.layers),
            ]
        )
    align = "rrr" + "r" * (len(rows[0]) - 4) + "l"
    lines = units.table(rows, align)
    if max(map(len, lines)) <= _WIDTH:
        return lines
    # Names in full are worth a line of their own.
    lines = units.table([row[:-1] for row in rows], align[:-1])
    return [*lines, "", *(f"cell {row[0]}: {row[-1]}" for row in rows[1:])]


def _layers_text(names: Sequence[str]) -> str:
    """Return first … last, shortened only where a line of their own is too narrow."""
    room = _WIDTH - len("cell 999: ")
    if len(names) == 1:
        return units.shortened(names[0], room)
    half = (room - len(" … ")) // 2
    return f"{units.shortened(names[0], half)} … {units.shortened(names[-1], half)}"


def _memory(given: step_plan.Plan) -> Iterator[str]:
    if len(given.partitions) > 1:
        yield (
            f"all devices together, where they share one memory: at most "
            f"{units.size(given.together_bytes)} at once"
        )
    limit = given.device_memory
    if limit is not None:
        over = given.heaviest_bytes - units.parse_size(limit)
        fits = "every device stays within it"
        if over > 0:
            fits = (
                f"the heaviest device needs {units.size(over)} more than that. Set it lower by "
                "so much, or use more partitions or micro-batches"
            )
        yield f"device_memory {limit}: {fits}"


def _links(given: step_plan.Plan) -> list[str]:
    rows = [["link, per step", "forward", "back", ""]]
    for link in given.links:
        source = "input" if link.source == memory_timeline.INPUT else f"cell {link.source}"
        names = ", ".join(dict.fromkeys(link.names))
        rows.append(
            [
                f"{source} → cell {link.target}",
                units.size(link.forward_bytes),
                units.size(link.backward_bytes),
                units.shortened(names, 60),
            ]
        )
    return units.table(rows, "lrrl")


def render_fit(grow: str, limit_bytes: int, found: Sequence[largest.Fitted]) -> str:
    """Return what `fit` found, a line per number of partitions."""
    lines = [f"largest {grow} whose every device stays within {units.size(limit_bytes)}", ""]
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
    for one in found:
        if one.plan is None or one.value is None:
            least = "" if one.plan is None else units.size(one.plan.heaviest_bytes)
            answer = "none" if one.refusal else "none fits"
            rows.append((str(one.num_partitions), answer, "", "", "", "", least, ""))
            continue
        cells = one.plan.partitions
        rows.append(
            (
                str(one.num_partitions),
                f"{'' if one.is_largest else '≥ '}{one.value}",
                units.count(one.plan.parameters),
                str(len(one.plan.analysis.layers)),
                units.size(sum(cell.parameter_bytes for cell in cells)),
                units.size(max(cell.activation_bytes for cell in cells)),
                units.size(one.plan.heaviest_bytes),
                units.percent(one.plan.bubble_share),
            )
        )
    lines += units.table(rows, "rrrrrrrr")
    lines += ["", "weights: of all devices; activations: peak of the device with most, by formula"]
    lines += [f"K={one.num_partitions}: {one.refusal}" for one in found if one.refusal]
    return "\n".join(lines)
