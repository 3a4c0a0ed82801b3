"""The variables of a network by path: owning layers, ties and frozen variables."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.layers import base


@dataclasses.dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a network.

    Attributes:
        specs: path → spec; a tied variable once, at the path of its owner.
        owner: path → index of the layer that owns the variable.
        paths: for each layer, path of a variable in the layer → its path in the network, which
            for a tied variable is that of its owner.
    """

    specs: dict[str, base.VariableSpec]
    owner: dict[str, int]
    paths: tuple[dict[str, str], ...]


def resolve(
    layers: Sequence[base.Layer.Params], metas: Sequence[base.Meta], frozen: Sequence[str]
) -> Variables:
    """Collect the variables of all layers; resolve ties and apply frozen patterns.

    Args:
        layers: in order, each with its name.
        metas: Metas of the layers.
        frozen: glob patterns of paths that are not trained.

    Raises:
        LayerError: a tie or a pattern does not match.
    """
    specs: dict[str, base.VariableSpec] = {}
    owner: dict[str, int] = {}
    borrowed: dict[str, base.VariableSpec] = {}
    paths: list[dict[str, str]] = []
    for number, (layer, meta) in enumerate(zip(layers, metas, strict=True)):
        resolved = {}
        for spec in meta.variables:
            path = f"{layer.name}/{spec.path}"
            is_frozen = any(fnmatch.fnmatchcase(path, pattern) for pattern in frozen)
            renamed = dataclasses.replace(
                spec, path=path, trainable=spec.trainable and not is_frozen
            )
            resolved[spec.path] = path if spec.tie is None else spec.tie
            if spec.tie is None:
                specs[path], owner[path] = renamed, number
            else:
                borrowed[path] = renamed
        paths.append(resolved)
    for spec in borrowed.values():
        specs[str(spec.tie)] = _tied(spec, specs)
    for pattern in frozen:
        matches = fnmatch.filter(specs, pattern)
        _check_statistics(pattern, matches, specs)
        if not matches and not fnmatch.filter(borrowed, pattern):
            paths_of_all = [*specs, *borrowed]
            raise errors.LayerError(
                f"frozen pattern {pattern!r} matches no variable; "
                f"{errors.suggestion(pattern, paths_of_all)}"
            )
    return Variables(specs, owner, tuple(paths))


def frozen_layers(specs: Mapping[str, base.VariableSpec]) -> frozenset[str]:
    """Return the paths of layers, at any depth, whose weights are all frozen."""
    is_trained: dict[str, bool] = {}
    for path, spec in specs.items():
        if spec.is_state:
            continue
        for layer in _layers_around(path):
            is_trained[layer] = is_trained.get(layer, False) or spec.trainable
    return frozenset(layer for layer, trained in is_trained.items() if not trained)


def _layers_around(path: str) -> list[str]:
    """Return the paths of the layers that hold the variable at `path`, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _check_statistics(
    pattern: str, matches: Sequence[str], specs: Mapping[str, base.VariableSpec]
) -> None:
    """Refuse a pattern that matches only statistics of a layer that is not frozen."""
    if not matches or not all(specs[path].is_state for path in matches):
        return
    frozen = frozen_layers(specs)
    for path in matches:
        around = _layers_around(path)
        if not frozen.intersection(around):
            raise errors.LayerError(
                f"frozen pattern {pattern!r} matches {path}, a statistic, which is frozen only "
                f"together with its layer. Freeze {around[-1]}/*, or where the layer has no "
                "weights, remove the pattern and set trainable=False in its Params"
            )


def _tied(spec: base.VariableSpec, specs: Mapping[str, base.VariableSpec]) -> base.VariableSpec:
    """Return the spec of the variable to which `spec` is tied; frozen if either of the two is."""
    if spec.is_state:
        raise errors.LayerError(
            f"{spec.path} is a statistic of its layer's micro-batches and cannot be tied. Tie "
            "weights only"
        )
    shared = specs.get(str(spec.tie))
    if shared is None:
        owner, _, rest = str(spec.tie).partition("/")
        if f"{owner}_0/{rest}" in specs:
            raise errors.LayerError(
                f"{spec.path} is whole, but tied to {spec.tie!r}, which is in slices "
                f"({owner}_0/{rest}, …). Divide both into equal slices, or neither"
            )
        raise errors.LayerError(
            f"{spec.path} is tied to {spec.tie!r}, but no layer owns a variable of this path; "
            f"{errors.suggestion(str(spec.tie), specs)}"
        )
    if (shared.shape, shared.dtype) != (spec.shape, spec.dtype):
        raise errors.LayerError(
            f"{spec.path} is {spec.shape} {spec.dtype.name}, but tied to {spec.tie}, which is "
            f"{shared.shape} {shared.dtype.name}. Give both the same shape and dtype"
        )
    rows = None
    if shared.gradient_rows is not None and spec.gradient_rows is not None:
        rows = shared.gradient_rows + spec.gradient_rows
    return dataclasses.replace(
        shared,
        gradient_rows=rows,
        # A tied weight that its borrower reads in the master dtype stays in the master dtype.
        compute=shared.dtype if spec.read_dtype == spec.dtype else shared.compute,
        trainable=shared.trainable and spec.trainable,
        training_only=shared.training_only and spec.training_only,
    )
