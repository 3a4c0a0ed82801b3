"""Splitting a mini-batch into micro-batches, and merging their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network.params import PipelineParams


def sizes(num_examples: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return how many examples each micro-batch holds.

    Of M micro-batches of N examples, the first N mod M hold ⌈N/M⌉ and the others ⌊N/M⌋. Fewer
    examples than M lower M.

    >>> sizes(10, 4)
    (3, 3, 2, 2)
    """
    if num_examples < 1:
        raise errors.InputError("a mini-batch has no examples. Use at least one")
    count = min(num_micro_batches, num_examples)
    small, larger = divmod(num_examples, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def counts(num_examples: int, num_partitions: int, num_replicas: int = 1) -> tuple[int, ...]:
    """Return numbers M of micro-batches that are worth comparing, rising.

    They are near 1, 2, 4 and 8 for each device of a pipeline, as far as there are examples. Where
    such a number does not divide the mini-batch into equal parts, the next one that does is taken,
    unless it is twice as large.

    Args:
        num_examples: N, of a mini-batch.
        num_partitions: K.
        num_replicas: R, each with a part of the micro-batches.

    >>> counts(256, 8), counts(100, 8), counts(97, 8), counts(4, 8)
    ((8, 16, 32, 64), (10, 20, 50, 100), (8, 16, 32, 97), (4,))
    """
    numbers = []
    for multiple in (1, 2, 4, 8):
        least = multiple * num_partitions * num_replicas
        equal = (
            count
            for count in range(least, min(2 * least, num_examples + 1))
            if num_examples % count == 0 and count % num_replicas == 0
        )
        if least <= num_examples:
            numbers.append(next(equal, least))
    return tuple(numbers) or (num_examples,)


def batch_size(fields: Mapping[str, Nest | SpecNest]) -> int:
    """Return the number of examples of a mini-batch from its tensors' or specs' static shapes.

    Args:
        fields: name → nest of tensors or `tf.TensorSpec`.

    Raises:
        InputError: shapes are not static, or do not agree.
    """
    by_size: dict[int, str] = {}
    for name, value in fields.items():
        for leaf in tf.nest.flatten(value):
            shape = leaf.shape
            if not shape.rank or shape[0] is None:
                if shape.rank == 0 and isinstance(value, list | tuple):
                    raise errors.InputError(
                        f"field {name!r} is a list of numbers, which are read as one tensor each. "
                        "Give an array of them"
                    )
                raise errors.InputError(
                    f"field {name!r} has shape {shape}, without a known size in its batch "
                    "dimension 0. Give every mini-batch a known size, as by "
                    "batch(n, drop_remainder=True), and repeat what all examples share"
                )
            by_size.setdefault(int(shape[0]), name)
    if len(by_size) != 1:
        shown = ", ".join(f"{name!r} {size}" for size, name in by_size.items()) or "none"
        raise errors.InputError(
            f"fields disagree on the number of examples: {shown}. Repeat what all examples share"
        )
    return next(iter(by_size))


def sizes_of(params: PipelineParams, *parts: Mapping[str, Nest | SpecNest]) -> tuple[int, ...]:
    """Return how many examples each micro-batch of a mini-batch holds.

    Args:
        params: params of the network.
        parts: parts of the mini-batch, or the whole, name → nest of tensors or `tf.TensorSpec`.

    Raises:
        InputError: see `batch_size`.
    """
    num_examples = sum(batch_size(part) for part in parts)
    return sizes(num_examples, params.num_micro_batches)


def split(value: Nest, sizes: Sequence[int]) -> list[Nest]:
    """Split a field into micro-batches.

    Args:
        value: nest of tensors, [N, …] with N = Σ sizes.
        sizes: number of examples of each micro-batch.

    Returns:
        For each micro-batch, the nest of its slices.
    """
    if len(sizes) == 1:
        return [value]
    leaves = [tf.split(leaf, list(sizes)) for leaf in tf.nest.flatten(value)]
    return [tf.nest.pack_sequence_as(value, same) for same in zip(*leaves, strict=True)]


def merge(values: Sequence[Nest]) -> Nest:
    """Merge the outputs of the micro-batches along the batch dimension.

    Scalars are stacked, one row per micro-batch.
    The values of a single micro-batch are returned unchanged.
    """
    if len(values) == 1:
        return values[0]
    flat = [tf.nest.flatten(value) for value in values]
    merged = [
        tf.stack(leaves) if leaves[0].shape.rank == 0 else tf.concat(leaves, axis=0)
        for leaves in zip(*flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(values[0], merged)


def check_batched(name: str, nest: SpecNest, size: int) -> None:
    """Refuse an output that is not a scalar and has no batch dimension.

    Args:
        name: name of the output.
        nest: its specs, for a micro-batch of `size` examples.
        size: examples.

    Raises:
        LayerError: the output cannot be merged along that dimension.
    """
    for spec in tf.nest.flatten(nest):
        shape = spec.shape
        if not shape.rank or shape[0] in (size, None):
            continue
        raise errors.LayerError(
            f"output {name!r} is {shape} in a micro-batch of {size} examples, so "
            "micro-batches cannot be joined along dimension 0. Give it a batch dimension, or leave "
            "it out of the network's outputs"
        )


def with_batch(spec: SpecNest, size: int) -> SpecNest:
    """Return a nest of specs with the batch dimension set to `size`."""

    def resize(leaf: tf.TensorSpec) -> tf.TensorSpec:
        shape = leaf.shape.as_list()
        shape[0] = size
        return tf.TensorSpec(shape, leaf.dtype)

    return tf.nest.map_structure(resize, spec)


def resized(fields: Mapping[str, SpecNest], size: int) -> dict[str, SpecNest]:
    """Return the specs of a mini-batch's fields with `size` examples, name → nest."""
    return {name: with_batch(spec, size) for name, spec in fields.items()}
