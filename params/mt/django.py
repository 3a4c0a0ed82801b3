"""Django's message catalogues: 96 languages to English, with nothing to download.

A smoke test, from text to a trained model in about five minutes on two cores: under a thousand
English messages say nothing about how well a model translates. They are split by the English
message, so that no English sentence that is evaluated was a target in training, in whatever
language.

Needs the extra `mt`, which brings Django. The first run prepares the records in data/django, or in
the folder that `--data_dir` names.
"""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import registry
from lingvo_gpipe.params.mt import small
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer
from lingvo_gpipe.tasks.mt.text import catalogues, preparation, vocabulary

VOCABULARY = 4_000
UNITS = 128
MAX_STEPS = 350


class Tiny(registry.Model):
    """T(2, 512, 2) of 128 units with one table, 1.4M parameters: a smoke test."""

    def task(self) -> Any:
        """Return the task."""
        return small.translation(
            transformer.translation_transformer(
                2, 512, 2, VOCABULARY, units=UNITS, tie="all", packed=True
            ),
            Translation.Params(
                data_dir="data/django",
                preparation=preparation.Preparation.Params(
                    corpora=[catalogues.Django.Params()],
                    vocabulary=vocabulary.Training(size=VOCABULARY, sentences=60_000),
                ),
                batch_size=4096,
                max_length=128,
                packing=True,
            ),
            max_steps=MAX_STEPS,
            units=UNITS,
            peak=3e-3,
            warmup_steps=70,
            average=0.96,
            evaluations=3,
        )
