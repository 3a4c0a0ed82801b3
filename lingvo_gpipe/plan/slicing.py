"""Which layers are larger than a device, and in how many slices every device is large enough."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.sliced import dividing
from lingvo_gpipe.network import memory_formulas, replicas, wired_layers
from lingvo_gpipe.plan import describe, step_plan
from lingvo_gpipe.task import Task, groups_of

_MOST_PLANS = 8
_GROWTH = 8  # numbers of slices are raised by an eighth
_SHOWN_LAYERS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class LayerNeed:
    """What a layer needs of a device that holds nothing else.

    Attributes:
        name: its name.
        weight_bytes: bytes of the variables of its heaviest owner.
        gradient_bytes: of gradients, those that other replicas send included, and earlier sums.
        slot_bytes: of optimizer slots and averages of that owner.
        step_bytes: the most that a step or an update holds besides, for one micro-batch.
    """

    name: str
    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.weight_bytes + self.gradient_bytes + self.slot_bytes + self.step_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Layers that are larger than a device, and slices in which they are not.

    Attributes:
        limit_bytes: memory of a device.
        too_large: the layers, the largest first.
        slices: the field `model.slices` that fits; None: no slices were found.
        heaviest_bytes: of the device that needs most with them.
        overrides: of other fields that go with them.
        whole: names of those that cannot be divided.
    """

    limit_bytes: int
    too_large: tuple[LayerNeed, ...]
    slices: dict[str, int | tuple[int, ...]] | None
    heaviest_bytes: int = 0
    overrides: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return what is too large and what to set, in one line."""
        worst = self.too_large[0]
        others = [need.name for need in self.too_large[1:]]
        more = ""
        if others:
            shown = ", ".join([*others[:_SHOWN_LAYERS], "…"][: len(others)])
            more = f"; too large are also {shown}"
        found = (
            f"layer {worst.name} alone needs {units.size(worst.total_bytes)} of a device of "
            f"{units.size(self.limit_bytes)} (weights {units.size(worst.weight_bytes)}, gradients "
            f"{units.size(worst.gradient_bytes)}, optimizer {units.size(worst.slot_bytes)}, step "
            f"{units.size(worst.step_bytes)}){more}. "
        )
        if self.whole:
            return (
                f"{found}{', '.join(self.whole[:_SHOWN_LAYERS])} cannot be divided into slices. "
                "Use fewer examples, more micro-batches, or larger devices"
            )
        if self.slices is None:
            return (
                f"{found}No number of slices was found with which all devices fit. Use more "
                "partitions, more micro-batches, or larger devices"
            )
        more = "".join(f" --params_override={override}" for override in self.overrides)
        return (
            f"{found}In slices every device fits, the heaviest needs "
            f"{units.size(self.heaviest_bytes)}: "
            f'--params_override="model.slices={self.slices}"{more}'
        )


def advice(task: Task.Params, limit_bytes: int) -> Advice | None:
    """Return which layers are larger than a device, and in how many slices they fit.

    The numbers of slices are the smallest whose plan, with an automatic cut unless the cuts are
    stated, needs no more of any device.

    Args:
        task: the task.
        limit_bytes: memory of a device.

    Returns:
        None if every layer alone fits a device.
    """
    too_large = _too_large(task, limit_bytes)
    if not too_large:
        return None
    groups = list(divided_alike(task, {need.name: need for need in too_large}))
    whole = [name for group in groups for name in group.whole]
    if whole:
        return Advice(limit_bytes, too_large, None, whole=tuple(whole))
    search = _Search(task, limit_bytes, groups)
    fitting = search.first([max(2, math.ceil(group.need_bytes / limit_bytes)) for group in groups])
    if fitting is None:
        return Advice(limit_bytes, too_large, None)
    numbers, heaviest = search.fewest(*fitting)
    return Advice(
        limit_bytes,
        too_large,
        search.setting(numbers),
        heaviest,
        tuple(_overrides(task.model, limit_bytes)),
    )


def _overrides(model: network.PipelineParams, limit_bytes: int) -> Iterator[str]:
    """Yield what to set besides slices, so that the cut is an automatic one within the memory."""
    if model.device_memory is None or units.parse_size(model.device_memory) != limit_bytes:
        yield f"model.device_memory={limit_bytes}"
    for field in ("cuts", "costs"):
        if model.get(field) is not None:
            yield f"model.{field}=None"


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """Looks for the fewest slices of groups of layers with which every device fits.

    Attributes:
        task: the task.
        limit_bytes: memory of a device.
        groups: the groups; `numbers` below are slices of each.
    """

    task: Task.Params
    limit_bytes: int
    groups: Sequence[Group]

    def first(self, numbers: list[int]) -> tuple[list[int], int] | None:
        """Return numbers that fit, from `numbers` upwards, and the bytes of the heaviest device.

        Returns:
            None if none were found: a layer would be too large with any number.
        """
        plans, earlier = 0, dict[str, tuple[int, int]]()
        before, by_one = numbers, False
        while plans < _MOST_PLANS:
            sliced = with_slices(self.task, self.setting(numbers))
            try:
                left = _too_large(sliced, self.limit_bytes)
            except errors.LayerError:  # more slices than rows, though perhaps not one by one
                if before == numbers or by_one:
                    return None
                numbers = [min(n, b + 1) for n, b in zip(numbers, before, strict=True)]
                by_one = True
                continue
            if not left:
                plans += 1
                heaviest = _heaviest(sliced, self.limit_bytes)
                if heaviest is not None and heaviest <= self.limit_bytes:
                    return numbers, heaviest
            again = _of_wholes(sliced, left)
            grown = [not left or not again.keys().isdisjoint(group.names) for group in self.groups]
            if not any(grown) or not self._may_shrink(numbers, again, earlier):
                return None
            before = numbers
            numbers = [
                n + (1 if by_one else max(1, n // _GROWTH)) * more
                for n, more in zip(before, grown, strict=True)
            ]
        return None

    def _may_shrink(
        self,
        numbers: Sequence[int],
        largest: Mapping[str, int],
        earlier: dict[str, tuple[int, int]],
    ) -> bool:
        """Return whether more slices may make each layer fit.

        A slice needs a + b / n bytes, of which a is that of activations with all columns.

        Args:
            numbers: slices of each group.
            largest: layer that is too large → bytes of its largest slice.
            earlier: the same for at most half as many slices → (n, bytes); it is kept here.
        """
        for group, number in zip(self.groups, numbers, strict=True):
            for name in largest.keys() & set(group.names):
                fewer, more_bytes = earlier.setdefault(name, (number, largest[name]))
                if number < 2 * fewer:
                    continue
                saved = (more_bytes - largest[name]) * fewer / (number - fewer)
                if largest[name] - saved > self.limit_bytes:
                    return False
                earlier[name] = number, largest[name]
        return True

    def fewest(self, numbers: list[int], heaviest: int) -> tuple[list[int], int]:
        """Return numbers that fit, of which none can be lower by 1."""
        for index in range(len(numbers)):
            while numbers[index] > 2:
                fewer = [n - (other == index) for other, n in enumerate(numbers)]
                found = _heaviest(with_slices(self.task, self.setting(fewer)), self.limit_bytes)
                if found is None or found > self.limit_bytes:
                    break
                numbers, heaviest = fewer, found
        return numbers, heaviest

    def setting(self, numbers: Sequence[int]) -> dict[str, int | tuple[int, ...]]:
        """Return the field `model.slices` with these numbers; its other patterns stay."""
        new: dict[str, int | tuple[int, ...]] = {
            pattern: number
            for group, number in zip(self.groups, numbers, strict=True)
            for pattern in group.patterns
        }
        return new | {p: n for p, n in self.task.model.slices.items() if p not in new}


def with_slices(task: Task.Params, slices: Mapping[str, int | tuple[int, ...]]) -> Task.Params:
    """Return the task with these slices; cuts and costs of single layers are left out."""
    copy = task.copy()
    copy.model.set(slices=dict(slices), cuts=None, costs=None)
    return copy


def needs(task: Task.Params) -> list[LayerNeed]:
    """Return what each layer of a task's network needs of a device of its own, by formula.

    With R replicas it is the need of the one that owns most of the layer's bytes.
    """
    count = task.model.num_replicas
    groups = groups_of(task, describe.fields_of(task))
    if groups.count > 1:  # sums of gradients are kept from one to the next
        task = task.copy()
        task.train.accumulate *= groups.count
    params, fields = replicas.first_share(groups.params, groups.fields)
    wired = wired_layers.wire(params, fields)
    slots = step_plan.slot_bytes(
        wired.variables, task.train.optimizer, averages=task.train.average is not None
    )
    return [
        max(
            (_need(task, wired, layer, slots, replica) for replica in range(count)),
            key=lambda need: need.total_bytes,
        )
        for layer in wired.layers
    ]


def _need(
    task: Task.Params,
    wired: wired_layers.WiredLayers,
    layer: network.LayerInfo,
    slots: Mapping[str, int],
    replica: int,
) -> LayerNeed:
    count = task.model.num_replicas
    own = [path for path in dict.fromkeys(layer.paths.values()) if wired.owner[path] == layer.index]
    sizes = {
        path: replicas.owned_bytes(
            wired.variables[path], len(wired.sizes), count, task.model.slots_per_weight
        )
        for path in own
    }
    owner = replicas.owners(sizes, lambda _: 0, count)
    elsewhere = {path for path in own if owner[path] != replica}
    held = memory_formulas.weights(wired, (layer.index,), elsewhere)
    mine = [path for path in own if path not in elsewhere]
    specs = [wired.variables[path] for path in mine]
    received = sum(replicas.received_bytes(spec, len(wired.sizes), count) for spec in specs)
    several = task.train.accumulate > 1
    earlier = sum(spec.size_bytes for spec in specs if spec.is_trained and several)
    activations = memory_formulas.activations(wired, layer)
    return LayerNeed(
        layer.name,
        held.variables,
        held.gradients + earlier + received,
        sum(slots[path] for path in mine),
        max(
            held.copies + activations.kept + activations.beside,
            memory_formulas.update(wired, layer, slots, elsewhere),
        ),
    )


def _too_large(task: Task.Params, limit_bytes: int) -> tuple[LayerNeed, ...]:
    found = [need for need in needs(task) if need.total_bytes > limit_bytes]
    return tuple(sorted(found, key=lambda need: -need.total_bytes))


def _of_wholes(task: Task.Params, parts: Sequence[LayerNeed]) -> dict[str, int]:
    """Return layer → bytes of its largest part, of the layers that have one of these parts."""
    needs = {part.name: part.total_bytes for part in parts}
    found = {
        layer.name: [needs[part.name] for part in of_layer if part.name in needs]
        for layer, of_layer in network.divided(task.model)
    }
    return {name: max(sizes) for name, sizes in found.items() if sizes}


def _heaviest(task: Task.Params, limit_bytes: int) -> int | None:
    """Return the bytes of the heaviest device with an automatic cut; None: no cut fits."""
    task.model.device_memory = f"{limit_bytes}"
    try:
        return step_plan.make_for(task).heaviest_bytes
    except errors.PartitionError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Params of layers that have the same number of slices.

    Attributes:
        names: their names.
        patterns: of these names, short.
        need_bytes: the most that one of them needs, all its slices that are too large together.
        whole: names of those that cannot be divided.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    need_bytes: int
    whole: tuple[str, ...]


def divided_alike(task: Task.Params, too_large: Mapping[str, LayerNeed]) -> Iterator[Group]:
    """Yield the layers that are divided alike: tied ones, and those that only a number names."""
    divided = {layer.name: (layer, parts) for layer, parts in network.divided(task.model)}
    need = {
        name: sum(too_large[part.name].total_bytes for part in parts if part.name in too_large)
        for name, (_, parts) in divided.items()
        if any(part.name in too_large for part in parts)
    }
    done: set[str] = set()
    for name in need:
        if name in done:
            continue
        together = _tied_to(name, [layer for layer, _ in divided.values()])
        together |= {each for each in need if _stem(each) == _stem(name) and each not in done}
        done |= together
        names = tuple(each for each in divided if each in together)
        yield Group(
            names,
            tuple(_patterns(names, list(divided))),
            max(need[each] for each in names if each in need),
            tuple(each for each in names if not dividing.can_be_divided(divided[each][0])),
        )


def _tied_to(name: str, layers: Sequence[base.Layer.Params]) -> set[str]:
    """Return the names of the layers whose slices are those of a layer, its own included."""
    ties = [
        {layer.name, path.partition("/")[0]}
        for layer in layers
        for variable, path in layer.tie.items()
        # Of a block, only the feed-forward part is divided.
        if "feed_forward_slices" not in layer.fields() or variable.startswith("feed_forward/")
    ]
    found, size = {name}, 0
    while len(found) > size:
        size = len(found)
        found.update(*(tie for tie in ties if tie & found))
    return found


def _stem(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _patterns(names: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Yield patterns that match all of `names` and no other layer."""
    stems = dict.fromkeys(map(_stem, names))
    for stem in stems:
        of_stem = [name for name in names if _stem(name) == stem]
        if len(of_stem) > 1 and set(fnmatch.filter(known, stem)) <= set(names):
            yield stem
        else:
            yield from of_stem
