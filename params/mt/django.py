"""Django's message catalogues: 96 languages to English, with nothing to download.

A smoke test, from text to a trained model in about five minutes on two cores. With under a thousand
English messages it does not measure how well a model translates. They are split by the English
message: no English sentence of an evaluation was a training target in any language.

Needs the extra `mt`, which brings Django. The first run prepares the records in `--data_dir`, by
default data/django.
"""

from __future__ import annotations

from lingvo_gpipe import registry
from lingvo_gpipe.params.mt import small
from lingvo_gpipe.tasks.mt import task as mt_task
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model import transformer
from lingvo_gpipe.tasks.mt.text import preparation
from lingvo_gpipe.tasks.mt.text.corpora import django_catalogues
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining

VOCABULARY = 4_000
UNITS = 128
MAX_STEPS = 350


class Tiny(registry.Model):
    """T(2, 512, 2) of 128 units with one table, 1.4M parameters: a smoke test."""

    def task(self) -> mt_task.TranslationTask.Params:
        """Return the task."""
        return small.translation(
            transformer.TranslationTransformer(
                num_layers=2,
                hidden=512,
                heads=2,
                vocabulary=VOCABULARY,
                units=UNITS,
                tie="all",
                packed=True,
            ),
            Translation.Params(
                data_dir="data/django",
                preparation=preparation.Preparation.Params(
                    corpora=[django_catalogues.Django.Params()],
                    vocabulary=VocabularyTraining(size=VOCABULARY, sentences=60_000),
                ),
                batch_size=4096,
                max_length=128,
                packing=True,
            ),
            small.TrainingPlan(
                max_steps=MAX_STEPS,
                peak_learning_rate=3e-3,
                warmup_steps=70,
                average_decay=0.96,
                evaluations=3,
            ),
        )
