"""A whole Keras model in a pipeline against the model itself: loss, gradients, statistics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
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


def pipeline(cut: Network, *more: Any, **fields: Any) -> Any:
    """Return the pipeline of a cut model, with more layers behind its own."""
    return pipelining.PipeliningLayer.Params(
        layers=[*cut.layers, *more], inputs=cut.inputs, outputs=cut.outputs, **fields
    ).instantiate()


def check(
    model: keras.Model,
    inputs: list[Any],
    *,
    sizes: tuple[int, ...] = (3, 2),
    num_partitions: int = 2,
    tolerance: float = 1e-10,
    **more: Any,
) -> float:
    """Compare a pipeline with the model, which is called on each micro-batch.

    Args:
        model: with fixed input shapes; float64, where rounding is not to count.
        inputs: an array for each of its inputs, of sum(sizes) examples.
        sizes: examples of the micro-batches.
        num_partitions: K.
        tolerance: allowed error of an output or gradient, relative to its largest element, or to a
            thousandth of the largest of all; that of a moving statistic is at most 1e-8.
        **more: fields of the pipeline.

    Returns:
        The largest of these errors.
    """
    cut = from_keras_model(model)
    fields = dict(zip(keras.tree.flatten(cut.inputs), inputs, strict=True))
    names = paths_of(cut)
    weights = [v for v in model.trainable_variables if id(v) in names]
    statistics = model.non_trainable_variables
    before = {id(v): v.numpy() for v in statistics}
    gradients = {names[id(v)]: np.zeros(v.shape) for v in weights}
    after: list[dict[int, Any]] = []
    outputs: list[list[Any]] = []
    targets: dict[int, Any] = {}
    loss, start = 0.0, 0
    for number, size in enumerate(sizes):
        part = slice(start, start := start + size)
        seed_layers(cut, number)
        given = {name: array[part] for name, array in fields.items()}
        with tf.GradientTape() as tape:
            called = keras.tree.flatten(
                model(wiring.in_structure(cut.inputs, given), training=True)
            )
            # What layers add is a mean over examples.
            added = [tf.cast(each, "float64") * size / sum(sizes) for each in model.losses]
            part_loss = tf.add_n([tf.zeros([], "float64"), *added])
            for n, output in enumerate(called):
                if output.dtype.is_floating and output.shape[0] == size:
                    shape = (sum(sizes), *output.shape[1:])
                    target = targets.setdefault(n, random(*shape, seed=n + 3))
                    squares = tf.square(tf.cast(output, "float64") - target[part])
                    part_loss += tf.reduce_sum(squares) / target.size
        outputs.append([tf.convert_to_tensor(output).numpy() for output in called])
        loss += float(part_loss)
        parts = tape.gradient(part_loss, [v.value for v in weights], None, "zero")
        for variable, gradient in zip(weights, parts, strict=True):
            gradients[names[id(variable)]] += tf.convert_to_tensor(gradient).numpy()
        after.append({id(v): v.numpy() for v in statistics})
        for variable in statistics:
            variable.assign(before[id(variable)])

    streams = keras.tree.flatten(cut.outputs)
    heads = [
        MeanSquaredError.Params(
            name=f"head_{n}", loss_name=f"loss_{n}", reads=(streams[n], f"target_{n}")
        )
        for n in targets
    ]
    pipe = pipeline(
        cut, *heads, num_partitions=num_partitions, num_micro_batches=len(sizes), **more
    )
    labels = {f"target_{n}": target for n, target in targets.items()}
    result = pipe.value_and_gradients({**fields, **labels}, step=0, outputs=True)
    errors = {"the loss": abs(float(result.loss) - loss) / loss}
    for stream, parts in zip(streams, zip(*outputs, strict=True), strict=True):
        wanted = np.concatenate(parts).astype("float64")
        found = tf.cast(result.outputs[stream], "float64").numpy()
        errors[stream] = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert set(result.gradients) == set(gradients)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for path, gradient in gradients.items():
        scale = max(np.abs(gradient).max(), 1e-3 * largest)
        errors[path] = np.abs(result.gradients[path] - gradient).max() / scale
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong

    moved = pipe.merge_moments(result.moments)
    norms = {
        id(norm): norm
        for operation in cut.calls.values()
        for norm in variables.find(operation).norms.values()
        if norm.trainable
    }
    assert len(moved) == 2 * len(norms)
    for norm in norms.values():
        _check_statistics(norm, names, before, after, moved, sizes, min(tolerance, 1e-8))
    return float(max(errors.values()))


def _check_statistics(
    norm: Any,
    names: dict[int, str],
    before: dict[int, Any],
    after: list[dict[int, Any]],
    moved: Any,
    sizes: tuple[int, ...],
    tolerance: float,
) -> None:
    """Check that statistics are updated by mean and variance of all micro-batches together."""
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
        np.testing.assert_allclose(
            moved[path], expected, rtol=tolerance, atol=tolerance, err_msg=path
        )
