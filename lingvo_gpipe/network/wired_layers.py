"""The wired layers of a network: everything known before the network is cut into cells."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, nests
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.network import micro_batches, variables, wiring
from lingvo_gpipe.network.params import PipelineParams, layer_params


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInfo:
    """A layer of the network, as known from its params.

    Attributes:
        index: its position in the network.
        params: its Params, with a name and the network's precision policy.
        meta: for one micro-batch.
        paths: path of a variable in the layer → its path in the network (ties resolved).
        has_gradient: whether in training a gradient flows into its weights or through it.
    """

    index: int
    params: base.Layer.Params
    meta: base.Meta
    paths: dict[str, str]
    has_gradient: bool

    @property
    def name(self) -> str:
        """Its name, unique in the network and the first part of all its paths."""
        return self.params.name


@dataclasses.dataclass(frozen=True)
class WiredLayers:
    """The layers of a network and what they read from each other.

    Attributes:
        params: params of the network.
        fields: the mini-batch's specs.
        sizes: number of examples of each micro-batch.
        layers: in order.
        variables: path → spec; a tied variable once, at the path of its owner.
        owner: path → index of the layer that owns the variable.
        wiring: which layer reads and writes which version of the stream.
        specs: for each version of the stream, its nest of specs in the largest micro-batch.
    """

    params: PipelineParams
    fields: dict[str, SpecNest]
    sizes: tuple[int, ...]
    layers: tuple[LayerInfo, ...]
    variables: dict[str, base.VariableSpec]
    owner: dict[str, int]
    wiring: wiring.Wiring
    specs: tuple[SpecNest, ...]

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
        paths = dict.fromkeys(self.layers[layer].paths.values())
        return tuple(path for path in paths if self.variables[path].is_trained)

    def owned_weights(self, layer: int) -> tuple[str, ...]:
        """Paths of the trained weights that a layer owns."""
        return tuple(path for path in self.trainable(layer) if self.owner[path] == layer)

    def layer_of(self, path: str) -> str:
        """Return the name of the layer that owns the variable at `path`."""
        return self.layers[self.owner[path]].name

    @functools.cached_property
    def frozen_layers(self) -> frozenset[str]:
        """Paths of layers, at any depth, whose weights are all frozen."""
        return variables.frozen_layers(self.variables)

    def differentiable(self, *, from_fields: bool = False) -> frozenset[int]:
        """Return the versions that gradients pass; see `wiring.differentiable`."""
        never = _never_differentiable(self.specs)
        return wiring.differentiable(self.wiring, self.is_trained, from_fields, never)

    def check_division(self, num_micro_batches: int) -> None:
        """Refuse to divide a mini-batch whose examples a layer compares.

        Raises:
            LayerError: naming the layer.
        """
        if num_micro_batches > 1 and self._undivided:
            layer = self._undivided[0]
            raise errors.LayerError(
                f"{base.describe(layer.params)} {layer.meta.undivided}, and "
                f"num_micro_batches={num_micro_batches} divides them. Use one micro-batch"
            )

    @functools.cached_property
    def _undivided(self) -> tuple[LayerInfo, ...]:
        return tuple(layer for layer in self.layers if layer.meta.undivided)

    @functools.cached_property
    def is_trained(self) -> tuple[bool, ...]:
        """Whether each layer has a weight that is trained."""
        return tuple(bool(self.trainable(n)) for n in range(len(self.layers)))


def wire(params: PipelineParams, fields: Mapping[str, SpecNest]) -> WiredLayers:
    """Name the layers, resolve what they read, and collect their specs, costs and variables.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec` with static shapes.

    Raises:
        UserError: names, shapes or ties do not match; the text names the place.
    """
    layers = layer_params(params)
    sizes = micro_batches.sizes_of(params, fields)
    nodes = [
        wiring.Node(p.name, tuple(p.reads), tuple(p.writes), compares=bool(p.compared()))
        for p in layers
    ]
    wired = wiring.wire(nodes, list(fields), wiring.names(params.outputs))
    _check_compared(wired, layers, fields)
    specs = _field_specs(params, fields, max(sizes), _compared(wired, layers))
    metas = _metas(layers, wired, specs, max(sizes))
    resolved = variables.resolve(layers, metas, params.frozen)
    trained = [
        any(resolved.specs[path].is_trained for path in paths.values()) for paths in resolved.paths
    ]
    reached = wiring.differentiable(wired, trained, never=_never_differentiable(specs))
    made = WiredLayers(
        params=params,
        fields=dict(fields),
        sizes=sizes,
        layers=tuple(
            LayerInfo(
                n,
                layer,
                metas[n],
                resolved.paths[n],
                has_gradient=trained[n] or not reached.isdisjoint(wired.reads[n]),
            )
            for n, layer in enumerate(layers)
        ),
        variables=resolved.specs,
        owner=resolved.owner,
        wiring=wired,
        specs=tuple(specs),
    )
    made.check_division(len(sizes))
    return made


def _never_differentiable(specs: Sequence[SpecNest]) -> list[int]:
    """Return the versions that no gradient passes: those without floats and complex numbers."""
    tensors = map(nests.tensor_specs, specs)
    return [v for v, leaves in enumerate(tensors) if not nests.differentiable(leaves)]


def _check_compared(
    wired: wiring.Wiring, layers: Sequence[base.Layer.Params], fields: Collection[str]
) -> None:
    """Refuse a loss or metric whose label is the output of a layer with the name of a field.

    Raises:
        LayerError: naming layer and field.
    """
    named_like_a_field = {layer.name for layer in layers}.intersection(fields)
    for layer, reads in zip(layers, wired.reads, strict=True):
        for name in named_like_a_field.intersection(layer.compared()):
            producer = wired.versions[reads[layer.reads.index(name)]].producer
            if producer != wiring.FIELD and layers[producer].name == name:
                raise errors.LayerError(
                    f"{layer.name} compares with {name!r}, which is a field of the mini-batch and "
                    f"the output of layer {name}. Rename the field or the layer"
                )


def _field_specs(
    params: PipelineParams, fields: Mapping[str, SpecNest], size: int, compared: Collection[str]
) -> list[SpecNest]:
    """Return the specs of the fields in a micro-batch of `size` examples, as layers read them."""
    policy = params.policy
    specs = []
    for name, nest in fields.items():
        floats = policy.variable if name in compared else policy.compute
        specs.append(
            tf.nest.map_structure(
                lambda spec, floats=floats: tf.TensorSpec(
                    spec.shape, floats if spec.dtype.is_floating else spec.dtype
                ),
                micro_batches.with_batch(nest, size),
            )
        )
    return specs


def _compared(wired: wiring.Wiring, layers: Sequence[base.Layer.Params]) -> frozenset[str]:
    """Return the names of the fields that layers only compare with, such as labels."""
    names = []
    for version in wired.versions:
        readers = [layers[number] for number in version.consumers]
        compared = all(version.name in layer.compared() for layer in readers)
        if version.producer == wiring.FIELD and readers and compared:
            names.append(version.name)
    return frozenset(names)


def _metas(
    layers: Sequence[base.Layer.Params],
    wired: wiring.Wiring,
    specs: list[SpecNest],
    num_examples: int,
) -> list[base.Meta]:
    """Return the Meta of each layer, and append the specs of the layers' outputs to `specs`.

    Args:
        layers: params of the layers.
        wired: what they read and write.
        specs: of the fields of a micro-batch.
        num_examples: of that micro-batch.
    """
    metas: list[base.Meta] = []
    alike: dict[type[base.Layer.Params], _KnownMeta] = {}
    for number, layer in enumerate(layers):
        reads = [specs[v] for v in wired.reads[number]]
        meta = _known_meta(alike, layer, reads)
        if any(loss.by_rows for loss in meta.losses):
            rows = nests.tensor_specs(reads)[0].shape[:1].num_elements() or num_examples
            losses = tuple(loss.for_rows(rows / num_examples) for loss in meta.losses)
            meta = dataclasses.replace(meta, losses=losses)
        specs.extend(meta.outputs if len(layer.writes) > 1 else (meta.outputs,))
        metas.append(meta)
    for kind, names in (
        ("loss", [loss.name for meta in metas for loss in meta.losses]),
        ("metric", [metric.name for meta in metas for metric in meta.metrics]),
    ):
        for name, count in collections.Counter(names).items():
            if count > 1:
                raise errors.LayerError(
                    f"two layers return a {kind} named {name!r}. Rename one of them"
                )
            if kind == "metric" and name.split("/")[0] == "loss":
                raise errors.LayerError(
                    f"a metric named {name!r} would be taken for the loss. Rename it"
                )
    return metas


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownMeta:
    """The Meta of a layer of these Params, without its name, for these inputs."""

    unnamed: base.Layer.Params
    inputs: list[SpecNest]
    meta: base.Meta


def _known_meta(
    alike: dict[type[base.Layer.Params], _KnownMeta],
    layer: base.Layer.Params,
    inputs: list[SpecNest],
) -> base.Meta:
    """Return a layer's Meta: that of the previous layer of its class, if only their names differ.

    Very deep networks repeat a layer a thousand times, and comparing is faster than computing a
    Meta. The Meta of a layer with losses or metrics is always computed, because their names may
    contain that of the layer.
    """
    unnamed = layer.copy()
    unnamed.name = ""
    known = alike.get(type(layer))
    if known is None or (known.unnamed, known.inputs) != (unnamed, inputs):
        known = _KnownMeta(unnamed, inputs, _layer_meta(layer, inputs))
        if not (known.meta.losses or known.meta.metrics):
            alike[type(layer)] = known
    return known.meta


def _layer_meta(layer: base.Layer.Params, inputs: Sequence[SpecNest]) -> base.Meta:
    try:
        with errors.located(f"in the Meta of {base.describe(layer)}"):
            meta = layer.fprop_meta(*inputs)
    except errors.LayerError as error:
        text = str(error)
        raise errors.LayerError(text if layer.name in text else f"{layer.name}: {text}") from error
    if len(layer.writes) > 1:
        count = len(meta.outputs) if isinstance(meta.outputs, tuple) else 1
        if count != len(layer.writes):
            raise errors.LayerError(
                f"{layer.name} writes {len(layer.writes)} names ({', '.join(layer.writes)}), but "
                f"returns {count} output{'s' if count > 1 else ''}. Write one name for each output"
            )
    return meta
