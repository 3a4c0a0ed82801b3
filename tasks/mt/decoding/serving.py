"""Serving: exported translation models, from ids to ids and from strings to strings.

Both contain the beam search. The model from ids to ids needs only TensorFlow. The model from
strings to strings can be loaded only with tensorflow-text; it is a separate SavedModel, in the
folder `text`.
"""

from __future__ import annotations

from types import ModuleType

import tensorflow as tf

from lingvo_gpipe.input.serving import Function, Program, ServedNetwork
from lingvo_gpipe.tasks.mt.decoding import incremental, search
from lingvo_gpipe.tasks.mt.text.vocabulary import END, PAD, UNKNOWN, Vocabulary

TEXT = "text"
_LENGTH = 16  # length of source and target in the analysis; served ones may have any length


def program(vocabulary: Vocabulary, settings: search.Search, target_tokens: bool) -> Program:
    """Return how an exported translation model is called.

    From ids to ids: source [B, S] int32, each row ending in </s>, 0 after it → target [B, T] int32
    without <s>, 0 after </s>, and score [B]. From strings to strings: text [B] → translation [B]
    and score [B]; a blank text has an empty translation and score 0.

    Args:
        vocabulary: vocabulary of sources and targets.
        settings: settings of the search.
        target_tokens: sources begin with <2xx>, so texts need target_language [B], such as `de`.
    """
    tokens = tf.TensorSpec([1, _LENGTH], tf.int32)

    def functions(network: ServedNetwork) -> list[Function]:
        translate = _Translate(network, settings, len(vocabulary.targets))
        served = [Function({"source": tf.TensorSpec([None, None], tf.int32)}, translate)]
        text, _ = _import_tensorflow_text()
        if text is not None:
            served.append(_of_strings(Tokenizer(vocabulary, text), translate, target_tokens))
        return served

    return Program(
        {"source": tokens, "target": tokens}, functions, lambda: _import_tensorflow_text()[1]
    )


class Tokenizer:
    """`Vocabulary.encode_source` and `decode` as operations of a graph, by tensorflow-text.

    Attributes:
        resource: the trackable object by which a SavedModel stores the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, text: ModuleType) -> None:
        """Load the vocabulary.

        Args:
            vocabulary: vocabulary of sources and targets.
            text: the module tensorflow_text.
        """
        self.resource = text.SentencepieceTokenizer(vocabulary.proto, out_type=tf.int32)
        self._targets = {name: vocabulary.target_id(name) for name in vocabulary.targets}

    def encode(self, texts: tf.Tensor, languages: tf.Tensor | None = None) -> tf.Tensor:
        """Return sources as the encoder reads them, [B, S] int32, 0 after </s>.

        Args:
            texts: [B].
            languages: [B] target languages; None: no target tokens.
        """
        ends = tf.fill([tf.shape(texts)[0], 1], END)
        parts = [self.resource.tokenize(texts), ends]
        if languages is not None:
            parts.insert(0, self._target_ids(languages)[:, tf.newaxis])
        return tf.concat(parts, 1).to_tensor(PAD)

    def is_blank(self, texts: tf.Tensor) -> tf.Tensor:
        """Return which texts [B] have no piece."""
        return tf.equal(self.resource.tokenize(texts).row_lengths(), 0)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the texts [B] of ids [B, T]: up to </s>, without reserved ids."""
        ended = tf.cumsum(tf.cast(tf.equal(ids, END), tf.int32), 1) > 0
        is_piece = tf.logical_and(tf.logical_not(ended), ids > UNKNOWN)
        return self.resource.detokenize(tf.ragged.boolean_mask(ids, is_piece))

    def _target_ids(self, languages: tf.Tensor) -> tf.Tensor:
        names, ids = list(self._targets), list(self._targets.values())
        hits = tf.equal(languages[:, tf.newaxis], tf.constant(names))
        message = f"target_language must be one of {', '.join(names)}"
        with tf.control_dependencies([tf.debugging.Assert(_all_found(hits), [message])]):
            return tf.gather(tf.constant(ids, tf.int32), tf.argmax(hits, 1))


def _all_found(hits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.reduce_any(hits, 1))


class _Translate:
    """source [B, S] → target [B, T] and score [B]."""

    def __init__(self, network: ServedNetwork, settings: search.Search, controls: int) -> None:
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
        outputs = translate(tokenizer.encode(text, target_language))
        # For an empty source the model would generate an arbitrary translation.
        blank = tokenizer.is_blank(text)
        return {
            "translation": tf.where(blank, "", tokenizer.decode(outputs["target"])),
            "score": tf.where(blank, 0.0, outputs["score"]),
        }

    names = ("text", "target_language") if target_tokens else ("text",)
    signature = {name: tf.TensorSpec([None], tf.string) for name in names}
    return Function(signature, call, folder=TEXT, resources=(tokenizer.resource,))


def _import_tensorflow_text() -> tuple[ModuleType | None, tuple[str, ...]]:
    """Return the module tensorflow_text, or None and a note why it is not available."""
    try:
        import tensorflow_text
    except ImportError:
        why = "tensorflow-text is not installed"
    except tf.errors.NotFoundError as error:
        why = f"tensorflow-text does not fit this TensorFlow ({error.message.splitlines()[0]})"
    else:
        return tensorflow_text, ()
    note = f"{why}: pip install 'lingvo-gpipe[text]' adds a model from strings to strings"
    return None, (note,)
