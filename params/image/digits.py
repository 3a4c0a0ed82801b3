"""scikit-learn's handwritten digits: 1,797 images of 8 × 8, a fifth of them held out."""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks.image import SklearnDigits
from lingvo_gpipe.tasks.image.model import amoebanet, convnet

BATCH_SIZE = 128


class ConvNet(registry.Model):
    """Four convolutions with batch norm, two dense layers with dropout; the default job."""

    def task(self) -> Task.Params:
        """Return the task."""
        steps = 700
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=convnet.conv_net(
                    [[32, 32], [64, 64]], classes=10, dense_units=64, dropout=0.3
                ),
                num_partitions=2,
                num_micro_batches=4,
            ),
            input=SklearnDigits.Params(batch_size=BATCH_SIZE),
            train=Train(
                optimizer=optim.Optimizer.Params(name="Adam", learning_rate=cosine(2e-3, steps)),
                clip_norm=5.0,
                max_steps=steps,
                save_interval_steps=100,
            ),
            eval=Eval(best="accuracy"),
        )


class MLP(registry.Model):
    """Two dense layers of 128, trained without a pipeline."""

    def task(self) -> Task.Params:
        """Return the task."""
        steps = 700
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=convnet.mlp([128, 128], classes=10, dropout=0.2)
            ),
            input=SklearnDigits.Params(batch_size=BATCH_SIZE),
            train=Train(
                optimizer=optim.Optimizer.Params(name="Adam", learning_rate=cosine(2e-3, steps)),
                max_steps=steps,
                save_interval_steps=100,
            ),
            eval=Eval(best="accuracy"),
        )


class AmoebaNet(registry.Model):
    """AmoebaNet-D (3, 24) with the small stem: 8 × 8 pixels are too few for the auxiliary head."""

    num_cells = 3
    filters = 24

    def task(self) -> Task.Params:
        """Return the task."""
        steps = 500
        return Task.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=amoebanet.amoeba_net(
                    amoebanet.AmoebaNet(
                        genotype="D",
                        num_cells=self.num_cells,
                        filters=self.filters,
                        classes=10,
                        stem="small",
                        dropout=0.3,
                    )
                ),
                num_partitions=2,
                num_micro_batches=4,
                recompute="never",
            ),
            input=SklearnDigits.Params(batch_size=BATCH_SIZE),
            train=Train(
                optimizer=optim.Optimizer.Params(
                    name="AdamW", config={"weight_decay": 0.05}, learning_rate=cosine(3e-3, steps)
                ),
                clip_norm=5.0,
                max_steps=steps,
                save_interval_steps=100,
            ),
            eval=Eval(best="accuracy"),
        )


def cosine(peak: float, steps: int) -> optim.KerasLearningRate.Params:
    """Return a learning rate that falls from `peak` to 0 over `steps`, along a cosine."""
    return optim.KerasLearningRate.Params(
        name="CosineDecay", config={"initial_learning_rate": peak, "decay_steps": steps}
    )
