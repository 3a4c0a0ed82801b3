"""CIFAR-10: 32 × 32 colour images in ten classes."""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.params.image import small
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.image import TFDS, ImageFolder, Images
from lingvo_gpipe.tasks.image.model import convnet


class ConvNet(registry.Model):
    """Six convolutions in three stages, on `tfds.load("cifar10")`."""

    def task(self) -> Task.Params:
        """Return the task."""
        return _task(
            TFDS.Params(name="cifar10", batch_size=128, height=32, width=32, flip=True, pad=4)
        )


class ConvNetFolder(registry.Model):
    """The same network on a folder of image files, `--data_dir=FOLDER`: FOLDER/train/cat/1.png."""

    def task(self) -> Task.Params:
        """Return the task."""
        return _task(
            ImageFolder.Params(
                data_dir="data/cifar10", batch_size=128, height=32, width=32, flip=True, pad=4
            )
        )


class AmoebaNetSmall(registry.Model):
    """An AmoebaNet of some 0.2M parameters, on the 50,000 images that TFDS has."""

    num_cells = small.NUM_CELLS
    filters = small.FILTERS

    def task(self) -> Task.Params:
        """Return the task."""
        source = TFDS.Params(name="cifar10", **small.augmented(32))
        return small.classifier(self, source, classes=10, steps=40 * 390)


class AmoebaNetSmallFolder(registry.Model):
    """The same network on a folder of image files, at a length for 10,000 of them."""

    num_cells = small.NUM_CELLS
    filters = small.FILTERS

    def task(self) -> Task.Params:
        """Return the task."""
        source = ImageFolder.Params(data_dir="data/cifar10", **small.augmented(32))
        return small.classifier(self, source, classes=10, steps=32 * 78)


def _task(source: Images.Params) -> Task.Params:
    steps = 10_000
    source.mean, source.std = small.MEAN, small.STD
    return Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=convnet.conv_net(
                [[32, 32], [64, 64], [128, 128]], classes=10, dense_units=128, dropout=0.3
            ),
            num_partitions=2,
            num_micro_batches=4,
        ),
        input=source,
        train=Train(
            optimizer=optim.Optimizer.Params(
                name="AdamW",
                config={"weight_decay": 0.01},
                learning_rate=small.cosine(2e-3, steps),
            ),
            clip_norm=5.0,
            max_steps=steps,
            save_interval_steps=500,
        ),
        eval=Eval(best="accuracy"),
    )
