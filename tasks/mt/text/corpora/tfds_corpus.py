"""Translation datasets of TensorFlow Datasets by name, such as `wmt14_translate/de-en`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks import tfds_preparing
from lingvo_gpipe.tasks.mt.text.corpora.corpus import Corpus, Languages, all_pairs
from lingvo_gpipe.tasks.mt.text.corpora.faults import Faults, SentencePair
from lingvo_gpipe.tasks.tfds_preparing import one_line

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Example: TypeAlias = Mapping[str, Any]  # one example of TFDS, as numpy

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

    def sentence_pairs(
        self, split: str, wanted: Mapping[Languages, Faults]
    ) -> Iterator[tuple[Languages, SentencePair]]:
        """Yield the sentence pairs of a split; see `Corpus.sentence_pairs`."""
        tfds_split = self._split_names.get(split, split)
        for number, example in enumerate(self._examples(tfds_split)):
            where = f"{self.name} {tfds_split}:{number}"
            texts = self._texts(example)
            for languages, faults in wanted.items():
                if texts.keys() >= set(languages):
                    more = [name for name in languages if len(texts[name]) > 1]
                    if more:
                        what = f"all but the first sentence in {' and '.join(more)} is left out"
                        faults.record("repeated", where, what)
                    sentences = [texts[name][0] for name in languages]
                    pair = faults.texts(sentences, (where, where))
                    if pair is not None:
                        yield languages, SentencePair(*pair, where)

    def _examples(self, tfds_split: str) -> Iterator[Example]:
        """Yield the examples of one of TFDS' splits."""
        import tensorflow as tf  # takes seconds, and few corpora need it

        try:
            dataset = self._builder.as_dataset(split=tfds_split, shuffle_files=False)
        except ValueError:
            splits = ", ".join(self._builder.info.splits)
            raise errors.InputError(
                f"TFDS dataset {self.name!r} has no split {tfds_split!r}; it has {splits}"
            ) from None
        number = 0
        try:
            for number, example in enumerate(self._tfds.as_numpy(dataset), 1):  # noqa: B007
                yield example
        except tf.errors.OpError as error:
            raise errors.InputError(
                f"TFDS dataset {self.name!r} cannot be read after example {number} of split "
                f"{tfds_split!r}: {one_line(error)}. Remove {self._builder.data_path} and "
                "prepare it again"
            ) from error

    def _texts(self, example: Example) -> dict[str, list[bytes]]:
        """Return language → its sentences in one example."""
        key = self._nested
        if key is None:
            return {language: [example[language]] for language in self._languages}
        translations, texts = example[key], dict[str, list[bytes]]()
        both = zip(translations["language"], translations["translation"], strict=True)
        for language, text in both:
            texts.setdefault(language.decode(), []).append(text)
        return texts

    @functools.cached_property
    def _split_names(self) -> dict[str, str]:
        names = {_SPLIT_NAMES.get(name, name): name for name in self._builder.info.splits}
        return self.params.split_names or names

    @functools.cached_property
    def _tfds(self) -> ModuleType:
        import tensorflow_datasets  # takes seconds, and few corpora need it

        return tensorflow_datasets

    @functools.cached_property
    def _nested(self) -> str | None:
        """The feature that holds sentences by language; None: each language is a feature."""
        features = self._builder.info.features
        kind = self._tfds.features.TranslationVariableLanguages
        return next((name for name, each in features.items() if isinstance(each, kind)), None)

    @functools.cached_property
    def _languages(self) -> tuple[str, ...]:
        features = self._builder.info.features
        if self._nested is not None:
            return tuple(sorted(features[self._nested].languages))
        if isinstance(features, self._tfds.features.Translation):
            return tuple(sorted(features.languages))
        raise errors.InputError(
            f"TFDS dataset {self.name!r} is not a translation dataset: its features are "
            f"{', '.join(features)}. Use another"
        )

    @functools.cached_property
    def _builder(self) -> tfds.core.DatasetBuilder:
        builder: tfds.core.DatasetBuilder = tfds_preparing.builder_of(
            self.params.dataset, self.params.tfds_dir
        )
        tfds_preparing.prepare(builder, self.params.tfds_dir, download=self.params.download)
        return builder
