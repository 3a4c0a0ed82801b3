"""How well does a plain ResNet-20 of equal size do in equal time on the same cores and images?

    python -m benchmarks.images.resnet20 --data_dir=FOLDER --minutes=20 --out=resnet20.tsv

The baseline of `image.cifar10.AmoebaNetSmallFolder`: plain Keras layers, no pipeline, as wide as
that model's number of parameters requires, on that recipe's input (mini-batch, augmentation, seed
and order). Momentum-SGD with a cosine over the given minutes, which count from the first update
after the trace to the last, evaluations included. Writes a TSV that `benchmarks.curves`
reads.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from typing import Any

PEAK_RATE = 0.1
WARMUP_SHARE = 0.05
# Decoupled, so that it equals an L2 term of 5e-4 under a momentum of 0.9.
WEIGHT_DECAY = 5e-3


def resnet(width: int, classes: int, shape: tuple[int, int, int], blocks: int = 3) -> Any:
    """Return a ResNet of 6 · blocks + 2 layers (He et al. 2015, section 4.2) as a Keras model."""
    import keras

    def conv(x: Any, filters: int, size: int, stride: int) -> Any:
        convolution = keras.layers.Conv2D(
            filters,
            size,
            stride,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
        )
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(x))

    inputs = keras.Input(shape)
    x = keras.layers.ReLU()(conv(inputs, width, 3, 1))
    for stage in range(3):
        for block in range(blocks):
            filters, stride = width * 2**stage, 2 if stage and not block else 1
            branch = keras.layers.ReLU()(conv(x, filters, 3, stride))
            branch = conv(branch, filters, 3, 1)
            skip = x if x.shape == branch.shape else conv(x, filters, 1, stride)
            x = keras.layers.ReLU()(keras.layers.add([branch, skip]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x))


def of_size(parameters: int, classes: int, shape: tuple[int, int, int]) -> Any:
    """Return the ResNet-20 whose number of trained parameters is nearest to `parameters`."""

    def distance(width: int) -> int:
        trained = resnet(width, classes, shape).trainable_variables
        return abs(sum(math.prod(v.shape) for v in trained) - parameters)

    width = min(range(8, 65), key=distance)
    return resnet(width, classes, shape)


def rate(share: float) -> float:
    """Return the learning rate once `share` of the time has passed."""
    rise = min(1.0, share / WARMUP_SHARE)
    return PEAK_RATE * rise * (1.0 + math.cos(math.pi * min(share, 1.0))) / 2.0


def train(
    task: Any, classes: int, parameters: int, minutes: float, seed: int
) -> Iterator[tuple[Any, ...]]:
    """Yield (step, seconds, loss, test accuracy) at every epoch and at the end."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    source = task.input.instantiate()
    shape = tuple(source.element_spec()["image"].shape[1:])
    model = of_size(parameters, classes, shape)
    optimizer = keras.optimizers.SGD(
        PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    optimizer.build(model.trainable_variables)
    print(f"# ResNet-20 with {model.count_params()} variables' elements", flush=True)

    @tf.function(autograph=False)
    def update(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(image, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @tf.function(autograph=False, reduce_retracing=True)
    def hits(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        prediction = tf.argmax(model(image, training=False), 1, label.dtype)
        return tf.reduce_sum(tf.cast(prediction == label, tf.int32))

    def accuracy() -> float:
        right = total = 0
        for batch in source.evaluation(task.eval.split):
            right += int(hits(batch["image"], batch["label"]))
            total += len(batch["label"])
        return right / total

    epoch = max(1, source.num_examples("train") // task.input.batch_size)
    start, step, loss = None, 0, float("nan")
    for batch in source.batches(seed):
        share = 0.0 if start is None else (time.monotonic() - start) / (60.0 * minutes)
        if share >= 1.0:
            break
        optimizer.learning_rate = rate(share)
        loss = update(batch["image"], batch["label"])
        step += 1
        if start is None:
            start = time.monotonic()
        if step % epoch == 0:
            yield step, time.monotonic() - start, float(loss), accuracy()
    yield step, 60.0 * minutes, float(loss), accuracy()


def main() -> None:
    """Train, and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True, help="folder of images")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="TSV file beside what is printed")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from benchmarks.support import machine
    from lingvo_gpipe import network
    from lingvo_gpipe.params.image import cifar10
    from lingvo_gpipe.plan import describe

    task = cifar10.AmoebaNetSmallFolder().task()
    task.input.set(data_dir=options.data_dir)
    analysis = network.analyze(task.model, describe.fields_of(task))
    parameters = describe.counts(analysis).parameters
    print(f"# {machine.describe()}; equal in size to {parameters} parameters")
    rows = ["step\tseconds\tloss\taccuracy"]
    print(rows[0])
    for step, seconds, loss, accuracy in train(task, 10, parameters, options.minutes, options.seed):
        rows.append(f"{step}\t{seconds:.1f}\t{loss:.4f}\t{accuracy:.4f}")
        print(rows[-1], flush=True)
    if options.out:
        with open(options.out, "w", encoding="ascii") as file:
            file.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
