"""One language to English: the baseline of Huang et al. 2019, section 5, and its large batches.

Known: T(6, 8192, 16) on 32,000 pieces, which is the group's Transformer Big; the tokens of an
update in Table 5 (German to English), "identical optimisation parameters". UNKNOWN: these
parameters, K, M, and whether equal steps or equal tokens were compared. Chosen: Adam as Lingvo
trains translation, the learning rate of the multilingual models, equal steps.

Records are read from `--data_dir`, by default data/bilingual.
`'--params_override=input.pairs=("fr:en",)'` selects another language.
"""

from __future__ import annotations

from lingvo_gpipe import optim, pipelining, registry, task
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.decoding import scores
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer

VOCABULARY = 32_000


class _Big(registry.Model):
    """T(6, 8192, 16) on rows of 256 tokens, several sentences each."""

    num_partitions = 1
    num_micro_batches = 8
    accumulate = 4  # mini-batches of 65,536 tokens

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return mt_task.TranslationTask.Params(
            model=pipelining.PipeliningLayer.Params(
                layers=transformer.translation_transformer(
                    transformer.TranslationTransformer(
                        num_layers=6, hidden=8192, heads=16, vocabulary=VOCABULARY, packed=True
                    )
                ),
                num_partitions=self.num_partitions,
                num_micro_batches=self.num_micro_batches,
                schedule="1f1b",
            ),
            input=Translation.Params(
                data_dir="data/bilingual",
                pairs=("de:en",),
                batch_size=65_536,
                max_length=256,
                multiple_of=self.num_micro_batches,
                packing=True,
            ),
            train=task.Train(
                optimizer=optim.Optimizer.Params(
                    name="Adam",
                    config={"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-9},
                    learning_rate=optim.InverseSquareRoot.Params(
                        factor=3.0, units=1024, warmup_steps=40_000
                    ),
                ),
                accumulate=self.accumulate,
                max_steps=300_000,
                save_interval_steps=1_000,
            ),
            eval=task.Eval(split="valid", best="log_perplexity", best_is="lowest"),
            score=scores.Scoring(split="test"),
        )


class T6x8192x16(_Big):
    """375M parameters, "350M" in the introduction: the multilingual model's baseline."""


class DeEn260k(_Big):
    """262,144 tokens an update: BLEU 30.92 in Table 5."""


class DeEn1m(_Big):
    """1,048,576 tokens an update: BLEU 31.86 in Table 5."""

    accumulate = 16


class DeEn4m(_Big):
    """4,194,304 tokens an update: BLEU 32.71 in Table 5."""

    accumulate = 64
