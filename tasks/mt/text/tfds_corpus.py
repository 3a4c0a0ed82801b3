"""Translation datasets of TensorFlow Datasets by name, such as `wmt14_translate/de-en`."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.tasks.mt.text import corpus

_NAMES = {"validation": "valid"}  # as recipes call it
# What TensorFlow puts around a message: the operation that it is from.
_OPERATION = re.compile(r"\{\{.*?\}\} ?| ?\[Op:.*")


class TFDS(corpus.Corpus):
    """A translation dataset by its name: two or more languages side by side.

    `ted_multi_translate` and its like, of which each example has some of many languages, too. It
    is downloaded and prepared when it is first used, unless it lies in `tfds_dir` already.
    """

    class Params(corpus.Corpus.Params):
        """Fields of TFDS."""

        dataset: str = hyperparams.required("Name, as `tfds.builder` takes it.")
        tfds_dir: str = hyperparams.field("~/tensorflow_datasets", "Where it is, or is put.")
        download: bool = hyperparams.field(
            True, "Downloads and prepares the dataset if it is not in tfds_dir."
        )
        split_names: dict[str, str] = hyperparams.field(
            {}, "Split → TFDS' own; empty: as they are, but `valid` is TFDS' `validation`."
        )

    @property
    def name(self) -> str:
        """What it is called in manifests and messages."""
        return self.params.dataset

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self._split_names)

    def pairs(self, split: str) -> frozenset[corpus.Languages]:
        """Return the pairs of languages of a split, each both ways round."""
        del split
        languages = self._languages
        return frozenset((one, other) for one in languages for other in languages if one != other)

    def sides(
        self, split: str, wanted: Mapping[corpus.Languages, corpus.Faults]
    ) -> Iterator[tuple[corpus.Languages, corpus.Pair]]:
        """Yield the pairs of sentences of a split; see `Corpus.sides`."""
        own = self._split_names.get(split, split)
        for number, example in enumerate(self._examples(own)):
            where = f"{self.name} {own}:{number}"
            texts = self._texts(example)
            for languages, faults in wanted.items():
                if texts.keys() >= set(languages):
                    more = [name for name in languages if len(texts[name]) > 1]
                    if more:
                        what = f"all but the first sentence in {' and '.join(more)} is left out"
                        faults.found("repeated", where, what)
                    sides = faults.texts([texts[name][0] for name in languages], (where, where))
                    if sides is not None:
                        yield languages, corpus.Pair(*sides, where)

    def _examples(self, own: str) -> Iterator[dict[str, Any]]:
        """Yield the examples of one of TFDS' splits."""
        import tensorflow as tf  # takes seconds, and few corpora need it

        try:
            dataset = self._builder.as_dataset(split=own, shuffle_files=False)
        except ValueError:
            there = ", ".join(self._builder.info.splits)
            raise errors.InputError(
                f"TFDS dataset {self.name!r} has no split {own!r}; there are {there}"
            ) from None
        number = 0
        try:
            for number, example in enumerate(self._tfds.as_numpy(dataset), 1):  # noqa: B007
                yield example
        except tf.errors.OpError as error:
            reason = _OPERATION.sub("", _first_line(error))
            raise errors.InputError(
                f"TFDS dataset {self.name!r} cannot be read after example {number} of split "
                f"{own!r}: {reason}. Remove {self._builder.data_path} and prepare it again"
            ) from error

    def _texts(self, example: dict[str, Any]) -> dict[str, list[bytes]]:
        """Return language → its sentences of one example."""
        key = self._nested
        if key is None:
            return {language: [example[language]] for language in self._languages}
        found, texts = example[key], dict[str, list[bytes]]()
        for language, text in zip(found["language"], found["translation"], strict=True):
            texts.setdefault(language.decode(), []).append(text)
        return texts

    @functools.cached_property
    def _split_names(self) -> dict[str, str]:
        names = {_NAMES.get(own, own): own for own in self._builder.info.splits}
        return self.params.split_names or names

    @functools.cached_property
    def _tfds(self) -> Any:
        import tensorflow_datasets  # takes seconds, and few corpora need it

        return tensorflow_datasets

    @functools.cached_property
    def _nested(self) -> str | None:
        """Return the feature that holds sentences by language; None: each is its own feature."""
        features = self._builder.info.features
        kind = self._tfds.features.TranslationVariableLanguages
        return next((name for name, found in features.items() if isinstance(found, kind)), None)

    @functools.cached_property
    def _languages(self) -> tuple[str, ...]:
        features = self._builder.info.features
        if self._nested is not None:
            return tuple(sorted(features[self._nested].languages))
        if isinstance(features, self._tfds.features.Translation):
            return tuple(sorted(features.languages))
        raise errors.InputError(
            f"TFDS dataset {self.name!r} is no translation: its features are "
            f"{', '.join(features)}. Give another"
        )

    @functools.cached_property
    def _builder(self) -> Any:
        tfds, name = self._tfds, self.params.dataset
        try:
            builder = tfds.builder(name, data_dir=os.path.expanduser(self.params.tfds_dir))
        except tfds.core.DatasetNotFoundError:
            # TFDS' own message lists its whole catalogue.
            known = tfds.list_builders(with_community_datasets=False)
            near = errors.nearest(re.split("[/:]", name)[0], known)
            told = f"nearest {', '.join(near)}" if near else f"it knows {len(known)} others"
            raise errors.InputError(f"TFDS has no dataset {name!r}; {told}") from None
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise errors.InputError(f"TFDS dataset {name!r}: {_first_line(error)}") from error
        if not builder.is_prepared():
            self._prepare(builder)
        return builder

    def _prepare(self, builder: Any) -> None:
        where = f"TFDS dataset {self.name!r} is not prepared in {self.params.tfds_dir}"
        if not self.params.download:
            raise errors.InputError(f"{where}. Set download=True, or another tfds_dir")
        try:
            builder.download_and_prepare()
        except Exception as error:  # a builder may raise anything
            raise errors.InputError(
                f"{where}, and preparing it failed: {_first_line(error)}. Prepare it elsewhere and "
                "give its folder as tfds_dir"
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
