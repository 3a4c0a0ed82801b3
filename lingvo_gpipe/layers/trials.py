"""A few examples, to try whether what a function returns of a mini-batch is the sum of its parts.

Losses and metrics of Keras are functions of a whole mini-batch. Micro-batches can compute those of
which this holds, and no config says which they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors

T = TypeVar("T")

_EXAMPLES = 7
_PARTS = (slice(0, 1), slice(1, 3), slice(3, None))
_MARKED = (1, 3, 4)  # some examples: none of the first part, some of the others
MARKS = (0.0, 1.0, -1.0, -100.0, 255.0, math.nan)  # labels that people's losses treat apart
_COMPARISONS = {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "Sub"}
_LARGE = 2**20  # elements of an example, of which then a few positions are tried
_POSITIONS = 32

Values: TypeAlias = Mapping[str, tf.Tensor]
"""Name of a field of the mini-batch, or of an output of the network → its value."""


class NotFiniteError(errors.LayerError):
    """A function of examples is not finite, so that it is not known whether it adds up."""


def on_examples(
    function: Callable[[Values], T], values: Mapping[str, tf.Tensor | tf.TensorSpec]
) -> T:
    """Return what a function returns of a few examples.

    Of large tensors it is called with a few positions, and with all only if it refuses these.

    Args:
        function: function of the examples.
        values: name → tensor of which some examples are taken, with 0.5 for what is not finite, or
            spec of random numbers between 0 and 1; integers are 0 or 1. If it refuses these, they
            are larger by 1.

    Raises:
        Exception: what the function raises.
    """
    specs = [value for value in values.values() if isinstance(value, tf.TensorSpec)]
    shape = max((spec.shape for spec in specs), key=lambda shape: math.prod(shape[1:]))
    attempts: list[tuple[int | None, int]] = [(None, 0), (None, 1)]
    if len(shape) > 2 and math.prod(shape[1:]) > _LARGE:
        attempts.insert(0, (shape[1], 0))
    failures: list[Exception] = []
    for length, lowest in attempts:
        try:
            return function(_few(values, length, lowest))
        except Exception as error:  # whatever a user's class raises
            if isinstance(error, errors.UserError) and not isinstance(error, NotFiniteError):
                raise
            failures.append(error)
    raise failures[-2]  # with all positions, and the integers that most functions take


def _few(
    values: Mapping[str, tf.Tensor | tf.TensorSpec], length: int | None, lowest: int
) -> Values:
    """Return such examples.

    Args:
        values: see `on_examples`.
        length: of sequences of which only a few positions are taken; None: there are none.
        lowest: the least of drawn numbers.
    """
    random = np.random.default_rng(0)
    places = np.linspace(0, (length or 1) - 1, _POSITIONS, dtype=int)
    few = {}
    for name, value in values.items():
        is_cut = length is not None and value.shape[1:2] == (length,)
        if isinstance(value, tf.TensorSpec):
            shape = [_EXAMPLES, *([_POSITIONS] if is_cut else value.shape[1:2]), *value.shape[2:]]
            is_floating = value.dtype.is_floating
            integers = random.integers(lowest, lowest + 2, shape)
            drawn = random.uniform(0.05, 0.95, shape) + lowest if is_floating else integers
            few[name] = tf.cast(drawn, value.dtype)
        else:
            rows = tf.gather(value, np.linspace(0, value.shape[0] - 1, _EXAMPLES, dtype=int))
            if value.dtype.is_floating:
                rows = tf.where(tf.math.is_finite(rows), rows, tf.cast(0.5, rows.dtype))
            few[name] = tf.gather(rows, places, axis=1) if is_cut else rows
    return few


def marked(values: Values, names: Sequence[str], marks: Sequence[float]) -> Iterator[Values]:
    """Yield the examples with other labels in some rows.

    Args:
        values: the examples.
        names: of the labels.
        marks: these labels.
    """
    is_marked = np.isin(np.arange(_EXAMPLES), _MARKED)
    for mark in marks:
        changed = {
            name: tf.where(
                is_marked.reshape([-1] + [1] * (values[name].shape.rank - 1)),
                tf.cast(mark, values[name].dtype),
                values[name],
            )
            for name in names
            if may_hold(values[name].dtype, mark)
        }
        if changed:
            yield {**values, **changed}


def graph_of(function: Callable[[], object]) -> tf.Graph:
    """Return the graph of a function of no arguments."""
    return tf.function(function, autograph=False).get_concrete_function().graph


def compared_numbers(graph: tf.Graph) -> list[float]:
    """Return the numbers with which a graph compares tensors, and these plus 1."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    arrays = {n.name: tf.make_ndarray(n.attr["value"].tensor) for n in nodes if n.op == "Const"}
    read = [name.split(":")[0] for n in nodes if n.op in _COMPARISONS for name in n.input]
    compared = [arrays[name].item() for name in read if name in arrays and arrays[name].size == 1]
    return [*dict.fromkeys(float(number) for c in compared for number in (c, c + 1))]


def may_hold(dtype: tf.DType, number: float) -> bool:
    """Return whether a tensor may have this number."""
    if dtype.is_integer:
        return math.isfinite(number) and dtype.min <= number <= dtype.max
    is_floating: bool = dtype.is_floating
    return is_floating


def adds_up(
    function: Callable[[Values], Sequence[tf.Tensor]],
    values: Values,
    *,
    absolute: float = 1e-9,
    relative: float = 1e-5,
) -> bool:
    """Return whether what a function returns of all examples is the sum of that of their parts.

    Args:
        function: the function.
        values: examples to try it on.
        absolute: difference that is none.
        relative: part of a sum that is none.
    """
    whole = function(values)
    parts = [function({name: value[part] for name, value in values.items()}) for part in _PARTS]
    return all(
        np.all(np.isfinite(total)) and np.allclose(sum(apart), total, relative, absolute)
        for total, *apart in zip(whole, *parts, strict=True)
    )
