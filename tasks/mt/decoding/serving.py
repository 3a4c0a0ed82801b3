"""Serving: a translation model from ids to ids, and from strings to strings, by search in-graph.

The model from ids to ids needs TensorFlow alone. The one from strings to strings has the operations
of tensorflow-text, without which it does not load, so it is a SavedModel of its own, below `text`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.input import Function, Program
from lingvo_gpipe.tasks.mt.decoding import incremental, search
from lingvo_gpipe.tasks.mt.text import vocabulary

TEXT = "text"
_SPAN = 16  # tokens of a side in the analysis; what is served may have any number


def program(
    vocabulary: vocabulary.Vocabulary, settings: search.Search, target_tokens: bool
) -> Program:
    """Return how an exported translation model is called.

    From ids to ids: source [B, S] int32, each row ending in </s>, 0 behind it → target [B, T] int32
    without <s>, 0 behind </s>, and score [B]. From strings to strings: text [B] → translation [B]
    and score [B]; of a blank text an empty translation and 0.

    Args:
        vocabulary: of both sides.
        settings: how translations are searched.
        target_tokens: sources begin with <2xx>: text comes with target_language [B], such as `de`.
    """
    text, note = _text()
    tokens = tf.TensorSpec([1, _SPAN], tf.int32)

    def functions(network: Any) -> list[Function]:
        translate = _Translate(network, settings, len(vocabulary.targets))
        found = [Function({"source": tf.TensorSpec([None, None], tf.int32)}, translate)]
        if text is not None:
            found.append(_of_strings(Tokenizer(vocabulary, text), translate, target_tokens))
        return found

    return Program({"source": tokens, "target": tokens}, functions, note)


class Tokenizer:
    """A vocabulary in-graph: what `Vocabulary.encode_source` and `decode` do, by tensorflow-text.

    Attributes:
        resource: trackable; a SavedModel holds the vocabulary by it.
    """

    def __init__(self, vocabulary: vocabulary.Vocabulary, text: Any) -> None:
        """Take the vocabulary.

        Args:
            vocabulary: of both sides.
            text: the module tensorflow_text.
        """
        self.resource = text.SentencepieceTokenizer(vocabulary.proto, out_type=tf.int32)
        self._targets = {name: vocabulary.target_id(name) for name in vocabulary.targets}

    def encode(self, texts: tf.Tensor, languages: tf.Tensor | None = None) -> tf.Tensor:
        """Return sources as the encoder reads them, [B, S] int32, 0 behind </s>.

        Args:
            texts: [B].
            languages: [B], their target tokens; None: no target token.
        """
        side = [tf.shape(texts)[0], 1]
        parts = [self.resource.tokenize(texts), tf.fill(side, vocabulary.END)]
        if languages is not None:
            parts.insert(0, self._target_ids(languages)[:, tf.newaxis])
        return tf.concat(parts, 1).to_tensor(vocabulary.PAD)

    def is_blank(self, texts: tf.Tensor) -> tf.Tensor:
        """Tell which texts [B] have no piece."""
        return tf.equal(self.resource.tokenize(texts).row_lengths(), 0)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the texts [B] of ids [B, T]: up to </s>, reserved ids left out."""
        ended = tf.cumsum(tf.cast(tf.equal(ids, vocabulary.END), tf.int32), 1) > 0
        kept = tf.logical_and(tf.logical_not(ended), ids > vocabulary.UNKNOWN)
        return self.resource.detokenize(tf.ragged.boolean_mask(ids, kept))

    def _target_ids(self, languages: tf.Tensor) -> tf.Tensor:
        names, ids = list(self._targets), list(self._targets.values())
        hits = tf.equal(languages[:, tf.newaxis], tf.constant(names))
        known = f"target_language must be one of {', '.join(names)}"
        with tf.control_dependencies([tf.debugging.Assert(_all_found(hits), [known])]):
            return tf.gather(tf.constant(ids, tf.int32), tf.argmax(hits, 1))


def _all_found(hits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.reduce_any(hits, 1))


class _Translate:
    """source [B, S] → target [B, T] and score [B]."""

    def __init__(self, network: Any, settings: search.Search, controls: int) -> None:
        self._weights = network.by_path
        self._controls = controls
        self._settings = settings
        self._decoder = incremental.Incremental(network.analysis, settings.max_length)

    def __call__(self, source: tf.Tensor) -> dict[str, tf.Tensor]:
        ids, score = search.translate(
            self._decoder, self._weights, source, self._settings, controls=self._controls
        )
        return {"target": ids, "score": score}


def _of_strings(tokenizer: Tokenizer, translate: _Translate, target_tokens: bool) -> Function:
    def call(text: tf.Tensor, target_language: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        told = translate(tokenizer.encode(text, target_language))
        # Of nothing a model would make something up.
        blank = tokenizer.is_blank(text)
        return {
            "translation": tf.where(blank, "", tokenizer.decode(told["target"])),
            "score": tf.where(blank, 0.0, told["score"]),
        }

    names = ("text", "target_language") if target_tokens else ("text",)
    signature = {name: tf.TensorSpec([None], tf.string) for name in names}
    return Function(signature, call, folder=TEXT, resources=(tokenizer.resource,))


def _text() -> tuple[Any, tuple[str, ...]]:
    """Return the module tensorflow_text, or None and why it cannot be had."""
    try:
        import tensorflow_text
    except ImportError:
        why = "tensorflow-text is not installed"
    except tf.errors.NotFoundError as error:
        why = f"tensorflow-text does not fit this TensorFlow ({error.message.splitlines()[0]})"
    else:
        return tensorflow_text, ()
    told = f"{why}: pip install 'lingvo-gpipe[text]' adds a model from strings to strings"
    return None, (told,)
