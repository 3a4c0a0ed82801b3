"""Multi30k, captions of images: German, French and Czech to English, in one model or three.

29,000 captions in four languages (Elliott et al. 2016, 2017; Barrault et al. 2018), which lie in
folders of `LANG.SPLIT.txt`, one for each pair of languages: data/multi30k_text/de/de.train.txt
beside en.train.txt, valid and test, where `test` is test_2016. The first run prepares the records
in data/multi30k; all models share them and their vocabulary, and so have equal sizes.

Label smoothing of 0.1 and dropout of 0.3 are what small Transformers have on this set (Wu et al.
2021, "Good for Misconceived Reasons"). Chosen, for two cores and forty minutes a model at most:
size, rate, updates, averages.
"""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import registry
from lingvo_gpipe.params.mt import small
from lingvo_gpipe.tasks.mt import corpus, preparation, transformer, vocabulary
from lingvo_gpipe.tasks.mt import input as mt_input

VOCABULARY = 8_000
UNITS = 256
TOKENS = 4_096  # of a mini-batch on either side, padding included
MAX_STEPS = 2_000
# Of the comparison of batch sizes, at which every model has seen the same number of tokens.
UPDATES_OF_64K = 100


def _task(
    pairs: tuple[str, ...], max_steps: int, accumulate: int = 1, warmup_share: float = 0.2
) -> Any:
    """Return the task on these pairs of languages; the average reaches back equally many tokens."""
    return small.translation(
        transformer.translation_transformer(
            3, 512, 4, VOCABULARY, units=UNITS, tie="all", dropout=0.3
        ),
        mt_input.Translation.Params(
            data_dir="data/multi30k",
            preparation=preparation.Preparation.Params(
                corpora=[corpus.TranslateFolder.Params(folder="data/multi30k_text")],
                vocabulary=vocabulary.Training(size=VOCABULARY, sentences=120_000),
            ),
            pairs=pairs,
            batch_size=TOKENS,
            max_length=64,
            num_shapes=4,
        ),
        max_steps=max_steps,
        units=UNITS,
        peak=2.5e-3,
        warmup_steps=max(1, round(warmup_share * max_steps)),
        average=0.997**accumulate,
        accumulate=accumulate,
    )


class Multilingual(registry.Model):
    """German, French and Czech to English in one model, as long as each bilingual one."""

    def task(self) -> Any:
        """Return the task."""
        return _task(("cs:en", "de:en", "fr:en"), MAX_STEPS)


class De(registry.Model):
    """German to English."""

    def task(self) -> Any:
        """Return the task."""
        return _task(("de:en",), MAX_STEPS)


class Fr(registry.Model):
    """French to English."""

    def task(self) -> Any:
        """Return the task."""
        return _task(("fr:en",), MAX_STEPS)


class Cs(registry.Model):
    """Czech to English."""

    def task(self) -> Any:
        """Return the task."""
        return _task(("cs:en",), MAX_STEPS)


class Batch4k(registry.Model):
    """German to English, 4,096 tokens an update; as many tokens in all as its larger batches."""

    accumulate = 1

    def task(self) -> Any:
        """Return the task: equal peak rate, and a rise over an equal share of the tokens."""
        updates = UPDATES_OF_64K * 16 // self.accumulate
        return _task(("de:en",), updates, self.accumulate)


class Batch16k(Batch4k):
    """German to English, 16,384 tokens an update."""

    accumulate = 4


class Batch64k(Batch4k):
    """German to English, 65,536 tokens an update."""

    accumulate = 16
