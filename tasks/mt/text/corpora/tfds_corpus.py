"""Translation datasets of TensorFlow Datasets by name, such as `wmt14_translate/de-en`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks import tfds_preparing
from lingvo_gpipe.tasks.mt.text.corpora.corpus import (
    Corpus,
    Example,
    Faults,
    Languages,
    Sentence,
    all_pairs,
)

_SPLIT_NAMES = {"validation": "valid"}  # TFDS' name → the recipes' name


class TFDSCorpus(Corpus):
    """A translation dataset by its name: two or more aligned languages.

    Also `ted_multi_translate` and similar datasets, in which each example has some of many
    languages. The dataset is downloaded and prepared at its first use unless `tfds_dir` has it.
    """

    class Params(Corpus.Params):
        """Fields of TFDSCorpus."""

        dataset: str = hyperparams.required("Name, as `tfds.builder` takes it.")
        tfds_dir: str = hyperparams.field(
            "~/tensorflow_datasets", "Folder of prepared datasets; downloads go there."
        )
        download: bool = hyperparams.field(
            True, "Downloads and prepares the dataset if it is not in tfds_dir."
        )
        split_names: dict[str, str] = hyperparams.field(
            {}, "Split → TFDS' name; empty: TFDS' names, but `valid` for TFDS' `validation`."
        )

    params: Params

    @property
    def name(self) -> str:
        """Name in manifests and messages."""
        return self.params.dataset

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self._split_names)

    def pairs(self, split: str) -> frozenset[Languages]:
        """Return the pairs of languages of a split, each in both directions."""
        del split
        return all_pairs(self._languages)

    def examples(
        self, split: str, pairs: Collection[Languages], faults: Faults
    ) -> Iterator[Example]:
        """Yield the examples of a split; see `Corpus.examples`."""
        import tensorflow_datasets as tfds  # takes seconds, and few corpora need it

        del pairs
        tfds_split = self._split_names[split]
        number = 0
        try:
            dataset = self._builder.as_dataset(split=tfds_split, shuffle_files=False)
            for number, example in enumerate(tfds.as_numpy(dataset)):
                where = f"{self.name} {tfds_split}:{number}"
                if self._nested is None:
                    yield where, {language: example[language] for language in self._languages}
                    continue
                texts: dict[str, Sentence] = {}
                both = example[self._nested]
                for code, text in zip(both["language"], both["translation"], strict=True):
                    if texts.setdefault(code.decode(), text) is not text:
                        what = f"another sentence in {code.decode()} is left out"
                        faults.record("repeated", where, what)
                yield where, texts
        except (ValueError, tf.errors.OpError) as error:
            raise errors.InputError(
                f"TFDS dataset {self.name!r}: split {tfds_split!r} cannot be read after example "
                f"{number}: {tfds_preparing.one_line(error)}. Name another split, or prepare the "
                "dataset again"
            ) from error

    @functools.cached_property
    def _split_names(self) -> dict[str, str]:
        if self.params.split_names:
            return self.params.split_names
        return {_SPLIT_NAMES.get(name, name): name for name in self._builder.info.splits}

    @functools.cached_property
    def _nested(self) -> str | None:
        """The feature that holds sentences by language; None: each language is a feature."""
        for name, feature in self._builder.info.features.items():
            if type(feature).__name__ == "TranslationVariableLanguages":
                return str(name)
        return None

    @functools.cached_property
    def _languages(self) -> tuple[str, ...]:
        features = self._builder.info.features
        translations = features if self._nested is None else features[self._nested]
        if not hasattr(translations, "languages"):
            raise errors.InputError(
                f"TFDS dataset {self.name!r} is not a translation dataset: its features are "
                f"{', '.join(features)}. Use another"
            )
        return tuple(sorted(translations.languages))

    @functools.cached_property
    def _builder(self) -> Any:
        params = self.params
        builder = tfds_preparing.builder_of(params.dataset, params.tfds_dir)
        tfds_preparing.prepare(builder, params.tfds_dir, download=params.download)
        return builder
