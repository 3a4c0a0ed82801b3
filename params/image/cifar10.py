"""CIFAR-10: 32 × 32 colour images in ten classes."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import optimizer, pipelining, registry, task
from lingvo_gpipe.tasks.image import convnet
from lingvo_gpipe.tasks.image import input as image_input

# Of the 50,000 training images, pixels in [0, 1].
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


class ConvNet(registry.Model):
    """Six convolutions in three stages, on what `tfds.load("cifar10")` gives."""

    def task(self) -> Any:
        """Return the task."""
        return _task(
            image_input.TFDS.Params(
                name="cifar10", batch_size=128, height=32, width=32, flip=True, pad=4
            )
        )


class ConvNetFolder(registry.Model):
    """The same network on a folder of image files, `--data_dir=FOLDER`: FOLDER/train/cat/1.png."""

    def task(self) -> Any:
        """Return the task."""
        return _task(
            image_input.ImageFolder.Params(
                data_dir="data/cifar10", batch_size=128, height=32, width=32, flip=True, pad=4
            )
        )


def _task(source: Any) -> Any:
    steps = 10_000
    source.mean, source.std = _MEAN, _STD
    rate = optimizer.KerasSchedule.Params(
        name="CosineDecay", config={"initial_learning_rate": 2e-3, "decay_steps": steps}
    )
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=convnet.conv_net(
                [[32, 32], [64, 64], [128, 128]], classes=10, dense_units=128, dropout=0.3
            ),
            num_partitions=2,
            num_micro_batches=4,
        ),
        input=source,
        train=task.Train(
            optimizer=optimizer.Optimizer.Params(
                name="AdamW", config={"weight_decay": 0.01}, learning_rate=rate
            ),
            clip_norm=5.0,
            max_steps=steps,
            save_interval_steps=500,
        ),
        eval=task.Eval(best="accuracy"),
    )
