"""A model in words: its layers with shapes, parameters and FLOPs, and where it is cut.

Everything comes from params alone: no variable, no device, a model of any size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base

_NAME_WIDTH = 26
_KIND_WIDTH = 22
_OUTPUT_WIDTH = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Elements of a network's variables, tied ones once.

    Attributes:
        parameters: trained, and used by inference.
        auxiliary: trained, and used by training alone.
        frozen: weights that are not trained.
        statistics: such as a batch norm's moving mean.
    """

    parameters: int
    auxiliary: int
    frozen: int
    statistics: int


def counts(analysis: network.Analysis) -> Counts:
    """Count the elements of a network's variables."""
    totals = {field.name: 0 for field in dataclasses.fields(Counts)}
    for spec in analysis.variables.values():
        if spec.is_state:
            kind = "statistics"
        elif not spec.trainable:
            kind = "frozen"
        else:
            kind = "auxiliary" if spec.training_only else "parameters"
        totals[kind] += spec.size
    return Counts(**totals)


def fields_of(task: Any) -> dict[str, tf.TensorSpec]:
    """Return the specs of a training mini-batch of a `Task.Params`; no data is read."""
    specs: dict[str, tf.TensorSpec] = task.input.instantiate().element_spec(training=True)
    return specs


def describe(task: Any) -> str:
    """Describe the network of a `Task.Params`: see `describe_network`."""
    return describe_network(task.model, fields_of(task))


def describe_network(params: Any, fields: Mapping[str, Any]) -> str:
    """Describe a network: its layers by cell, shapes, parameters, FLOPs.

    Args:
        params: a `network.PipelineParams`, such as `PipeliningLayer.Params`.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.

    Returns:
        Lines; `parameters: 1234` stands alone on one of them (trained and used by inference, tied
        ones once), and auxiliary, frozen ones and statistics, where there are any, on their own.
        Equal layers in a row share a line, and what is inside equal ones is shown once.
    """
    analysis = network.analyze(params, fields)
    found = counts(analysis)
    lines = [*_head(params, analysis), "", *units.table(_rows(analysis), "lllrrr"), ""]
    lines.append(f"parameters: {found.parameters}")
    for name, number in (
        ("auxiliary parameters", found.auxiliary),
        ("frozen parameters", found.frozen),
        ("statistics", found.statistics),
    ):
        if number:
            lines.append(f"{name}: {number}")
    return "\n".join(lines)


def _head(params: Any, analysis: network.Analysis) -> Iterator[str]:
    for name, spec in analysis.fields.items():
        yield f"input {name}: {shape_text(spec)}"
    yield (
        f"{sum(analysis.sizes)} examples in {len(analysis.sizes)} micro-batches of "
        f"{sizes_text(analysis.sizes)}; K={analysis.table.num_devices}, "
        f"schedule {schedule_text(params)}, recompute {params.recompute}"
    )
    yield "Outputs and FLOPs are those of one micro-batch; float32 where nothing else is said."


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the sizes of micro-batches: `8`, or `3 or 2` where they differ."""
    return " or ".join(str(size) for size in sorted(set(sizes), reverse=True))


def schedule_text(params: Any) -> str:
    """Return how a network's schedule is called; a table's own text is not repeated."""
    text: str = params.schedule
    return "written by hand" if "," in text or "\n" in text else text


def _rows(analysis: network.Analysis) -> Iterator[tuple[str, ...]]:
    yield "", "", "output", "parameters", "forward", "backward"
    costs = cell_costs(analysis)
    forms = _Forms(analysis)
    shown: set[Any] = set()
    for k, route in enumerate(analysis.cells):
        layers = [analysis.layers[n] for n in route.layers]
        yield (
            f"cell {k}",
            f"{len(layers)} layers" if len(layers) > 1 else "1 layer",
            f"{units.percent(costs[k] / (sum(costs) or 1.0))} of the cost",
            f"{sum(_own_size(info.meta) for info in layers):,}",
            units.count(sum(info.meta.flops_forward for info in layers)),
            units.count(sum(info.meta.flops_backward for info in layers)),
        )
        for form, same in itertools.groupby(route.layers, key=forms.of):
            yield from _run_rows(analysis, list(same), inside=form not in shown)
            shown.add(form)


def cell_costs(analysis: network.Analysis) -> list[float]:
    """Return each cell's cost of one micro-batch, as the partition saw it."""
    return [cell.cost for cell in analysis.cells]


def _run_rows(
    analysis: network.Analysis, same: Sequence[int], *, inside: bool
) -> Iterator[tuple[str, ...]]:
    """Yield the row of equal layers in a row, and those of what is inside each of them."""
    first = analysis.layers[same[0]]
    name, kind = first.name, base.class_name(first.params)
    if len(same) > 1:
        last = analysis.layers[same[-1]].name
        stem = last.rstrip("0123456789")
        name += f" … {last.removeprefix(stem) if name.startswith(stem.rstrip('_')) else last}"
        kind = f"{len(same)} × {kind}"
    yield _row(name, kind, first.meta, 1, len(same))
    for note in _notes(analysis, same[0]):
        yield (f"    {note}",)
    if inside:
        yield from _children_rows(first.meta, 2)


def _children_rows(meta: base.Meta, depth: int) -> Iterator[tuple[str, ...]]:
    for child in meta.children:
        yield _row(child.name, child.kind, child, depth)
        yield from _children_rows(child, depth + 1)


def _row(name: str, kind: str, meta: base.Meta, depth: int, times: int = 1) -> tuple[str, ...]:
    return (
        units.shortened("  " * depth + name, _NAME_WIDTH),
        units.shortened(kind, _KIND_WIDTH),
        units.shortened(_leaves(meta.outputs), _OUTPUT_WIDTH),
        f"{times * _own_size(meta):,}",
        units.count(times * meta.flops_forward),
        units.count(times * meta.flops_backward),
    )


def _own_size(meta: base.Meta) -> int:
    return sum(v.size for v in meta.variables if not v.is_state and v.tie is None)


def _notes(analysis: network.Analysis, layer: int) -> Iterator[str]:
    info = analysis.layers[layer]
    weights = [v for v in info.meta.variables if not v.is_state]
    if weights and all(v.training_only for v in weights):
        yield "used by training only"
    trained = len(analysis.trainable(layer))
    if trained < len({info.paths[v.path] for v in weights}):
        yield "partly frozen" if trained else "frozen"
    for v in weights:
        if v.tie is not None:
            yield f"{v.path} is tied to {v.tie}"


class _Forms:
    """Tells what two layers must share to stand on one line."""

    def __init__(self, analysis: network.Analysis) -> None:
        self._analysis = analysis
        self._known: dict[int, Any] = {}

    def of(self, layer: int) -> tuple[Any, ...]:
        info = self._analysis.layers[layer]
        # Equal layers share one Meta: compared by what it says only where that is not so.
        if id(info.meta) not in self._known:
            self._known[id(info.meta)] = _inside(info.meta)
        told = self._known[id(info.meta)]
        return type(info.params), len(self._analysis.trainable(layer)), told


def _inside(meta: base.Meta) -> tuple[Any, ...]:
    return (
        meta.name,
        meta.kind,
        shape_text(meta.outputs),
        meta.flops_forward,
        meta.flops_backward,
        tuple((v.path, v.shape, v.training_only, v.tie) for v in meta.variables),
        tuple(_inside(child) for child in meta.children),
    )


def shape_text(specs: Any) -> str:
    """Return the shapes and dtypes of a nest of specs, leaves between commas."""
    return ", ".join(f"{spec.shape.as_list()} {spec.dtype.name}" for spec in tf.nest.flatten(specs))


def _leaves(specs: Any) -> str:
    """Return the shapes of a nest of specs, dtypes where they are not the usual one."""
    return ", ".join(
        f"{spec.shape.as_list()}" + ("" if spec.dtype == tf.float32 else f" {spec.dtype.name}")
        for spec in tf.nest.flatten(specs)
    )
