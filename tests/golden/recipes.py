"""Small models that save many kinds of state in a few hundred KiB; `make.py` trains them.

The stored runs are restored from their params texts, so a recipe in this file may change.
"""

from __future__ import annotations

from typing import Any

import keras

from lingvo_gpipe import keras_layers, optim, registry
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.task import Eval, Task, Train
from lingvo_gpipe.tasks import image, lm, mt
from lingvo_gpipe.tasks.image.model import amoebanet, convnet
from lingvo_gpipe.tasks.lm import transformer as language_model
from lingvo_gpipe.tasks.mt.model import transformer

INTERVAL = 2  # updates between the two checkpoints of a run


def _train(max_steps: int, **fields: Any) -> Train:
    return Train(
        max_steps=max_steps,
        save_interval_steps=INTERVAL,
        keep_checkpoints=2,
        log_interval_steps=1,
        **fields,
    )


class Image(registry.Model):
    """Digits: convolutions of ours and of Keras, two kinds of batch norm, Adam, averages, best."""

    def task(self) -> Task.Params:
        """Return the task."""
        ours = convnet.conv_net([[4], [6]], classes=10, dense_units=8, dropout=0.2, momentum=0.7)
        start = next(n for n, params in enumerate(ours) if params.name == "flatten")
        model = keras.Sequential(
            [
                keras.layers.SeparableConv2D(5, 3, padding="same", name="separable"),
                keras.layers.BatchNormalization(momentum=0.7, name="norm"),
            ]
        )
        theirs = keras_layers.from_keras_model(model, keep_weights=False)
        ours[start].reads = (theirs.outputs,)
        return Task.Params(
            model=PipeliningLayer.Params(
                layers=[*ours[:start], *theirs.layers, *ours[start:]],
                num_partitions=2,
                num_micro_batches=4,
                schedule="1f1b",
                recompute="except_last",
                seed=3,
            ),
            input=image.SklearnDigits.Params(batch_size=32, eval_batch_size=120),
            train=_train(
                6,
                optimizer=optim.Optimizer.Params(
                    name="Adam",
                    config={"beta_1": 0.8},
                    learning_rate=optim.KerasLearningRate.Params(
                        name="CosineDecay",
                        config={"initial_learning_rate": 0.02, "decay_steps": 10},
                    ),
                    groups=(("head/*", 0.5),),
                ),
                clip_norm=1.0,
                weight_decay=optim.WeightDecay.Params(kernel=1e-3),
                average=optim.Average.Params(decay=0.6),
            ),
            eval=Eval(best="accuracy"),
        )


class Translation(registry.Model):
    """An artificial language pair: a tied table, transparent attention, packed rows, Adafactor.

    Two mini-batches make an update. Biases whose gradients are only rounding errors are frozen, so
    that the run does not differ between machines.
    """

    def task(self) -> mt.TranslationTask.Params:
        """Return the task."""
        return mt.TranslationTask.Params(
            model=PipeliningLayer.Params(
                layers=transformer.translation_transformer(
                    mt.TranslationTransformer(
                        num_layers=1,
                        hidden=10,
                        heads=2,
                        vocabulary=330,
                        units=8,
                        head_dim=4,
                        tie="all",
                        transparent="shared",
                        packed=True,
                    )
                ),
                num_partitions=2,
                num_micro_batches=2,
                frozen=("*/key/bias",),
            ),
            input=mt.Translation.Params(
                data_dir="data",
                preparation=mt.Preparation.Params(
                    corpora=[mt.TranslateFolder.Params(folder="text")],
                    vocabulary=mt.VocabularyTraining(size=330),
                ),
                batch_size=192,
                max_length=48,
                multiple_of=2,
                packing=True,
            ),
            train=_train(
                40,
                optimizer=optim.Optimizer.Params(
                    rule=optim.Adafactor.Params(momentum=0.9, min_factored=6),
                    learning_rate=optim.InverseSquareRoot.Params(
                        factor=0.4, units=8, warmup_steps=2
                    ),
                ),
                accumulate=2,
                average=optim.Average.Params(decay=0.6),
            ),
            eval=Eval(interval_steps=20, metrics=("accuracy", "log_perplexity")),
            decode=mt.Decode(search=mt.Search(beam=3, max_length=12)),
        )


class LanguageModel(registry.Model):
    """Numbers modulo 16: an untied embedding and softmax, RMSProp, a loss scale."""

    def task(self) -> Task.Params:
        """Return the task."""
        return Task.Params(
            model=PipeliningLayer.Params(
                layers=language_model.language_model(
                    1, units=8, heads=2, hidden=12, vocabulary=16, dropout=0.1
                ),
                num_partitions=2,
                num_micro_batches=2,
                recompute="never",
            ),
            input=lm.Tokens.Params(batch_size=4, data_dir="data", length=6),
            train=_train(
                6,
                optimizer=optim.Optimizer.Params(
                    rule=optim.RMSProp.Params(momentum=0.9, epsilon=1.0),
                    learning_rate=0.05,
                ),
                loss_scale=optim.LossScale.Params(initial=4.0, growth_steps=4),
            ),
        )


class AmoebaNet(registry.Model):
    """AmoebaNet-D (3, 4) after one update without slots: layers made of layers, by their paths."""

    def task(self) -> Task.Params:
        """Return the task."""
        return Task.Params(
            model=PipeliningLayer.Params(
                layers=amoebanet.amoeba_net(
                    amoebanet.AmoebaNet(
                        genotype="D",
                        num_cells=3,
                        filters=4,
                        classes=10,
                        stem="small",
                        drop_path_keep=0.8,
                        dropout=0.2,
                    )
                ),
                num_partitions=2,
                num_micro_batches=2,
                recompute="never",
            ),
            input=image.SklearnDigits.Params(batch_size=16, eval_batch_size=120),
            train=_train(1, optimizer=optim.Optimizer.Params(name="SGD", learning_rate=0.01)),
        )
