"""Many languages to English, at a size that two cores train in an hour: wide against deep.

Two models of equal parameter count, as T(12, 16384, 32) and T(24, 8192, 16) of Huang et al. 2019
are: the deep one has twice the layers, each with half the feed-forward units and half the heads.
The source has an embedding of its own, which hundreds of languages share; target embedding and
softmax are one table.

The text is in folders of `LANG.SPLIT.txt`, one for each language: data/many_text/sw holds
sw.train.txt and en.train.txt, and the same for valid and test. The first run prepares the records
in data/many. Languages are sampled with T = 5; --params_override=input.temperature=1 samples in
proportion to their sizes.
"""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.mt import small
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer
from lingvo_gpipe.tasks.mt.text import preparation
from lingvo_gpipe.tasks.mt.text.corpora import text_files
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining

VOCABULARY = 8_000
UNITS = 192
MAX_STEPS = 2_000


class ShallowWide(registry.Model):
    """T(3, 768, 4) of 192 units: 6.6M parameters in 6 layers."""

    num_layers = 3
    hidden = 768
    heads = 4

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return small.translation(
            transformer.TranslationTransformer(
                num_layers=self.num_layers,
                hidden=self.hidden,
                heads=self.heads,
                vocabulary=VOCABULARY,
                units=UNITS,
                tie="softmax",
                packed=True,
            ),
            Translation.Params(
                data_dir="data/many",
                preparation=preparation.Preparation.Params(
                    corpora=[text_files.TranslateFolder.Params(folder="data/many_text")],
                    vocabulary=VocabularyTraining(size=VOCABULARY, sentences=200_000),
                ),
                batch_size=4096,
                temperature=5.0,
                max_length=128,
                packing=True,
            ),
            small.TrainingPlan(
                max_steps=MAX_STEPS,
                peak_learning_rate=2.5e-3,
                warmup_steps=MAX_STEPS // 5,
                average_decay=0.995,
                evaluations=4,  # evaluating the held-out text of all languages takes minutes
            ),
        )


class DeepNarrow(ShallowWide):
    """T(6, 384, 2) of 192 units: 6.6M parameters in 12 layers."""

    num_layers = 6
    hidden = 384
    heads = 2
