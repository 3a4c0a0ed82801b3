"""TensorFlow's registry of custom gradients, which keeps the graphs of finished tests alive.

In a graph, every `tf.custom_gradient` is put into the registry under a new name, for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator


def forget(keep: Collection[str] = ()) -> None:
    """Remove all entries, except those with a name in `keep`."""
    registry = _registry()
    for name in _names() - set(keep):
        del registry[name]


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Remove the entries that are made inside the `with` block: no graph of it is used later."""
    before = _names()
    yield
    forget(before)


def _names() -> set[str]:
    return {name for name in _registry() if name.startswith("CustomGradient-")}


def _registry() -> dict[str, object]:
    from tensorflow.python.framework import ops

    registry: dict[str, object] = ops.gradient_registry._registry
    return registry
