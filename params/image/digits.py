"""scikit-learn's handwritten digits: 1,797 images of 8 × 8, a fifth of them held out."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.params.image import small
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.image import SklearnDigits
from lingvo_gpipe.tasks.image.model import amoebanet, convnet

BATCH_SIZE = 128


class ConvNet(registry.Model):
    """Four convolutions with batch norm, two dense layers with dropout; the default job."""

    def task(self) -> Task.Params:
        """Return the task."""
        layers = convnet.conv_net([[32, 32], [64, 64]], classes=10, dense_units=64, dropout=0.3)
        return _task(
            pipelining.PipeliningLayer.Params(layers=layers, num_partitions=2, num_micro_batches=4),
            steps=700,
            peak=2e-3,
            clip_norm=5.0,
        )


class MLP(registry.Model):
    """Two dense layers of 128, trained without a pipeline."""

    def task(self) -> Task.Params:
        """Return the task."""
        layers = convnet.mlp([128, 128], classes=10, dropout=0.2)
        return _task(pipelining.PipeliningLayer.Params(layers=layers), steps=700, peak=2e-3)


class AmoebaNet(registry.Model):
    """AmoebaNet-D (3, 24) with the small stem: 8 × 8 pixels are too few for the auxiliary head."""

    num_cells = 3
    filters = 24

    def task(self) -> Task.Params:
        """Return the task."""
        layers = amoebanet.amoeba_net(
            amoebanet.AmoebaNet(
                genotype="D",
                num_cells=self.num_cells,
                filters=self.filters,
                classes=10,
                stem="small",
                dropout=0.3,
            )
        )
        task = _task(
            pipelining.PipeliningLayer.Params(
                layers=layers, num_partitions=2, num_micro_batches=4, recompute="never"
            ),
            steps=500,
            peak=3e-3,
            clip_norm=5.0,
        )
        task.train.optimizer.set(name="AdamW", config={"weight_decay": 0.05})
        return task


def _task(
    model: pipelining.PipeliningLayer.Params, *, steps: int, peak: float, **train: Any
) -> Task.Params:
    """Return the task of a network: Adam, whose rate falls from `peak` to 0 along a cosine."""
    return Task.Params(
        model=model,
        input=SklearnDigits.Params(batch_size=BATCH_SIZE),
        train=Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=small.cosine(peak, steps)),
            max_steps=steps,
            save_interval_steps=100,
            **train,
        ),
        eval=Eval(best="accuracy"),
    )
