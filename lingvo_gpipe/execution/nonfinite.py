"""Finding the layer where a value first stops being finite, by running layer after layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.execution import cell_programs, executor
from lingvo_gpipe.network import wiring

NOWHERE = "nowhere"


def first_nonfinite(
    analysis: network.Analysis, runner: executor.Executor, feed: executor.Feed
) -> str:
    """Run micro-batches eagerly, forward, and name where a value first stops being finite.

    Returns:
        Such as "layer conv_1, output x, micro-batch 2"; or `NOWHERE`.
    """
    for path, value in feed.weights.items():
        if not finite(value):
            return f"layer {analysis.layers[analysis.owner[path]].name}, variable {path}"
    return next(_places(analysis, runner, feed), NOWHERE)


def first_gradient(analysis: network.Analysis, gradients: Mapping[str, Any]) -> str:
    """Name the layer nearest to the losses that has a gradient which is not finite."""
    for path in sorted(gradients, key=lambda p: analysis.owner[p], reverse=True):
        if not finite(gradients[path]):
            return f"layer {analysis.layers[analysis.owner[path]].name}, gradient of {path}"
    return NOWHERE


def finite(nest: Any) -> bool:
    """Tell whether every floating tensor of a nest is finite everywhere."""
    return all(
        bool(tf.reduce_all(tf.math.is_finite(leaf))) for leaf in cell_programs.floating(nest)
    )


def _places(
    analysis: network.Analysis, runner: executor.Executor, feed: executor.Feed
) -> Iterator[str]:
    for m, seed in enumerate(feed.seeds):
        values = {v: parts[m] for v, parts in feed.fields.items()}
        for cell in runner.cells:
            found, collected = cell.run(
                True,
                cell_programs.Given(
                    weights=[feed.weights[p] for p in cell.weights],
                    state=[feed.weights[p] for p in cell.state],
                    imports={v: values[v] for v in cell.route.imports},
                    seed=seed,
                    step=feed.step,
                ),
            )
            values.update(found)
            for v in sorted(found):
                if not finite(found[v]):
                    yield f"{_called(analysis, v)}, micro-batch {m}"
            for name, total in collected.losses.items():
                if not finite(total):
                    yield f"loss {name}, micro-batch {m}"


def _called(analysis: network.Analysis, version: int) -> str:
    found = analysis.wiring.versions[version]
    if found.producer == wiring.FIELD:
        return f"field {found.name} of the mini-batch"
    return f"layer {analysis.layers[found.producer].name}, output {found.name}"
