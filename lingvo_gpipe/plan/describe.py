"""Summary of a model: its layers with shapes, parameters and FLOPs, and where it is cut.

It comes from the Params only. No variable is created, so a model may have any size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import nests, network
from lingvo_gpipe.console import units
from lingvo_gpipe.input import Input
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.schedule import Table
from lingvo_gpipe.task import Task

_NAME_WIDTH = 26
_KIND_WIDTH = 22
_OUTPUT_WIDTH = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Number of elements of a network's variables; tied ones count once.

    Attributes:
        parameters: trained, and used by inference.
        auxiliary: trained, and used by training only.
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


def fields_of(task: Task.Params) -> dict[str, tf.TensorSpec]:
    """Return the specs of a training mini-batch of a task; no data is read."""
    source: Input = task.input.instantiate()
    return source.element_spec(training=True)


def describe(task: Task.Params) -> str:
    """Describe the network of a task: see `describe_network`."""
    return describe_network(task.model, fields_of(task))


def describe_network(params: network.PipelineParams, fields: Mapping[str, SpecNest]) -> str:
    """Describe a network: its layers by cell, shapes, parameters, FLOPs.

    Args:
        params: such as `PipeliningLayer.Params`.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.

    Returns:
        Lines. One of them is `parameters: 1234` (trained and used by inference, tied ones once);
        auxiliary parameters, frozen ones and statistics have lines of their own if there are any.
        Equal consecutive layers share a line, and their inner layers are shown once.
    """
    analysis = network.analyze(params, fields)
    titles = ("", "", "output", "parameters", "forward", "backward")
    columns = units.table([titles, *rows(analysis)], "lllrrr")
    return "\n".join([*heading(analysis), "", *columns, "", *totals(analysis)])


def totals(analysis: network.Analysis) -> Iterator[str]:
    """Yield the lines of a description with numbers of parameters."""
    elements = counts(analysis)
    yield f"parameters: {elements.parameters}"
    for name, number in (
        ("auxiliary parameters", elements.auxiliary),
        ("frozen parameters", elements.frozen),
        ("statistics", elements.statistics),
    ):
        if number:
            yield f"{name}: {number}"


def heading(analysis: network.Analysis) -> Iterator[str]:
    """Yield the first lines of a description: fields, micro-batches, devices, schedule."""
    for name, spec in analysis.fields.items():
        yield f"input {name}: {shape_text(spec)}"
    num_replicas = analysis.params.num_replicas
    replicas = f"R={num_replicas}, " if num_replicas > 1 else ""
    yield (
        f"{sum(analysis.sizes)} examples in {units.things(len(analysis.sizes), 'micro-batch')} of "
        f"{sizes_text(analysis.sizes)}; {replicas}{devices_text(analysis.table)}, "
        f"schedule {_schedule_text(analysis.params)}, recompute {analysis.params.recompute}"
    )
    yield "Outputs and FLOPs are those of one micro-batch; float32 where nothing else is said."


def devices_text(table: Table) -> str:
    """Return K and, where devices have several cells, V: `K=4, V=2`."""
    K, cells = table.num_devices, [table.device_of(k) for k in range(table.num_cells)]
    if len(cells) == K:
        return f"K={K}"
    per_device = {cells.count(device) for device in range(K)}
    return f"K={K}, V={per_device.pop()}" if len(per_device) == 1 else f"K={K}, {len(cells)} cells"


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the sizes of micro-batches: `8`, or `3 or 2` where they differ."""
    return " or ".join(str(size) for size in sorted(set(sizes), reverse=True))


def _schedule_text(params: network.PipelineParams) -> str:
    """Return the name of a network's schedule; the text of a table is not repeated."""
    text = params.schedule
    return "written by hand" if "," in text or "\n" in text else text


def rows(analysis: network.Analysis) -> Iterator[tuple[str, ...]]:
    """Yield cells and layers: name, kind, output, parameters, FLOPs forward and backward.

    A name is indented by its depth. A note about the layer before it is alone in its row.
    """
    total_cost = sum(cell.cost for cell in analysis.cells)
    metas = {id(info.meta): info.meta for info in analysis.layers}  # equal layers share one
    key_of_meta = {number: _meta_key(meta) for number, meta in metas.items()}
    shown: set[Hashable] = set()

    def key(n: int) -> Hashable:
        """Return a key that is the same for equal layers."""
        info = analysis.layers[n]
        return type(info.params), len(analysis.trainable(n)), key_of_meta[id(info.meta)]

    for cell in analysis.cells:
        layers = [analysis.layers[n] for n in cell.layers]
        yield (
            f"cell {cell.index}",
            f"{len(layers)} layers" if len(layers) > 1 else "1 layer",
            f"{units.percent(cell.cost / (total_cost or 1.0))} of the cost",
            f"{sum(_num_weights(info.meta) for info in layers):,}",
            units.count(sum(info.meta.flops_forward for info in layers)),
            units.count(sum(info.meta.flops_backward for info in layers)),
        )
        for alike, equal in itertools.groupby(cell.layers, key=key):
            yield from _equal_rows(analysis, list(equal), inside=alike not in shown)
            shown.add(alike)


def _equal_rows(
    analysis: network.Analysis, equal: Sequence[int], *, inside: bool
) -> Iterator[tuple[str, ...]]:
    """Yield the row of equal consecutive layers and, for `inside`, those of their inner layers."""
    first = analysis.layers[equal[0]]
    name, kind = first.name, base.class_name(first.params)
    if len(equal) > 1:
        last = analysis.layers[equal[-1]].name
        stem = last.rstrip("0123456789")
        name += f" … {last.removeprefix(stem) if name.startswith(stem.rstrip('_')) else last}"
        kind = f"{len(equal)} × {kind}"
    yield _row(name, kind, first.meta, 1, len(equal))
    for note in _notes(analysis, equal[0]):
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
        units.shortened(shape_text(meta.outputs, tf.float32), _OUTPUT_WIDTH),
        f"{times * _num_weights(meta):,}",
        units.count(times * meta.flops_forward),
        units.count(times * meta.flops_backward),
    )


def _num_weights(meta: base.Meta) -> int:
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


def _meta_key(meta: base.Meta) -> Hashable:
    return (
        meta.name,
        meta.kind,
        shape_text(meta.outputs),
        meta.flops_forward,
        meta.flops_backward,
        tuple((v.path, v.shape, v.training_only, v.tie) for v in meta.variables),
        tuple(_meta_key(child) for child in meta.children),
    )


def shape_text(specs: SpecNest, unnamed: tf.DType | None = None) -> str:
    """Return the shapes and dtypes of a nest of specs, leaves between commas.

    Args:
        specs: a nest of `tf.TensorSpec`.
        unnamed: the dtype that is left out.
    """
    return ", ".join(
        f"{spec.shape.as_list()}" + ("" if spec.dtype == unnamed else f" {spec.dtype.name}")
        for spec in nests.tensor_specs(specs)
    )
