"""Analysis of a network from its params: wired layers, cells and passes.

It needs no device and no variable, so a model of any size is analysed in seconds. `plan`,
`describe` and PipeliningLayer read the same `Analysis`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gpipe import errors, nests, schedule
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import cuts, partition, replicas, value_ranges, wired_layers, wiring
from lingvo_gpipe.network.cell import Cell, Mode, Pass
from lingvo_gpipe.network.params import PipelineParams, compiled_cells
from lingvo_gpipe.schedule import recompute
from lingvo_gpipe.schedule.table import Table, forward_table


@dataclasses.dataclass(frozen=True)
class Analysis(wired_layers.WiredLayers):
    """Everything about a network that needs no device.

    Attributes:
        default_training_pass: that of a mini-batch of the size of `fields`, in the first replica.
    """

    default_training_pass: Pass

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of the training pass."""
        return self.default_training_pass.cells

    @property
    def table(self) -> Table:
        """The schedule of training, of one replica."""
        return self.default_training_pass.table

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers per cell."""
        return tuple(len(cell.layers) for cell in self.cells)

    def cell_of(self, layer: int) -> int:
        """The cell that holds a layer."""
        return self._cell_of[layer]

    def owner_cell(self, path: str) -> int:
        """The cell that owns the variable at `path`."""
        return self._cell_of[self.owner[path]]

    def source(self, version: int) -> int:
        """The cell that writes a version of the stream; `wiring.FIELD` for a field."""
        producer = self.wiring.versions[version].producer
        return producer if producer == wiring.FIELD else self._cell_of[producer]

    def value_bytes(self, version: int, micro_batch: int) -> int:
        """Return the bytes of a version of the stream in a micro-batch, by its examples."""
        return self._value_bytes[version] * self.sizes[micro_batch] // max(self.sizes)

    def gradient_bytes(self, version: int, micro_batch: int) -> int:
        """Return the bytes of its gradient, which integers have not."""
        return self._gradient_bytes[version] * self.sizes[micro_batch] // max(self.sizes)

    def replica_of(self, path: str) -> int:
        """The replica that owns the variable at `path`."""
        return self._replica_of[path]

    def owners(self, num_replicas: int) -> dict[str, int]:
        """Return path → the replica that would own the variable of `num_replicas`."""

        def device_of(path: str) -> int:
            return self.cells[self.owner_cell(path)].device_number

        most = len(replicas.shares(len(self.sizes), self.params.num_replicas)[0])
        sizes = {
            path: replicas.owned_bytes(spec, most, num_replicas, self.params.slots_per_weight)
            for path, spec in self.variables.items()
        }
        return replicas.owners(sizes, device_of, num_replicas)

    def training_pass(self, num_micro_batches: int, *, outputs: bool = False) -> Pass:
        """Return the pass of training with M micro-batches: losses and gradients of weights.

        All passes are those of one replica, and return the network's outputs if `outputs` says so.

        Raises:
            ScheduleError: the schedule cannot be made for M.
        """
        return self._pass(num_micro_batches, training=True, outputs=outputs)

    def evaluation_pass(self, num_micro_batches: int, *, outputs: bool) -> Pass:
        """Return the pass of evaluation: only forward, with or without the network's outputs."""
        return self._pass(num_micro_batches, training=False, outputs=outputs)

    def tape_pass(self, num_micro_batches: int, *, training: bool) -> Pass:
        """Return the pass under a caller's tape, which may request gradients of the fields.

        All forwards come before the first backward; see `tape_table`.

        Raises:
            ScheduleError: the schedule cannot be made for M.
        """
        return self._pass(num_micro_batches, training=training, outputs=True, under_tape=True)

    def _pass(
        self,
        num_micro_batches: int,
        *,
        training: bool,
        outputs: bool,
        under_tape: bool = False,
    ) -> Pass:
        """Return a pass, made when it is first asked for.

        Args:
            num_micro_batches: M.
            training: see `Mode`.
            outputs: whether the pass returns the network's outputs.
            under_tape: whether a caller's tape differentiates it.
        """
        key = num_micro_batches, training, outputs, under_tape
        if key in self._passes:
            return self._passes[key]
        leaving = self.wiring.outputs.values() if outputs else ()
        differentiable = self.differentiable(from_fields=under_tape)
        if not under_tape:  # nothing that only the caller reads has a gradient
            differentiable -= {v for v in leaving if not self._is_sent(v)}
        mode = Mode(
            training,
            differentiable,
            frozenset(leaving),
            is_differentiated=training or under_tape,
        )
        table = self._table(num_micro_batches, training=training)
        if under_tape:
            table = tape_table(table)
        reuses = (recompute.CellReuse(),) * len(self.cells)
        if training:
            policies = [cell.recompute_policy for cell in self.cells]
            fuse = self.params.fuse and not under_tape
            reuses = recompute.reuse(table, policies, fuse=fuse)
        routes = wiring.route(self.wiring, self.cuts, mode.leaving)
        cells = zip(self.cells, routes, reuses, strict=True)
        self._passes[key] = Pass(
            table, tuple(cell.in_pass(mode, to.exports, reuse) for cell, to, reuse in cells)
        )
        return self._passes[key]

    def _is_sent(self, version: int) -> bool:
        """Return whether a cell reads what another one writes."""
        written = self.wiring.versions[version]
        return any(
            written.producer == wiring.FIELD or self.cell_of(n) != self.cell_of(written.producer)
            for n in written.consumers
        )

    def _table(self, num_micro_batches: int, *, training: bool) -> Table:
        """Return the table of training or of evaluation; a table in a file is read only once."""
        key = num_micro_batches, training
        if key not in self._tables:
            self._tables[key] = (
                make_table(self.params, num_micro_batches)
                if training
                else forward_table(self.table, num_micro_batches)
            )
        return self._tables[key]

    def check_values(self, *parts: Mapping[str, Nest]) -> None:
        """Refuse labels and ids of a mini-batch that a layer does not take.

        Args:
            parts: consecutive parts of the mini-batch, each name → nest of tensors or arrays.

        Raises:
            InputError: naming field, row, value and layer.
        """
        value_ranges.check(self.field_ranges, *parts)

    @functools.cached_property
    def field_ranges(self) -> tuple[value_ranges.FieldRange, ...]:
        """The integers that fields of the mini-batch may hold."""
        return value_ranges.of_fields(self.layers, self.wiring)

    @functools.cached_property
    def _passes(self) -> dict[tuple[int, bool, bool, bool], Pass]:
        first = self.default_training_pass
        return {(first.num_micro_batches, True, False, False): first}

    @functools.cached_property
    def _tables(self) -> dict[tuple[int, bool], Table]:
        return {(self.default_training_pass.num_micro_batches, True): self.table}

    @functools.cached_property
    def _replica_of(self) -> dict[str, int]:
        return self.owners(self.params.num_replicas)

    @functools.cached_property
    def _value_bytes(self) -> tuple[int, ...]:
        return tuple(map(base.spec_bytes, self.specs))

    @functools.cached_property
    def _gradient_bytes(self) -> tuple[int, ...]:
        leaves = (nests.differentiable(nests.tensor_specs(nest)) for nest in self.specs)
        return tuple(map(base.spec_bytes, leaves))

    @functools.cached_property
    def _cell_of(self) -> tuple[int, ...]:
        return tuple(cell.index for cell in self.cells for _ in cell.layers)


def make_table(params: PipelineParams, num_micro_batches: int) -> Table:
    """Return the training schedule of the network for M micro-batches."""
    table = schedule.make(
        params.schedule, params.num_partitions, num_micro_batches, params.cells_per_device
    )
    policies = recompute.policies(params.recompute, table.num_cells)
    return recompute.with_slots(table, policies, fuse=params.fuse)


def tape_table(table: Table) -> Table:
    r"""Return the forwards of a table, then their backwards in reverse.

    A tape computes gradients once the whole forward has run.

    >>> print(tape_table(Table.from_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1")).grid())
    cell 0: F0 F1 B1 B0
    cell 1: F0 F1 B1 B0
    """
    rows = [[slot for slot in row if slot and slot.phase == "F"] for row in table.devices]
    return Table(
        tuple(
            (*row, *(dataclasses.replace(slot, phase="B") for slot in reversed(row)))
            for row in rows
        )
    )


def analyze(
    params: PipelineParams,
    fields: Mapping[str, SpecNest],
    *,
    costs: tuple[tuple[float, ...], ...] | None = None,
) -> Analysis:
    """Return everything about a network that needs no device.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec` with static shapes.
        costs: `Cell.costs` of each cell; None: those of the layers, or FLOPs.

    Raises:
        UserError: names, shapes, cuts, ties or policies do not match; the text says where.
    """
    _check_counts(params)
    layers = wired_layers.wire(params, fields)
    replicas.check(params.num_replicas, layers.sizes)
    largest_share = replicas.shares(len(layers.sizes), params.num_replicas)[0]
    if params.cuts is None and params.schedule in schedule.SCHEDULES:
        # Before a table of many devices is made, which takes time and memory.
        partition.check_number(params.num_partitions, len(layers.layers))
    table = make_table(params, len(largest_share))
    policies = recompute.policies(params.recompute, table.num_cells)
    reuses = recompute.reuse(table, policies, fuse=params.fuse)
    devices = [table.device_of(k) for k in range(table.num_cells)]
    settings = cuts.CellSettings(
        table=table,
        policies=policies,
        reuses=reuses,
        costs=costs or cuts.costs_by_cell(layers, reuses),
        speeds=tuple(cuts.cell_speeds(params.device_speeds, devices)),
    )
    chosen = cuts.choose(layers, settings)
    _check_crossing(layers, chosen)
    shared = {field.name: getattr(layers, field.name) for field in dataclasses.fields(layers)}
    return Analysis(**shared, default_training_pass=Pass(table, _cells(layers, settings, chosen)))


def _check_counts(params: PipelineParams) -> None:
    for name in ("num_partitions", "cells_per_device", "num_micro_batches"):
        value = params.get(name)
        if value is not None and value < 1:
            raise errors.PartitionError(f"{name}={value}, but it must be at least 1")


def not_a_tensor(layer: str, name: str, leaf: object) -> errors.LayerError:
    """Return the error of a value that leaves its cell with a leaf that is not a tensor.

    Args:
        layer: name of the layer that writes the value.
        name: name of the value in the stream.
        leaf: the leaf.
    """
    what = "None" if leaf is None else f"a value of type {type(leaf).__name__}"
    return errors.LayerError(
        f"layer {layer} has {what} in its output {name!r}, which another cell or the caller "
        "receives. Return tensors alone, or cut so that its readers are in the same cell"
    )


def _check_crossing(layers: wired_layers.WiredLayers, chosen: tuple[int, ...]) -> None:
    """Refuse values that cross a cut with a leaf that is not a tensor.

    Raises:
        LayerError: naming the layer.
    """
    for route in wiring.route(layers.wiring, chosen):
        for version in route.exports:
            for leaf in tf.nest.flatten(layers.specs[version]):
                if not isinstance(leaf, tf.TensorSpec):
                    written = layers.wiring.versions[version]
                    raise not_a_tensor(layers.layers[written.producer].name, written.name, leaf)


def _cells(
    layers: wired_layers.WiredLayers, settings: cuts.CellSettings, chosen: tuple[int, ...]
) -> tuple[Cell, ...]:
    """Return the cells of training; `chosen` holds the number of layers in each."""
    mode = Mode(
        training=True,
        differentiable=layers.differentiable(),
        leaving=frozenset(),
        is_differentiated=True,
    )
    compiled = compiled_cells(layers.params, settings.table.num_cells)
    cells = []
    for k, route in enumerate(wiring.route(layers.wiring, chosen)):
        inside = [layers.layers[n] for n in route.layers]
        paths = dict.fromkeys(path for layer in inside for path in layer.paths.values())
        cells.append(
            Cell(
                index=k,
                layers=route.layers,
                device_number=settings.table.device_of(k),
                device_speed=settings.speeds[k],
                recompute_policy=settings.policies[k],
                compiled=compiled[k],
                costs=settings.costs[k],
                weights=tuple(p for p in paths if layers.variables[p].is_trained),
                untrained=tuple(p for p in paths if not layers.variables[p].is_trained),
                imports=route.imports,
                exports=route.exports,
                losses=tuple(loss for layer in inside for loss in layer.meta.losses),
                mode=mode,
                reuse=settings.reuses[k],
            )
        )
    return tuple(cells)
