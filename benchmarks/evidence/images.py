"""Is an AmoebaNet better than a ResNet of its size, and does pre-training help on few images?

`python -m benchmarks.evidence.images --images=FOLDER --others=FOLDER --folder=RUNS --minutes=N`
goes on where it was stopped, with

- AmoebaNet-D (2, 24) and a ResNet-20 of as many weights on CIFAR-10, for 32 epochs, with the same
  mini-batches and augmentation; and the ResNet for as many processor minutes as the AmoebaNet took
  (three seeds of each);
- an AmoebaNet trained on 20 classes of Tiny ImageNet, then on 100, 1,000 and 10,000 images of
  CIFAR-10, against AmoebaNets that begin with random weights (five seeds, each of which draws its
  images; 10,000 are all).

`--only=amoebanet,resnet/0` goes on with these runs alone; two commands with other runs may run at
once, each on a core of its own. `tuned` needs `pretrained`, and `resnet_minutes` the other two of
its seed.

The folders are what `unpack.py images cifar10 FOLDER` and `… tiny_imagenet20 FOLDER` write.
`benchmarks.evidence.images_report` makes the tables and the picture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.evidence import runs
from benchmarks.evidence.runs import Result, Trainer
from lingvo_gpipe import keras_layers, layers, optim, pipelining
from lingvo_gpipe.params.image import folder, reference, small
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.image import ImageFolder

PEAK_RATE = 0.1
# Decoupled, so that it equals an L2 term of 5e-4 under a momentum of 0.9.
WEIGHT_DECAY = 5e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How large the comparison is; the default is that of the evidence.

    Attributes:
        num_cells: of the AmoebaNets.
        filters: theirs.
        width: channels of the ResNet's first stage, so that it has as many weights.
        epochs: of both on all images.
        batch_size: of a mini-batch, at most half of the images.
        seeds: of both.
        pretraining_epochs: on the other set.
        images: of CIFAR-10 that a network is fine-tuned on → its updates.
        tuning_seeds: of a fine-tuned network, which also draw its images.
    """

    num_cells: int = 2
    filters: int = 24
    width: int = 14
    epochs: int = 32
    batch_size: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    pretraining_epochs: int = 64
    images: dict[int, int] = dataclasses.field(
        default_factory=lambda: {100: 640, 1_000: 1_200, 10_000: 1_248}
    )
    tuning_seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


def resnet(width: int, classes: int, size: int) -> Any:
    """Return a ResNet-20 (He et al. 2015, section 4.2) as a Keras model; it reads `image`.

    As there, a shortcut to more channels takes every second pixel and adds channels of zeros. (A
    1×1 convolution of fewer than 16 channels with a stride would let oneDNN write beyond its
    memory: uxlfoundation/oneDNN#6035.)
    """
    import keras

    def conv(x: Any, filters: int, size: int, stride: int) -> Any:
        convolution = keras.layers.Conv2D(
            filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
        )
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(x))

    def shortcut(x: Any, filters: int) -> Any:
        zeros = (filters - x.shape[-1]) // 2
        # `channels_first` takes the last dimension for one to pad, which here is the channels.
        pad = keras.layers.ZeroPadding2D(((0, 0), (zeros, zeros)), data_format="channels_first")
        return pad(keras.layers.AveragePooling2D(1, strides=2)(x))

    inputs = keras.Input([size, size, 3], name="image")
    x = keras.layers.ReLU()(conv(inputs, width, 3, 1))
    for stage in range(3):
        for block in range(3):
            filters, stride = width * 2**stage, 2 if stage and not block else 1
            branch = keras.layers.ReLU()(conv(x, filters, 3, stride))
            branch = conv(branch, filters, 3, 1)
            skip = x if x.shape == branch.shape else shortcut(x, filters)
            x = keras.layers.ReLU()(keras.layers.add([branch, skip]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x))


class Comparison:
    """The runs of the comparison, each made when it is first asked for."""

    def __init__(self, plan: Plan, images: Path, others: Path, trainer: Trainer) -> None:
        """Train nothing yet.

        Args:
            plan: how large it is.
            images: folder of CIFAR-10.
            others: folder of the images to pre-train on.
            trainer: runs the trainer.
        """
        self.plan = plan
        self._images = images
        self._others = others
        self._trainer = trainer
        self._result = trainer.result

    def kinds(self) -> Iterator[tuple[str, Callable[[], Iterable[Result]]]]:
        """Yield the name of each run, and what returns its result."""
        plan = self.plan
        for kind, seed in itertools.product(("amoebanet", "resnet", "resnet_minutes"), plan.seeds):
            yield f"{kind}/{seed}", functools.partial(self._on_all, kind, seed)
        yield "pretrained", lambda: [self._result("pretrained", self._pretraining(), 0)]
        for kind, number in itertools.product(("tuned", "scratch"), plan.images):
            for seed in plan.tuning_seeds:
                name = f"{kind}/{number}/{seed}"
                yield name, functools.partial(self._on_few, kind, number, seed)

    def _on_all(self, kind: str, seed: int) -> list[Result]:
        """Return the result of a network on all images of CIFAR-10."""
        steps = self.plan.epochs * self._per_epoch(self._images)
        if kind == "resnet_minutes":
            (amoebanet,), (resnet,) = (self._on_all(of, seed) for of in ("amoebanet", "resnet"))
            steps = round(steps * amoebanet.core_minutes / resnet.core_minutes)
        is_amoebanet = kind == "amoebanet"
        task = self._amoebanet(self._images, steps) if is_amoebanet else self._resnet(steps)
        return [self._result(f"{kind}/{seed}", task, seed)]

    def _on_few(self, kind: str, number: int, seed: int) -> list[Result]:
        """Return the result of an AmoebaNet on some images of CIFAR-10."""
        few = some_of(self._images, number, seed, self._trainer.folder / "images")
        task = self._amoebanet(few, self.plan.images[number])
        task.train.save_interval_steps = task.train.max_steps  # and is evaluated then, once
        start = None
        if kind == "tuned":
            task.train.start.without = reference.HEADS
            start = self._pretrained
        return [self._result(f"{kind}/{number}/{seed}", task, seed, start)]

    def _pretraining(self) -> Task.Params:
        steps = self.plan.pretraining_epochs * self._per_epoch(self._others)
        return self._amoebanet(self._others, steps)

    def _pretrained(self) -> Path:
        """Return the checkpoint that a network is fine-tuned from."""
        return self._trainer.train("pretrained", self._pretraining(), 0) / "checkpoints"

    def _per_epoch(self, images: Path) -> int:
        return max(1, _count(images) // self.plan.batch_size)

    def _amoebanet(self, images: Path, steps: int) -> Task.Params:
        size = folder.AmoebaNetSmall()
        size.num_cells, size.filters = self.plan.num_cells, self.plan.filters
        source = ImageFolder.Params(data_dir=str(images), resize=True, **small.augmented(32))
        return self._on(small.classifier(size, source, classes=None, steps=steps), images)

    def _resnet(self, steps: int) -> Task.Params:
        task = self._amoebanet(self._images, steps)
        model = resnet(self.plan.width, 10, 32)
        network = keras_layers.from_keras_model(model, keep_weights=False)
        reads = (network.outputs, "label")
        loss = layers.Loss.Params(
            loss="SparseCategoricalCrossentropy", config={"from_logits": True}, reads=reads
        )
        accuracy = layers.KerasMetric.Params(
            metric="SparseCategoricalAccuracy", metric_name="accuracy", reads=reads
        )
        task.model = pipelining.PipeliningLayer.Params(
            layers=[*network.layers, loss, accuracy],
            inputs=network.inputs,
            outputs=network.outputs,
            num_partitions=2,
            num_micro_batches=4,
            recompute="never",
        )
        warmup = math.ceil(steps / 20)
        rate = {
            "initial_learning_rate": 0.0,
            "warmup_target": PEAK_RATE,
            "warmup_steps": warmup,
            "decay_steps": steps - warmup,
        }
        task.train.optimizer = optim.Optimizer.Params(
            name="SGD",
            config={"momentum": 0.9, "nesterov": True, "weight_decay": WEIGHT_DECAY},
            learning_rate=optim.KerasLearningRate.Params(name="CosineDecay", config=rate),
        )
        task.train.clip_norm = None
        return task

    def _on(self, task: Task.Params, images: Path) -> Task.Params:
        """Return the task on a folder of images, evaluated ten times."""
        size = min(self.plan.batch_size, _count(images) // 2)
        task.input.set(data_dir=str(images), batch_size=size)
        task.train.save_interval_steps = math.ceil(task.train.max_steps / 10)
        task.eval.best = None  # the last one counts: there are no images to choose by
        return task


def some_of(images: Path, number: int, seed: int, folder: Path) -> Path:
    """Return a folder of links to as many training images of each class, and all test images."""
    some = folder / f"{number}_{seed}"
    if some.exists():
        return some
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # another command may draw, too
        begun = Path(temporary) / "some"
        draw = random.Random(seed)
        classes = sorted(path for path in (images / "train").iterdir() if path.is_dir())
        for each in classes:
            (begun / "train" / each.name).mkdir(parents=True)
            for path in draw.sample(sorted(each.iterdir()), number // len(classes)):
                (begun / "train" / each.name / path.name).symlink_to(path.resolve())
        (begun / "test").symlink_to((images / "test").resolve())
        with contextlib.suppress(OSError):  # it was faster, with the same images
            begun.rename(some)
    return some


def _count(images: Path) -> int:
    return sum(1 for path in (images / "train").glob("*/*"))


def main() -> None:
    """Go on with the runs until the sitting is over or all are done."""
    parser = runs.parser(__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--others", type=Path, required=True, help="folder of Tiny ImageNet")
    options = parser.parse_args()
    trainer = Trainer(options.folder, options.minutes, results=options.results)
    comparison = Comparison(Plan(), options.images, options.others, trainer)
    runs.sit(runs.picked(comparison.kinds(), options.only))


if __name__ == "__main__":
    main()
