"""The named stream: which layer reads which version of a name, and what each cell sends.

No tensor is computed here. Each time a name is written again, a new version begins. A tensor goes
directly from the cell that makes it to each cell that reads it, never through the cells between
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.nests import NameNest, Nest

FIELD = -1  # producer of the fields of the mini-batch


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A layer in the stream.

    Attributes:
        name: its name.
        reads: the names that it reads.
        writes: the names that it writes.
        compares: it adds a loss or a metric, so that what it writes may stay unread.
    """

    name: str
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)
    compares: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One value of the stream.

    Attributes:
        index: its number, in the order of writing; fields come first.
        name: its name in the stream.
        producer: index of the layer that writes it, or `FIELD`.
        consumers: indices of the layers that read it, ascending.
    """

    index: int
    name: str
    producer: int
    consumers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """Which layer reads and writes which version.

    Attributes:
        versions: all of them.
        reads: for each layer, the versions that it reads, in its order of names.
        writes: for each layer, the versions that it writes.
        outputs: name → version that the network returns.
    """

    versions: tuple[Version, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    outputs: dict[str, int]

    @property
    def fields(self) -> dict[str, int]:
        """Name → version, for every field of the mini-batch."""
        return {v.name: v.index for v in self.versions if v.producer == FIELD}


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The layers of one cell, and the versions that it receives and sends.

    Attributes:
        layers: indices of its layers.
        imports: versions that it receives, fields included, ascending.
        exports: versions that others need, ascending.
    """

    layers: range
    imports: tuple[int, ...]
    exports: tuple[int, ...]


def wire(nodes: Sequence[Node], fields: Iterable[str], outputs: Sequence[str] = ()) -> Wiring:
    """Resolve names to versions.

    Args:
        nodes: the layers in order.
        fields: names written before the first layer.
        outputs: names whose last versions the network returns; empty: what the last layer
            writes.

    Raises:
        LayerError: a name is read before it is written, or written and never read, unless by a
            layer that compares; or a layer writes no name.

    >>> nodes = [Node("a"), Node("b", reads=("x", "label"), writes=("y",))]
    >>> wire(nodes, ["x", "label"]).reads
    ((0,), (2, 1))
    """
    versions: list[tuple[str, int]] = []  # name and producer of each
    current: dict[str, int] = {}
    consumers: list[list[int]] = []

    def write(name: str, producer: int) -> int:
        current[name] = len(versions)
        versions.append((name, producer))
        consumers.append([])
        return current[name]

    for field in fields:
        write(field, FIELD)
    reads, writes = [], []
    for number, node in enumerate(nodes):
        for name in node.reads:
            if name not in current:
                raise errors.LayerError(_unknown(name, node, nodes[number:], current))
            consumers[current[name]].append(number)
        reads.append(tuple(current[name] for name in node.reads))
        if len(set(node.writes)) != len(node.writes):
            raise errors.LayerError(
                f"{node.name} writes a name twice: {', '.join(node.writes)}. Give each of its "
                "outputs a different name"
            )
        if not node.writes:
            raise errors.LayerError(
                f"{node.name} writes no name. Give its output a name; if no layer reads it, add "
                "that name to the network's outputs"
            )
        writes.append(tuple(write(name, number) for name in node.writes))
    leaving = _leaving(outputs or (nodes[-1].writes if nodes else ()), current)
    for index, (name, producer) in enumerate(versions):
        is_read = consumers[index] or index in leaving.values()
        if producer != FIELD and not is_read and not nodes[producer].compares:
            raise errors.LayerError(_unread(name, nodes[producer], nodes[producer + 1 :]))
    return Wiring(
        tuple(
            Version(i, name, producer, tuple(dict.fromkeys(consumers[i])))
            for i, (name, producer) in enumerate(versions)
        ),
        tuple(reads),
        tuple(writes),
        leaving,
    )


def _leaving(wanted: Sequence[str], current: dict[str, int]) -> dict[str, int]:
    for name in wanted:
        if name not in current:
            raise errors.LayerError(
                f"output {name!r} is neither a field nor written by a layer; "
                f"{errors.suggestion(name, current)}. Correct the network's outputs"
            )
    return {name: current[name] for name in wanted}


def _unknown(name: str, node: Node, rest: Sequence[Node], current: Collection[str]) -> str:
    later = next((n for n in rest if name in n.writes), None)
    if later is not None and later is not node:
        return f"{node.name} reads {name!r}, which only {later.name} after it writes. Move it up"
    return (
        f"{node.name} reads {name!r}, which no field or layer before it writes; "
        f"{errors.suggestion(name, current)}"
    )


def _unread(name: str, node: Node, rest: Sequence[Node]) -> str:
    wanted = {read for later in rest for read in later.reads}
    near = errors.nearest(name, wanted - {name})
    hint = f"; nearest name read after it {near[0]!r}" if near else ""
    return (
        f"{node.name} writes {name!r}, which no layer after it reads{hint}. "
        "Read it, or add it to the network's outputs"
    )


def cell_layers(cuts: Sequence[int]) -> list[range]:
    """Return the layer indices of each cell; `cuts` holds the number of layers per cell."""
    ends = list(itertools.accumulate(cuts))
    return [range(end - size, end) for size, end in zip(cuts, ends, strict=True)]


def route(wiring: Wiring, cuts: Sequence[int], leaving: Collection[int] = ()) -> tuple[Route, ...]:
    """Return each cell's imports and exports.

    Args:
        wiring: wiring of the network.
        cuts: number of layers in each cell.
        leaving: versions that the network returns; their producers export them.
    """
    routes = []
    for layers in cell_layers(cuts):
        imports = {
            v for n in layers for v in wiring.reads[n] if wiring.versions[v].producer not in layers
        }
        exports = {
            v
            for n in layers
            for v in wiring.writes[n]
            if v in leaving or any(c not in layers for c in wiring.versions[v].consumers)
        }
        routes.append(Route(layers, tuple(sorted(imports)), tuple(sorted(exports))))
    return tuple(routes)


def differentiable(
    wiring: Wiring,
    is_trained: Sequence[bool],
    from_fields: bool = False,
    never: Collection[int] = (),
) -> frozenset[int]:
    """Return the versions that depend on a trained weight (or, with `from_fields`, on a field).

    Args:
        wiring: wiring of the network.
        is_trained: for each layer, whether it has a trained weight.
        from_fields: whether gradients by the fields of the mini-batch are needed.
        never: versions that no gradient passes, such as integers.
    """
    reached: set[int] = set()
    if from_fields:
        reached.update(v.index for v in wiring.versions if v.producer == FIELD)
        reached.difference_update(never)
    for number, (reads, writes) in enumerate(zip(wiring.reads, wiring.writes, strict=True)):
        if is_trained[number] or any(v in reached for v in reads):
            reached.update(v for v in writes if v not in never)
    return frozenset(reached)


def names(nest: NameNest) -> tuple[str, ...]:
    """Return the names in a nest of names in order, each once.

    Raises:
        LayerError: a leaf is not a name.

    >>> names(["b", {"one": "a", "two": "b"}])
    ('b', 'a')
    """
    if isinstance(nest, str):
        return (nest,)
    if isinstance(nest, Mapping):
        parts = list(nest.values())
    elif isinstance(nest, list | tuple):
        parts = list(nest)
    else:
        raise errors.LayerError(
            f"{nest!r} is not a name. Write names of the stream, alone or in a list, tuple or dict"
        )
    return tuple(dict.fromkeys(name for part in parts for name in names(part)))


def by_name(nest: NameNest, value: Nest) -> dict[str, Nest]:
    """Return name → value, from values in the structure of a nest of names.

    A list stands for a tuple, and a tuple for a list; for a name alone, also a list of one value.

    Raises:
        InputError: the value has another structure.

    >>> by_name(["a", {"two": "b"}], (1, {"two": 2}))
    {'a': 1, 'b': 2}
    """
    if isinstance(nest, str):
        alone = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        fits, pairs = not isinstance(alone, list | tuple | Mapping), []
        if fits:
            return {nest: alone}
    elif isinstance(nest, Mapping):
        fits = isinstance(value, Mapping) and set(value) == set(nest)
        pairs = [(nest[key], value[key]) for key in nest] if fits else []
    else:
        fits = isinstance(value, list | tuple) and len(value) == len(nest)
        pairs = list(zip(nest, value, strict=True)) if fits else []
    if not fits:
        raise errors.InputError(
            f"a call takes {_shown(nest)}, got {_shown(value)}. Use that structure, or a "
            f"dictionary of the fields {', '.join(names(nest))}"
        )
    return {name: leaf for part, inner in pairs for name, leaf in by_name(part, inner).items()}


def in_structure(nest: NameNest, values: Mapping[str, Nest]) -> Nest:
    """Return values by name in the structure of a nest of names.

    >>> in_structure({"two": ["b"]}, {"a": 1, "b": 2})
    {'two': [2]}
    """
    if isinstance(nest, str):
        return values[nest]
    if isinstance(nest, Mapping):
        return {key: in_structure(part, values) for key, part in nest.items()}
    parts = [in_structure(part, values) for part in nest]
    return tuple(parts) if isinstance(nest, tuple) else parts


def _shown(nest: Nest) -> str:
    """Return a structure as messages show it: names, and tensors as their kind."""
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(part)}" for key, part in nest.items()) + "}"
    if isinstance(nest, list | tuple):
        return "[" + ", ".join(map(_shown, nest)) + "]"
    return nest if isinstance(nest, str) else "a tensor"
