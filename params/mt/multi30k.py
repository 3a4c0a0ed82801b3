"""Multi30k, captions of images: German, French and Czech to English, in one model or three.

29,000 captions in four languages (Elliott et al. 2016, 2017; Barrault et al. 2018), in folders of
`LANG.SPLIT.txt`, one for each pair of languages: data/multi30k_text/de holds de.train.txt and
en.train.txt, and the same for valid and test; `test` is test_2016. The first run prepares the
records in data/multi30k; all models share them and their vocabulary, and so have equal sizes.

Label smoothing of 0.1 and dropout of 0.3 are usual for small Transformers on this set (Wu et al.
2021, "Good for Misconceived Reasons"). Chosen, for two cores and at most forty minutes a model:
size, learning rate, updates, averages.
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
UNITS = 256
TOKENS = 4_096  # of a mini-batch on either side, padding included
MAX_STEPS = 1_600  # of that many tokens; fewer of larger mini-batches


def _task(pairs: tuple[str, ...], accumulate: int = 1) -> mt_task.TranslationTask.Params:
    """Return the task on these pairs of languages.

    The decay is set so that averages span equally many tokens at any `accumulate`.
    """
    max_steps = MAX_STEPS // accumulate
    return small.translation(
        transformer.TranslationTransformer(
            num_layers=3,
            hidden=512,
            heads=4,
            vocabulary=VOCABULARY,
            units=UNITS,
            tie="all",
            dropout=0.3,
        ),
        Translation.Params(
            data_dir="data/multi30k",
            preparation=preparation.Preparation.Params(
                corpora=[text_files.TranslateFolder.Params(folder="data/multi30k_text")],
                vocabulary=VocabularyTraining(size=VOCABULARY, sentences=120_000),
            ),
            pairs=pairs,
            batch_size=TOKENS,
            max_length=64,
            num_shapes=4,
        ),
        small.TrainingPlan(
            max_steps=max_steps,
            peak_learning_rate=2.5e-3,
            warmup_steps=max_steps // 5,
            average_decay=0.99**accumulate,
            accumulate=accumulate,
        ),
    )


class Multilingual(registry.Model):
    """German, French and Czech to English in one model, trained as long as each bilingual one."""

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return _task(("cs:en", "de:en", "fr:en"))


class De(registry.Model):
    """German to English, 4,096 tokens an update."""

    accumulate = 1

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task: the same number of tokens, and of warm-up tokens, at any size."""
        return _task(("de:en",), self.accumulate)


class Batch16k(De):
    """German to English, 16,384 tokens an update."""

    accumulate = 4


class Batch64k(De):
    """German to English, 65,536 tokens an update."""

    accumulate = 16


class Fr(registry.Model):
    """French to English."""

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return _task(("fr:en",))


class Cs(registry.Model):
    """Czech to English."""

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return _task(("cs:en",))
