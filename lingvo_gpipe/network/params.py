"""The Params of a pipelined network, and its layers' params with names and policies filled in."""

from __future__ import annotations

import fnmatch
from typing import Any, TypeAlias, TypeVar

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, composite
from lingvo_gpipe.layers import slices as slicing

# A nest of names (`nests.NameNest`); a text may write a name without quotes.
_Names: TypeAlias = str | tuple[Any, ...] | list[Any] | dict[str, Any]


class PipelineParams(hyperparams.Configurable.Params):
    """A sequence of layers, how it is cut, and how it runs."""

    name: str = hyperparams.field("", "Name of the network in messages.")
    layers: list[base.Layer.Params] = hyperparams.field([], "The layers, in order.")
    slices: dict[str, int | tuple[int, ...]] = hyperparams.field(
        {},
        "Pattern of names of layers → number of equal slices of each such layer, or the size of "
        "each; the first pattern that matches counts.",
    )
    num_partitions: int = hyperparams.field(1, "K: devices, each with `cells_per_device` cells.")
    cells_per_device: int | None = hyperparams.field(
        None,
        "V: cells on each device. None: those of the table's text, or 2 for interleaved, "
        "looped_bfs, zb_v and dualpipe_v, and 1 for other names.",
    )
    num_micro_batches: int = hyperparams.field(
        1,
        "M: micro-batches per mini-batch. With schedule=auto, 1 is not set: auto chooses M if no "
        "layer depends on it.",
    )
    num_replicas: int = hyperparams.field(
        1, "R: replicas of the pipeline, each of K devices and a part of the M micro-batches."
    )
    schedule: str = hyperparams.field(
        "gpipe",
        "Name of a schedule (gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_v, dualpipe_v, "
        "optimal), or a table as text, or @file with one; auto: the trainer chooses, M too.",
    )
    recompute: str = hyperparams.field(
        "full",
        "full, early, except_last, never or recompute_grad; or one for each cell: full,full,never.",
    )
    cuts: tuple[int, ...] | None = hyperparams.field(
        None,
        "Layers per cell; None: an automatic cut, with the heaviest cell as light as possible.",
    )
    device_speeds: tuple[float, ...] = hyperparams.field(
        (), "Relative speed of each device, for an automatic cut; empty: all equal."
    )
    device_memory: str | None = hyperparams.field(
        None,
        "Memory of each device, such as 8GiB, that no cell of an automatic cut may exceed. "
        "Activations are estimated by formula: leave room, and check with plan. None: unlimited.",
    )
    slots_per_weight: float = hyperparams.field(
        2.0,
        "Optimizer slots and averages per weight, for device_memory: Adam 2, momentum 1; "
        "averages add 1, updates of several mini-batches add 1.",
    )
    devices: tuple[str, ...] | None = hyperparams.field(
        None,
        "Names of the K devices, one replica after the other; None: `placement` chooses.",
    )
    placement: str = hyperparams.field("auto", "auto, cpu, gpu or tpu.")
    inputs: _Names = hyperparams.field(
        (),
        "Fields as a call takes them: a name, or a list or dict of names. Empty: a dictionary by "
        "field, or the value of x alone.",
    )
    outputs: _Names = hyperparams.field(
        (),
        "Names that the network returns, and as a call returns them: a name, or a list or dict of "
        "names; of a tuple, the only one or a dictionary by name. Empty: what the last layer "
        "writes.",
    )
    frozen: tuple[str, ...] = hyperparams.field(
        (), "Glob patterns of variable paths that are not trained, such as stem/*."
    )
    dtype: str | None = hyperparams.field(
        None, "Precision policy; None is float32, or float64 if a layer has that."
    )
    jit_compile: bool | tuple[bool, ...] = hyperparams.field(
        False,
        "Compiles the programs of every cell with XLA, or of each cell for which it is True: "
        "(True,False).",
    )
    fuse: bool = hyperparams.field(
        True, "Fuses the last cell's forward and backward where the table has them in a row."
    )
    seed: int = hyperparams.field(0, "Seed of the initial weights and of every random number.")

    @property
    def policy(self) -> precision.Policy:
        """The network's precision policy: of its fields, losses and layers without their own."""
        dtype = self.dtype
        if dtype is None:
            dtype = "float64" if any(layer.dtype == "float64" for layer in self.layers) else None
        return precision.policy(dtype)


def layer_params(params: PipelineParams) -> list[base.Layer.Params]:
    """Return copies of the network's layer params, each with a unique name and a dtype.

    Params that stand for several layers (`Layer.Params.consecutive`) are replaced by those.

    Raises:
        LayerError: there is no layer, or two have the same name.
    """
    named = _named(params)
    layers = [part for layer in named for part in layer.consecutive(named)]
    composite.check_names(layers)
    return layers


def compiled_cells(params: PipelineParams, num_cells: int) -> tuple[bool, ...]:
    """Return for each cell whether `jit_compile` states that XLA compiles it.

    Raises:
        PartitionError: it states neither one value nor as many as cells.
    """
    stated = params.jit_compile
    if isinstance(stated, bool):
        return (stated,) * num_cells
    if len(stated) != num_cells:
        raise errors.PartitionError(
            f"jit_compile has {len(stated)} values for {num_cells} cells. Give True, False, or "
            "one value for each cell"
        )
    return stated


def divided(
    params: PipelineParams,
) -> tuple[tuple[base.Layer.Params, tuple[base.Layer.Params, ...]], ...]:
    """Return each of the network's Params, named and in slices, and the layers it stands for.

    Raises:
        LayerError: see `layer_params`.
    """
    named = _named(params)
    return tuple((layer, layer.consecutive(named)) for layer in named)


def _named(params: PipelineParams) -> list[base.Layer.Params]:
    """Return copies of the params in `layers`, with names and the network's fields."""
    layers = params.layers
    if not layers:
        raise errors.LayerError(f"{params.name or 'the network'} has no layers. Fill `layers`")
    copies, policy = composite.named(layers), params.policy.name
    for copy in copies:
        if copy.dtype is None:
            copy.dtype = policy
    return _in_slices(params, copies)


def _in_slices(params: PipelineParams, layers: list[base.Layer.Params]) -> list[base.Layer.Params]:
    """Return layers in the slices that the network's field `slices` states."""
    unused = dict.fromkeys(params.slices)
    changed = []
    for layer in layers:
        matching = [p for p in params.slices if fnmatch.fnmatchcase(layer.name, p)]
        for pattern in matching:
            unused.pop(pattern, None)
        number = params.slices[matching[0]] if matching else None
        changed.append(layer if number is None else slicing.in_slices(layer, number))
    for pattern in unused:
        names = [layer.name for layer in layers if isinstance(layer, slicing.SlicedParams)]
        raise errors.LayerError(
            f"slices: pattern {pattern!r} matches no layer; of those that can be divided, "
            f"{errors.suggestion(pattern.strip('*'), names)}"
        )
    return changed


_Pipeline = TypeVar("_Pipeline", bound=PipelineParams)


def uncut(params: _Pipeline) -> _Pipeline:
    """Return a copy of a network's params with one cell and one micro-batch."""
    copy = params.copy()
    copy.set(
        num_partitions=1,
        cells_per_device=None,
        num_micro_batches=1,
        num_replicas=1,
        schedule="gpipe",
        recompute="full",
        cuts=None,
        devices=None,
        device_speeds=(),
        device_memory=None,
        jit_compile=params.jit_compile is True,
    )
    return copy
