"""102 languages to English in one Transformer: T(L, H, A) of Huang et al. 2019, section 5.

Known: the sizes, 64,000 shared pieces, temperature-based sampling, K, trainability by smaller
feed-forward weights and clipped logits. From the same group's companion papers: T = 5, Adafactor
with momentum, update clipping 1.0, the rate 3·d^−½·min(s^−½, s·w^−1.5) with w = 40,000.
UNKNOWN: their data (not public), dropout, the feed-forward factor and the clipping bound,
mini-batch, M, steps.
Chosen: the defaults of `TranslationTransformer`; mini-batches of 262,144 tokens in 32
micro-batches, four of them an update.

Records of any number of languages are read from `--data_dir`, by default data/multilingual.
"""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry, task
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.decoding import scores
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer

VOCABULARY = 64_000


class _Multilingual(registry.Model):
    """T(L, H, A) on rows of 256 tokens, several sentences each."""

    num_layers = 6
    hidden = 8192
    heads = 16
    num_partitions = 1
    num_micro_batches = 32

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return mt_task.TranslationTask.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=transformer.translation_transformer(
                    transformer.TranslationTransformer(
                        num_layers=self.num_layers,
                        hidden=self.hidden,
                        heads=self.heads,
                        vocabulary=VOCABULARY,
                        packed=True,
                    )
                ),
                num_partitions=self.num_partitions,
                num_micro_batches=self.num_micro_batches,
                schedule="1f1b",
            ),
            input=Translation.Params(
                data_dir="data/multilingual",
                batch_size=262_144,
                max_length=256,
                multiple_of=self.num_micro_batches,
                packing=True,
            ),
            train=task.Train(
                optimizer=optim.Optimizer.Params(
                    rule=optim.Adafactor.Params(momentum=0.9),
                    learning_rate=optim.InverseSquareRoot.Params(
                        factor=3.0, units=1024, warmup_steps=40_000
                    ),
                ),
                accumulate=4,
                max_steps=500_000,
                save_interval_steps=1_000,
            ),
            eval=task.Eval(split="valid", best="log_perplexity", best_is="lowest"),
            score=scores.Scoring(split="test"),
        )


class T6x8192x16(_Multilingual):
    """T(6, 8192, 16): 474M parameters, "400M" in the paper; K is UNKNOWN, here 1."""


class T24x8192x16(_Multilingual):
    """T(24, 8192, 16), the deep one of 1.3B parameters, in 4 cells."""

    num_layers = 24
    num_partitions = 4


class T12x16384x32(_Multilingual):
    """T(12, 16384, 32), the wide one of 1.3B parameters, in 2 cells."""

    num_layers = 12
    hidden = 16_384
    heads = 32
    num_partitions = 2


class T32x16384x32(_Multilingual):
    """T(32, 16384, 32): 3.2B parameters in 8 cells."""

    num_layers = 32
    hidden = 16_384
    heads = 32
    num_partitions = 8


class T64x16384x32(_Multilingual):
    """T(64, 16384, 32): 6.1B parameters, 128 layers, in 16 cells."""

    num_layers = 64
    hidden = 16_384
    heads = 32
    num_partitions = 16
