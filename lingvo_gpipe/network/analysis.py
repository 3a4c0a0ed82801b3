"""A network known from its params alone: metas, wiring, cuts, routes, variables by path.

No device and no variable: a model of any size is analysed in seconds. `plan`, `describe` and
PipeliningLayer read the same `Analysis`.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base, composition
from lingvo_gpipe.network import capacity, memory_formulas, micro_batches, partition
from lingvo_gpipe.network import wiring as stream
from lingvo_gpipe.schedule import recompute
from lingvo_gpipe.schedule.table import Slot, Table


class PipelineParams(hyperparams.Configurable.Params):
    """A sequence of layers, and how it is cut and run."""

    name: str = hyperparams.field("", "Name of the network in messages.")
    layers: list[base.Layer.Params] = hyperparams.field([], "The layers, in order.")
    cells: list[list[base.Layer.Params]] = hyperparams.field(
        [], "Ready cells, each a list of layers, in place of `layers` and `cuts`."
    )
    num_partitions: int = hyperparams.field(1, "K: devices, each with a cell, or as a table says.")
    num_micro_batches: int = hyperparams.field(1, "M: micro-batches per mini-batch.")
    micro_batch_size: int | None = hyperparams.field(
        None, "Examples per micro-batch, in place of their number; the last may be smaller."
    )
    schedule: str = hyperparams.field(
        "gpipe", "Name of a schedule (gpipe, 1f1b), or a table as text, or @file with one."
    )
    recompute: str = hyperparams.field(
        "full", "full, except_last or never; or one for each cell: full,full,never."
    )
    cuts: tuple[int, ...] | None = hyperparams.field(
        None, "Layers per cell; None: the heaviest cell as light as possible."
    )
    costs: tuple[float, ...] | None = hyperparams.field(
        None, "Cost per layer, measured for example; None: FLOPs, or what a layer states."
    )
    device_speeds: tuple[float, ...] = hyperparams.field(
        (), "How fast each device is beside the others, for an automatic cut; none: all alike."
    )
    link_cost_per_byte: float = hyperparams.field(
        0.0, "What an automatic cut takes a byte that it sends to cost both cells, in costs' unit."
    )
    device_memory: str | None = hyperparams.field(
        None,
        "Bytes of each device, such as 8GiB, that no cell of an automatic cut may exceed, "
        "activations by formula: leave room, and see what plan tells. None: any.",
    )
    slots_per_weight: float = hyperparams.field(
        2.0,
        "Optimizer slots and averages per weight that device_memory reckons with: Adam 2, "
        "momentum 1; averages 1 more, updates of several mini-batches 1 more.",
    )
    devices: tuple[str, ...] | None = hyperparams.field(
        None, "Names of the K devices; None: as `placement` finds them."
    )
    placement: str = hyperparams.field("auto", "auto, cpu, gpu or tpu.")
    batch_dim: int = hyperparams.field(0, "The dimension that counts examples.")
    unbatched: tuple[str, ...] = hyperparams.field(
        (), "Fields of the mini-batch without a batch dimension, sent whole."
    )
    outputs: tuple[str, ...] = hyperparams.field(
        (), "Names that leave the network; none: what the last layer writes."
    )
    frozen: tuple[str, ...] = hyperparams.field(
        (), "Glob patterns of variable paths that are not trained, such as stem/*."
    )
    dtype: str | None = hyperparams.field(None, "Precision policy; None is float32.")
    jit_compile: bool = hyperparams.field(False, "Compiles every cell program with XLA.")
    fuse: bool = hyperparams.field(
        True, "Fuses the last cell's forward and backward where they meet in the table."
    )
    seed: int = hyperparams.field(0, "Seed of the initial weights and of every random number.")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInfo:
    """A layer of the network, from its params alone.

    Attributes:
        name: unique in the network; the first part of all its paths.
        params: its own, named, with the network's precision policy.
        meta: for one micro-batch.
        paths: own variable path → path of the variable in the network (ties resolved).
    """

    name: str
    params: Any
    meta: base.Meta
    paths: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Everything about a network that needs no device.

    Attributes:
        layers: in order.
        variables: path → spec, tied ones once, by their owner.
        owner: path → index of the layer that owns the variable.
        wiring: of the stream.
        cuts: layers per cell.
        routes: per cell.
        specs: per version of the stream, its nest of specs for the largest micro-batch.
        table: the schedule for these shapes.
        sizes: examples of each micro-batch.
        policies: per cell, its recompute policy.
        costs: per cell, what each layer of the network costs if it lies in that cell: seconds or
            FLOPs of forward, recomputation and backward of one micro-batch.
        speeds: per cell, how fast its device is.
        flowing: per layer, whether any gradient of training flows into or through it.
        fields: the mini-batch's specs.
    """

    layers: tuple[LayerInfo, ...]
    variables: dict[str, base.VariableSpec]
    owner: dict[str, int]
    wiring: stream.Wiring
    cuts: tuple[int, ...]
    routes: tuple[stream.Route, ...]
    specs: tuple[Any, ...]
    table: Table
    sizes: tuple[int, ...]
    policies: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]
    speeds: tuple[float, ...]
    flowing: tuple[bool, ...]
    fields: dict[str, Any]

    @property
    def losses(self) -> tuple[base.LossSpec, ...]:
        """All losses, in the order of layers."""
        return tuple(loss for layer in self.layers for loss in layer.meta.losses)

    @property
    def metrics(self) -> dict[str, base.MetricSpec]:
        """All metrics by name."""
        return {m.name: m for layer in self.layers for m in layer.meta.metrics}

    def trainable(self, layer: int) -> tuple[str, ...]:
        """Paths of the weights of a layer (tied ones too) that are trained."""
        return tuple(
            dict.fromkeys(
                path
                for path in self.layers[layer].paths.values()
                if self.variables[path].is_trained
            )
        )

    def cell_of(self, layer: int) -> int:
        """The cell in which a layer lies."""
        return next(k for k, route in enumerate(self.routes) if layer in route.layers)

    @functools.cached_property
    def frozen_layers(self) -> frozenset[str]:
        """Paths of layers, at any depth, all of whose weights are frozen."""
        return _frozen(self.variables)


def _frozen(variables: Mapping[str, base.VariableSpec]) -> frozenset[str]:
    """Return the paths of layers, at any depth, all of whose weights are frozen."""
    alive: dict[str, bool] = {}
    for path, spec in variables.items():
        if spec.is_state:
            continue
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth])
            alive[prefix] = alive.get(prefix, False) or spec.trainable
    return frozenset(prefix for prefix, trained in alive.items() if not trained)


def layer_params(params: Any) -> list[Any]:
    """Return own copies of the network's layer params, each with a unique name and a policy.

    Raises:
        LayerError: there is no layer, or two are named alike.
    """
    given = [layer for cell in params.cells for layer in cell] if params.cells else params.layers
    if not given:
        raise errors.LayerError(f"{params.name or 'the network'} has no layers. Fill `layers`")
    if params.cells and params.layers:
        raise errors.LayerError("give `layers` or ready `cells`, not both")
    if params.cells and params.cuts is not None:
        raise errors.LayerError("ready `cells` are cut already: give `cuts` with `layers` alone")
    taken = {layer.name for layer in given if layer.name}
    seen: set[str] = set()
    numbers: dict[str, itertools.count[int]] = {}  # stem → numbers not tried yet
    named = []
    for layer in given:
        own = layer.copy()
        if own.dtype is None:
            own.dtype = params.dtype
        if own.batch_dim is None:
            own.batch_dim = params.batch_dim
        if not own.name:
            stem = composition.default_name(own)
            own.name = next(
                name
                for number in numbers.setdefault(stem, itertools.count())
                if (name := f"{stem}_{number}" if number else stem) not in taken
            )
        if own.name in seen or "/" in own.name:
            raise errors.LayerError(
                f"two layers are named {own.name!r}. Give each its own name"
                if own.name in seen
                else f"the layer name {own.name!r} holds a slash, which separates paths"
            )
        seen.add(own.name)
        named.append(own)
    return named


def make_table(params: Any, num_micro_batches: int) -> Table:
    """Return the training schedule of the network for M micro-batches."""
    return schedule.make(params.schedule, params.num_partitions, num_micro_batches)


def forward_table(table: Table, num_micro_batches: int) -> Table:
    """Return the forward-only table of the same cells on the same devices, for M micro-batches.

    Devices of several cells take micro-batches one by one, or as many as there are devices at a
    time, whichever ends sooner where all slots are equal.

    >>> forward_table(make_table(PipelineParams(schedule="1f1b"), 2), 3).to_text()
    '0F0,0F1,0F2'
    """
    homes: list[list[int]] = [[] for _ in range(table.num_devices)]
    for cell in range(table.num_cells):
        homes[table.device_of(cell)].append(cell)
    tables = [
        Table.on_grid(
            [
                [
                    Slot(cell, "F", m)
                    for first in range(0, num_micro_batches, size)
                    for cell in home
                    for m in range(first, min(first + size, num_micro_batches))
                ]
                for home in homes
            ]
        )
        for size in (1, len(homes))
    ]
    return min(tables, key=lambda table: max(map(len, table.devices)))


def analyze(
    params: Any,
    fields: Mapping[str, Any],
    *,
    costs: tuple[tuple[float, ...], ...] | None = None,
) -> Analysis:
    """Tell everything about a network that needs no device.

    Args:
        params: a `PipelineParams`.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec` with static shapes.
        costs: see `Analysis.costs`; None: as `params` and the layers state them, else FLOPs.

    Raises:
        UserError: names, shapes, cuts, ties or policies do not fit; the text says where.
    """
    _check_counts(params)
    named = layer_params(params)
    batch = micro_batches.batch_size(fields, params.batch_dim, params.unbatched)
    sizes = micro_batches.sizes(batch, params.num_micro_batches, params.micro_batch_size)
    nodes = [stream.Node(p.name, tuple(p.reads), tuple(p.writes)) for p in named]
    wiring = stream.wire(nodes, list(fields), params.outputs)
    specs = _field_specs(params, fields, max(sizes), _compared(wiring, named))
    metas: list[base.Meta] = []
    alike: dict[type, tuple[Any, list[Any], base.Meta]] = {}
    for number, own in enumerate(named):
        meta = _known_meta(alike, own, [specs[v] for v in wiring.reads[number]])
        written = meta.outputs if len(own.writes) > 1 else (meta.outputs,)
        specs.extend(written)
        metas.append(meta)
    _check_unique([loss.name for m in metas for loss in m.losses], "loss")
    _check_unique([metric.name for m in metas for metric in m.metrics], "metric")
    variables, owner, paths = _variables(params, named, metas)
    table = make_table(params, len(sizes))
    policies = recompute.policies(params.recompute, table.num_cells)
    reuse = recompute.reuse(table, policies, fuse=params.fuse)
    trained = [any(variables[path].is_trained for path in own.values()) for own in paths]
    flowing = stream.flowing(wiring, trained)
    costs = costs or _costs(params, named, metas, reuse, flowing)
    homes = [table.device_of(k) for k in range(table.num_cells)]
    speeds = partition.cell_speeds(params.device_speeds, homes)
    links = memory_formulas.link_costs(params.link_cost_per_byte, wiring, specs, flowing)
    cuts = tuple(len(cell) for cell in params.cells) if params.cells else params.cuts
    partition.check_cells(cuts, len(named), table.num_cells, table.num_devices)
    if cuts is not None:
        cuts = partition.check_cuts(cuts, len(named), table.num_cells)
    elif params.device_memory is None:
        by_cell = dict(enumerate(costs))
        cuts = partition.partition(
            costs[0], table.num_cells, own_costs=by_cell, speeds=speeds, link_costs=links
        )
    else:
        # A kept forward leaves what frozen layers compute as well.
        watched = flowing if set(policies) == {"full"} else (True,) * len(named)
        parts = _layer_bytes(params, named, metas, paths, variables, owner, wiring, specs, watched)
        within = capacity.Capacity(
            parts,
            [
                capacity.ValueBytes(
                    base.spec_bytes(specs[v.index]),
                    v.producer,
                    v.consumers,
                    shared=v.producer == stream.FIELD and v.name in params.unbatched,
                )
                for v in wiring.versions
            ],
            capacity.holdings(table, policies),
            table.num_micro_batches,
            units.parse_size(params.device_memory),
        )
        names = [own.name for own in named]
        cuts = capacity.cuts_within(params.device_memory, within, costs, names, speeds, links)
    return Analysis(
        layers=tuple(
            LayerInfo(own.name, own, meta, path)
            for own, meta, path in zip(named, metas, paths, strict=True)
        ),
        variables=variables,
        owner=owner,
        wiring=wiring,
        cuts=cuts,
        routes=stream.route(wiring, cuts, set(wiring.outputs.values())),
        specs=tuple(specs),
        table=table,
        sizes=sizes,
        policies=policies,
        costs=costs,
        speeds=tuple(speeds),
        flowing=flowing,
        fields=dict(fields),
    )


def _check_counts(params: Any) -> None:
    for name in ("num_partitions", "num_micro_batches", "micro_batch_size"):
        value = params.get(name)
        if value is not None and value < 1:
            raise errors.PartitionError(f"{name}={value}, but it counts from 1")


def _check_unique(names: Sequence[str], kind: str) -> None:
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise errors.LayerError(
                f"two layers give a {kind} named {name!r}. Give one of them another name"
            )


def _compared(wiring: stream.Wiring, named: Sequence[Any]) -> frozenset[str]:
    """Return the names of the fields that layers compare with and do not compute on."""
    found = []
    for version in wiring.versions:
        readers = [named[number] for number in version.consumers]
        compared = all(version.name in own.compared() for own in readers)
        if version.producer == stream.FIELD and readers and compared:
            found.append(version.name)
    return frozenset(found)


def _field_specs(
    params: Any, fields: Mapping[str, Any], size: int, compared: Collection[str]
) -> list[Any]:
    policy = precision.policy(params.dtype)
    found = []
    for name, given in fields.items():
        floats = policy.variable if name in compared else policy.compute
        batched = name not in params.unbatched
        nest = micro_batches.with_batch(given, size, params.batch_dim) if batched else given
        found.append(
            tf.nest.map_structure(
                lambda spec, floats=floats: tf.TensorSpec(
                    spec.shape, floats if spec.dtype.is_floating else spec.dtype
                ),
                nest,
            )
        )
    return found


def _known_meta(
    alike: dict[type, tuple[Any, list[Any], base.Meta]], own: Any, inputs: list[Any]
) -> base.Meta:
    """Return a layer's Meta: that of the last one of its class, if but their names differ.

    Very deep networks repeat a layer a thousand times, and telling is dearer than comparing. A
    layer that gives losses or metrics is always asked: it may name them by its own name.
    """
    unnamed = own.copy()
    unnamed.name = ""
    known = alike.get(own.owner)
    if known is None or known[:2] != (unnamed, inputs):
        known = unnamed, inputs, _layer_meta(own, inputs)
        if not (known[2].losses or known[2].metrics):
            alike[own.owner] = known
    return known[2]


def _layer_meta(own: Any, inputs: Sequence[Any]) -> base.Meta:
    try:
        meta: base.Meta = own.fprop_meta(*inputs)
    except errors.LayerError as error:
        text = str(error)
        raise errors.LayerError(text if own.name in text else f"{own.name}: {text}") from error
    if len(own.writes) > 1:
        count = len(meta.outputs) if isinstance(meta.outputs, tuple) else 1
        if count != len(own.writes):
            raise errors.LayerError(
                f"{own.name} writes {len(own.writes)} names ({', '.join(own.writes)}), but gives "
                f"{count} output{'s' if count > 1 else ''}. Write as many names as it gives"
            )
    return meta


def _variables(
    params: Any, named: Sequence[Any], metas: Sequence[base.Meta]
) -> tuple[dict[str, base.VariableSpec], dict[str, int], list[dict[str, str]]]:
    """Return path → spec, path → owner, and per layer its own path → network path."""
    variables: dict[str, base.VariableSpec] = {}
    owner: dict[str, int] = {}
    borrowed: dict[str, base.VariableSpec] = {}
    paths: list[dict[str, str]] = []
    for number, (own, meta) in enumerate(zip(named, metas, strict=True)):
        resolved = {}
        for spec in meta.variables:
            here = f"{own.name}/{spec.path}"
            frozen = any(fnmatch.fnmatchcase(here, pattern) for pattern in params.frozen)
            found = dataclasses.replace(spec, path=here, trainable=spec.trainable and not frozen)
            resolved[spec.path] = here if spec.tie is None else spec.tie
            if spec.tie is None:
                variables[here], owner[here] = found, number
            else:
                borrowed[here] = found
        paths.append(resolved)
    for spec in borrowed.values():
        variables[str(spec.tie)] = _shared(spec, variables)
    for pattern in params.frozen:
        fitting = fnmatch.filter(variables, pattern)
        _check_statistics(pattern, fitting, variables)
        if not fitting and not fnmatch.filter(borrowed, pattern):
            known = [*variables, *borrowed]
            near = errors.nearest(pattern, known) or sorted(known)[:3]
            raise errors.LayerError(
                f"frozen pattern {pattern!r} fits no variable; nearest {', '.join(near)}"
            )
    return variables, owner, paths


def _check_statistics(
    pattern: str, fitting: Sequence[str], variables: Mapping[str, base.VariableSpec]
) -> None:
    """Refuse a pattern of statistics alone that no layer around them makes stand still."""
    if not fitting or not all(variables[path].is_state for path in fitting):
        return
    frozen = _frozen(variables)
    for path in fitting:
        *parts, _ = path.split("/")
        around = {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        if not around & frozen:
            layer = "/".join(parts)
            raise errors.LayerError(
                f"frozen pattern {pattern!r} fits {path}, a statistic, which stands still only "
                f"where its layer is frozen. Freeze {layer}/*, or where it has no weights, leave "
                "the pattern out and set trainable=False in its Params"
            )


def _shared(
    spec: base.VariableSpec, variables: Mapping[str, base.VariableSpec]
) -> base.VariableSpec:
    """Return the owner's spec of a tie; frozen where one of the two sides is."""
    if spec.is_state:
        raise errors.LayerError(
            f"{spec.path} is a statistic of its own micro-batches and cannot be tied. Tie weights "
            "alone"
        )
    shared = variables.get(str(spec.tie))
    if shared is None:
        near = errors.nearest(str(spec.tie), variables) or sorted(variables)[:3]
        raise errors.LayerError(
            f"{spec.path} is tied to {spec.tie!r}, which is no variable of its own in the network; "
            f"nearest {', '.join(map(repr, near))}"
        )
    if (shared.shape, shared.dtype) != (spec.shape, spec.dtype):
        raise errors.LayerError(
            f"{spec.path} is {spec.shape} {spec.dtype.name}, but tied to {spec.tie}, which is "
            f"{shared.shape} {shared.dtype.name}. Make the two alike"
        )
    return dataclasses.replace(
        shared,
        # Who reads it as it is kept does so whoever owns it.
        compute=shared.dtype if spec.read_dtype == spec.dtype else shared.compute,
        trainable=shared.trainable and spec.trainable,
        training_only=shared.training_only and spec.training_only,
    )


def _costs(
    params: Any,
    named: Sequence[Any],
    metas: Sequence[base.Meta],
    reuse: recompute.Reuse,
    flowing: Sequence[bool],
) -> tuple[tuple[float, ...], ...]:
    """Return per cell what each layer would cost in it, by FLOPs, or as it is stated.

    Layers through which no gradient flows, a frozen beginning, have no backward; that one beside
    trained layers is computed again with its cell is not counted. A cost that is stated holds in
    every cell.
    """
    if params.costs is not None:
        if len(params.costs) != len(named):
            raise errors.PartitionError(
                f"costs has {len(params.costs)} numbers for {len(named)} layers. Give one for each"
            )
        return (tuple(params.costs),) * len(reuse.again)
    rows = reuse.costs(
        [
            recompute.Work(meta.flops_forward, meta.flops_backward, meta.flops_forward)
            if flows
            else recompute.Work(meta.flops_forward, 0.0, 0.0)
            for meta, flows in zip(metas, flowing, strict=True)
        ]
    )
    stated = {n: own.cost for n, own in enumerate(named) if own.cost is not None}
    for n, cost in stated.items():
        if not 0 <= cost < math.inf:
            raise errors.PartitionError(f"{named[n].name} has cost={cost}. Use 0 or more")
    return tuple(tuple(stated.get(n, cost) for n, cost in enumerate(row)) for row in rows)


def _layer_bytes(
    params: Any,
    named: Sequence[Any],
    metas: Sequence[base.Meta],
    paths: Sequence[dict[str, str]],
    variables: Mapping[str, base.VariableSpec],
    owner: Mapping[str, int],
    wiring: stream.Wiring,
    specs: Sequence[Any],
    flowing: Sequence[bool],
) -> list[capacity.LayerBytes]:
    """Return what each layer would add to its cell, by formula."""
    parts = []
    for number, (own, meta) in enumerate(zip(named, metas, strict=True)):
        fixed = gradients = 0
        updated = []
        for path in dict.fromkeys(paths[number].values()):
            spec = variables[path]
            gradients += spec.size_bytes if spec.is_trained else 0
            if owner[path] == number:
                slots = int(params.slots_per_weight * spec.size_bytes) if spec.is_trained else 0
                fixed += spec.size_bytes + slots
                if spec.is_trained:
                    updated.append((spec.size_bytes, slots))
            # A copy, unless the owner of a tied weight turns out to lie in the same cell.
            if owner[path] != number or spec.read_dtype != spec.dtype:
                fixed += spec.read_bytes
        held = memory_formulas.activations(own, meta, number, wiring, specs, flowing)
        parts.append(
            capacity.LayerBytes(
                fixed + gradients,
                held.kept,
                held.beside if flowing[number] else held.forward,
                gradients,
                memory_formulas.update(updated),
            )
        )
    return parts
