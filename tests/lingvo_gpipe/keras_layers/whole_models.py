"""A whole Keras model in a pipeline against the model itself: loss, gradients, statistics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import pipelining, seeds
from lingvo_gpipe.keras_layers import Network, from_keras_model, variables
from lingvo_gpipe.layers import MeanSquaredError
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.network import wiring


def random(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng(seed).normal(0.2, 1.0, shape).astype(dtype)


def warm(model: keras.Model) -> None:
    """Assign a different value to every variable, so that a swap is detected."""
    for number, variable in enumerate(model.weights):
        if variable.name in ("moving_variance", "gamma"):
            variable.assign(1.0 + 0.1 * np.abs(random(*variable.shape, seed=number)))
        elif "bias" in variable.name or variable.name in ("beta", "moving_mean"):
            variable.assign(0.1 * random(*variable.shape, seed=number))


def context(
    path: str, *, training: bool, state: dict[str, Any] | None = None, micro_batch: int = 0
) -> Context:
    step = tf.constant(0, tf.int64)
    return Context(
        training=training,
        step=step,
        root_seed=seeds.micro_batch_seed(seeds.base_seed(0), step, micro_batch),
        state=state or {},
        path=path,
    )


def seed_layers(cut: Network, micro_batch: int = 0) -> None:
    """Set the model's seed generators to what our layers draw from in a micro-batch."""
    for name, operation in cut.calls.items():
        ctx = context(name, training=True, micro_batch=micro_batch)
        for number, state in enumerate(variables.find(operation).seeds):
            state.assign(tf.cast(ctx.fold(number), state.dtype))


def paths_of(cut: Network) -> dict[int, str]:
    """Return id of a live variable → our path of it."""
    found: dict[int, str] = {}
    for name, operation in cut.calls.items():
        for path, variable in variables.find(operation).weights.items():
            found.setdefault(id(variable), f"{name}/{path}")
    return found


def check(
    model: keras.Model,
    inputs: list[Any],
    *,
    sizes: tuple[int, int] = (3, 2),
    num_partitions: int = 2,
    tolerance: float = 1e-10,
    **more: Any,
) -> None:
    """Compare a pipeline of two micro-batches with the model on each of them.

    Args:
        model: with fixed input shapes; float64, where rounding is not to count.
        inputs: an array for each of its inputs, of sum(sizes) examples.
        sizes: examples of the micro-batches.
        num_partitions: K.
        tolerance: allowed error of a gradient, relative to its largest element, or to a thousandth
            of the largest of all.
        **more: fields of the pipeline.
    """
    cut = from_keras_model(model)
    outputs = keras.tree.flatten(cut.outputs)
    targets = {
        f"target_{number}": random(sum(sizes), *tensor.shape[1:], seed=number + 3)
        for number, tensor in enumerate(model.outputs)
    }
    own = [
        *cut.layers,
        *(
            MeanSquaredError.Params(
                name=f"head_{n}", loss_name=f"loss_{n}", reads=(output, f"target_{n}")
            )
            for n, output in enumerate(outputs)
        ),
    ]
    params = pipelining.PipeliningLayer.Params(
        layers=own,
        outputs=cut.outputs,
        num_partitions=num_partitions,
        num_micro_batches=2,
        **more,
    )
    fields = dict(zip(keras.tree.flatten(cut.inputs), inputs, strict=True))
    pipe = params.instantiate()
    result = pipe.value_and_gradients({**fields, **targets}, step=0)

    names = paths_of(cut)
    weights, statistics = model.trainable_variables, model.non_trainable_variables
    before = {id(v): v.numpy() for v in statistics}
    total = {names[id(v)]: np.zeros(v.shape) for v in weights}
    after: list[dict[int, Any]] = []
    loss = 0.0
    for number, part in enumerate((slice(0, sizes[0]), slice(sizes[0], None))):
        seed_layers(cut, number)
        given = {name: array[part] for name, array in fields.items()}
        with tf.GradientTape() as tape:
            called = keras.tree.flatten(
                model(wiring.in_structure(cut.inputs, given), training=True)
            )
            part_loss = tf.add_n(
                [
                    tf.reduce_sum(tf.square(output - target[part])) / target.size
                    for output, target in zip(called, targets.values(), strict=True)
                ]
            )
        loss += float(part_loss)
        found = tape.gradient(part_loss, [v.value for v in weights])
        for variable, gradient in zip(weights, found, strict=True):
            total[names[id(variable)]] += tf.convert_to_tensor(gradient).numpy()
        after.append({id(v): v.numpy() for v in statistics})
        for variable in statistics:
            variable.assign(before[id(variable)])
    assert float(result.loss) == pytest.approx(loss, rel=tolerance)
    assert set(result.gradients) == set(total)
    largest = max(np.abs(gradient).max() for gradient in total.values())
    for path, gradient in total.items():
        scale = max(np.abs(gradient).max(), 1e-3 * largest)
        assert np.abs(result.gradients[path] - gradient).max() <= tolerance * scale, path

    moved = pipe.merge_moments(result.moments)
    norms = {
        id(norm): norm
        for operation in cut.calls.values()
        for norm in variables.find(operation).norms.values()
        if norm.trainable
    }
    assert len(moved) == 2 * len(norms)
    for norm in norms.values():
        _check_statistics(norm, names, before, after, moved, sizes)


def _check_statistics(
    norm: Any,
    names: dict[int, str],
    before: dict[int, Any],
    after: list[dict[int, Any]],
    moved: Any,
    sizes: tuple[int, int],
) -> None:
    """Check that statistics are updated by mean and variance of both micro-batches together."""
    shares = [size / sum(sizes) for size in sizes]

    def batch(variable: Any, part: dict[int, Any]) -> Any:
        old = before[id(variable)] * norm.momentum
        return (part[id(variable)] - old) / (1 - norm.momentum)

    means = [batch(norm.moving_mean, part) for part in after]
    squares = [batch(norm.moving_variance, p) + m**2 for p, m in zip(after, means, strict=True)]
    mean = sum(share * m for share, m in zip(shares, means, strict=True))
    variance = sum(share * s for share, s in zip(shares, squares, strict=True)) - mean**2
    for variable, value in ((norm.moving_mean, mean), (norm.moving_variance, variance)):
        expected = norm.momentum * before[id(variable)] + (1 - norm.momentum) * value
        path = names[id(variable)]
        np.testing.assert_allclose(moved[path], expected, rtol=1e-8, atol=1e-8, err_msg=path)
