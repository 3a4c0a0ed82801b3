"""How an exported model is called: its signatures, and the functions that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from lingvo_gpipe.nests import Batch, Nest, SpecNest

if TYPE_CHECKING:
    from lingvo_gpipe import network


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """How an exported model makes a mini-batch of its inputs.

    Attributes:
        signature: name → spec of an input, a row for each example.
        fields: inputs by name → fields of a mini-batch, preprocessed as in evaluation; in-graph.
    """

    signature: Mapping[str, tf.TensorSpec]
    fields: Callable[[Mapping[str, tf.Tensor]], Batch]


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of an exported model; it has a SavedModel of its own.

    Attributes:
        signature: name → spec of an input.
        call: inputs by name → outputs by name; in-graph.
        folder: below the export's; needed where a function uses operations of another package, so
            that the other functions load with TensorFlow alone.
        resources: trackable objects that it uses besides the network's variables.
    """

    signature: Mapping[str, tf.TensorSpec]
    call: Callable[..., dict[str, tf.Tensor]]
    folder: str = ""
    resources: tuple[Any, ...] = ()


class ServedNetwork(Protocol):
    """The network of an exported model, in inference.

    Attributes:
        analysis: analysis of its layers.
        by_path: path → variable.
    """

    analysis: network.Analysis
    by_path: dict[str, tf.Variable]

    def __call__(self, fields: Mapping[str, Nest]) -> dict[str, tf.Tensor]:
        """Return the network's outputs for a mini-batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """How an exported model is called where one call of the network is not enough (a search).

    Attributes:
        fields: specs of the fields that inference has; the number of rows need not be known.
        functions: network → functions of the exported model.
        notes: returns lines for the user, such as why a function is missing.
    """

    fields: Mapping[str, SpecNest]
    functions: Callable[[ServedNetwork], Sequence[Function]]
    notes: Callable[[], Sequence[str]] = tuple
