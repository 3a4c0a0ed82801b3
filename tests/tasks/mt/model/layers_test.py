"""The translation layers against NumPy; padding and packing change nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe.tasks.mt.model.decoder import DecoderLayer
from lingvo_gpipe.tasks.mt.model.embedding import TokenEmbedding
from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer, TransparentEncoderLayer
from lingvo_gpipe.tasks.mt.model.softmax import TranslationSoftmax
from tests.cases import layer_cases
from tests.tasks.mt import toy_model

Array = np.ndarray[Any, Any]
UNITS, HEADS, HEAD_DIM, HIDDEN = 6, 3, 4, 10
BLOCK: dict[str, Any] = {"units": UNITS, "heads": HEADS, "head_dim": HEAD_DIM, "hidden": HIDDEN}
SOURCE = np.array([[5, 7, 3, 9, 0], [4, 0, 0, 0, 0], [2, 2, 8, 0, 0]], np.int32)
TARGET = np.array([[2, 6, 7, 0], [2, 9, 5, 4], [2, 0, 0, 0]], np.int32)
SOURCE_SEGMENT = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 2, 3], [1, 1, 1, 1, 1]], np.int32)
TARGET_SEGMENT = np.array([[1, 2, 2, 0], [1, 1, 2, 3], [1, 1, 0, 0]], np.int32)


# --- NumPy, one sentence, one head and one position at a time -------------------------------------


def np_norm(w: dict[str, Array], name: str, x: Array) -> Array:
    rows = []
    for row in x:
        deviation = np.sqrt(((row - row.mean()) ** 2).mean() + 1e-6)
        rows.append((row - row.mean()) / deviation * w[f"{name}/gamma"] + w[f"{name}/beta"])
    return np.stack(rows)


def np_affine(w: dict[str, Array], name: str, x: Array) -> Array:
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def np_attention(w: dict[str, Array], name: str, x: Array, memory: Array, allowed: Any) -> Array:
    """x: [T, D], memory: [S, E], allowed(t, s) → bool."""
    query = np_affine(w, f"{name}/query", x)
    key, value = (np_affine(w, f"{name}/{part}", memory) for part in ("key", "value"))
    joined = np.zeros((len(x), HEADS * HEAD_DIM))
    for head in range(HEADS):
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        for t in range(len(x)):
            seen = [s for s in range(len(memory)) if allowed(t, s)]
            scores = [query[t, part] @ key[s, part] / HEAD_DIM**0.5 for s in seen]
            shares = np.exp(scores) / np.exp(scores).sum()
            joined[t, part] = sum(p * value[s, part] for p, s in zip(shares, seen, strict=True))
    return np_affine(w, f"{name}/output", joined)


def np_feed_forward(w: dict[str, Array], x: Array) -> Array:
    y = np_norm(w, "feed_forward_norm", x)
    y = np.maximum(np_affine(w, "feed_forward/middle", y), 0.0)
    return x + np_affine(w, "feed_forward/output", y)


def np_encoder(w: dict[str, Array], x: Array, seen: Any) -> Array:
    y = np_norm(w, "attention_norm", x)
    return np_feed_forward(w, x + np_attention(w, "attention", y, y, seen))


def np_decoder(w: dict[str, Array], x: Array, memory: Array, own: Any, other: Any) -> Array:
    y = np_norm(w, "attention_norm", x)
    x = x + np_attention(w, "attention", y, y, own)
    y = np_norm(w, "memory_attention_norm", x)
    return np_feed_forward(w, x + np_attention(w, "memory_attention", y, memory, other))


# --- layers and NumPy -----------------------------------------------------------------------------


@dataclasses.dataclass
class Made:
    """A layer with weights: all of them drawn, biases and norms too, so that each one counts."""

    layer: Any
    theta: dict[str, Any]
    weights: dict[str, Array]

    def run(self, *inputs: Any, training: bool = False) -> Any:
        inputs = tuple(map(tf.convert_to_tensor, inputs))
        ctx = layer_cases.context(training=training)
        return self.layer.run(self.theta, layer_cases.as_read(inputs), ctx)


def make(params: Any, *inputs: Any) -> Made:
    params = params.copy().set(dtype="float64")
    inputs = tuple(map(tf.convert_to_tensor, inputs))
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    meta = layer_cases.meta_of(params, *specs)
    random = np.random.default_rng(7)
    weights = {v.path: random.normal(size=v.shape) * 0.7 for v in meta.variables}
    theta = layer_cases.nested({path: tf.constant(value) for path, value in weights.items()})
    outputs = params.instantiate().run(
        theta, layer_cases.as_read(inputs), layer_cases.context(training=False)
    )
    tf.nest.assert_same_structure(outputs, meta.outputs)
    for value, spec in zip(tf.nest.flatten(outputs), tf.nest.flatten(meta.outputs), strict=True):
        assert (value.shape, value.dtype) == (spec.shape, spec.dtype)
    return Made(params.instantiate(), theta, weights)


def drawn(*shape: int, seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=shape))


def encoder_rows(ids: Array, b: int, packed: bool) -> Any:
    row = ids[b]
    return lambda t, s: row[s] != 0 and (not packed or row[t] == row[s])


@pytest.mark.parametrize(
    ("packed", "source"), [(False, SOURCE), (True, SOURCE_SEGMENT)], ids=("padded", "packed")
)
def test_an_encoder_layer_is_numpy_s(packed: bool, source: Array) -> None:
    x = drawn(3, 5, UNITS, seed=1)
    made = make(EncoderLayer.Params(**BLOCK, packed=packed), x, source)
    found = made.run(x, source).numpy()
    for b in range(3):
        expected = np_encoder(made.weights, x[b].numpy(), encoder_rows(source, b, packed))
        real = source[b] != 0
        assert real.any()
        np.testing.assert_allclose(found[b][real], expected[real], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("packed", "source", "target"),
    [(False, SOURCE, TARGET), (True, SOURCE_SEGMENT, TARGET_SEGMENT)],
    ids=("padded", "packed"),
)
def test_a_decoder_layer_is_numpy_s(packed: bool, source: Array, target: Array) -> None:
    x, memory = drawn(3, 4, UNITS, seed=2), drawn(3, 5, UNITS, seed=3)
    made = make(DecoderLayer.Params(**BLOCK, packed=packed), x, memory, target, source)
    found = made.run(x, memory, target, source).numpy()
    for b in range(3):
        row, other = target[b], source[b]
        expected = np_decoder(
            made.weights,
            x[b].numpy(),
            memory[b].numpy(),
            lambda t, s, row=row: s <= t and row[s] != 0 and (not packed or row[t] == row[s]),
            lambda t, s, row=row, other=other: other[s] != 0 and (not packed or row[t] == other[s]),
        )
        real = row != 0
        np.testing.assert_allclose(found[b][real], expected[real], rtol=1e-10, atol=1e-12)


def test_an_embedding_is_its_table_and_the_positions() -> None:
    ids, position = tf.constant([[5, 1, 0]]), tf.constant([[4, 0, 0]])
    made = make(TokenEmbedding.Params(vocabulary=7, units=4, reads=("ids", "p")), ids, position)
    found = made.run(ids, position).numpy()[0]
    table = made.weights["embedding/table"]
    for t, (number, place) in enumerate(((5, 4), (1, 0), (0, 0))):
        wave = [np.sin(place), np.sin(place / 1e4), np.cos(place), np.cos(place / 1e4)]
        np.testing.assert_allclose(found[t], 2.0 * table[number] + wave, rtol=1e-12)


def test_transparent_shares_travel_and_end_in_the_mixture() -> None:
    """Three layers compared with one mixture of all their outputs."""
    x = drawn(3, 5, UNITS, seed=8)
    vector = np.array([0.4, -0.3, 0.9, 0.1])
    expected_shares = np.exp(vector) / np.exp(vector).sum()
    states: list[Any] = [x]
    carried: list[Any] = []
    for n in range(3):
        params = TransparentEncoderLayer.Params(**BLOCK, num_shares=4 - n)
        inputs = (states[-1], SOURCE, *carried)
        made = make(params, *inputs)
        if n == 0:
            assert made.weights["shares"].shape == (4,)
            made.theta["shares"] = tf.constant(vector)
        else:
            assert "shares" not in made.weights
        plain = make(EncoderLayer.Params(**BLOCK), states[-1], SOURCE)
        plain.theta.update({k: v for k, v in made.theta.items() if k != "shares"})
        expected = plain.run(states[-1], SOURCE)
        outputs = made.run(*inputs)
        states.append(expected)
        if n < 2:
            np.testing.assert_array_equal(outputs[0], expected)
            carried = list(outputs[1:])
            np.testing.assert_allclose(carried[1], expected_shares[n + 1 :], rtol=1e-12)
    mixture = sum(p * state.numpy() for p, state in zip(expected_shares, states, strict=True))
    np.testing.assert_allclose(outputs, mixture, rtol=1e-12)


def test_logits_are_clipped_only_in_training_and_have_no_gradient_beyond() -> None:
    params = TranslationSoftmax.Params(vocabulary=3, logit_clip=2.0, reads=("x",))
    x = tf.constant([[[1.0]]], tf.float64)
    made = make(params, x)
    made.theta.update(
        {
            "kernel": tf.constant([[5.0], [-3.0], [0.5]], tf.float64),
            "bias": tf.zeros([3], tf.float64),
        }
    )
    assert made.run(x).numpy().ravel().tolist() == [5.0, -3.0, 0.5]
    with tf.GradientTape() as tape:
        tape.watch(made.theta["kernel"])
        logits = made.run(x, training=True)
    assert logits.numpy().ravel().tolist() == [2.0, -2.0, 0.5]
    assert tape.gradient(logits, made.theta["kernel"]).numpy().ravel().tolist() == [0.0, 0.0, 1.0]


def test_loss_and_accuracy_are_counted_by_language() -> None:
    params = TranslationSoftmax.Params(
        vocabulary=5,
        languages=("de", "fr", "cs"),
        reads=("x", "label", "weight", "language"),
        label_smoothing=0.1,
    )
    label = np.array([[1, 2, 3], [4, 0, 1], [2, 2, 2], [3, 1, 0]])
    weight = np.array([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    language = np.array([0, 2, 0, 2])
    inputs = tuple(map(tf.constant, (drawn(4, 3, 5, seed=9), label, weight, language)))
    made = make(params, *inputs)
    ctx = layer_cases.context(training=True)
    logits = made.layer.run(made.theta, inputs, ctx)
    log = tf.nn.log_softmax(logits).numpy()
    loss, hits, count = np.zeros(3), np.zeros(3), np.zeros(3)
    for b, t in zip(*weight.nonzero(), strict=True):
        loss[language[b]] -= log[b, t, label[b, t]]
        hits[language[b]] += log[b, t].argmax() == label[b, t]
        count[language[b]] += 1
    specs = (tf.TensorSpec(x.shape, x.dtype) for x in inputs)
    metrics = {m.name: m for m in layer_cases.meta_of(made.layer.params, *specs).metrics}
    for name, total in (("log_perplexity", loss), ("accuracy", hits)):
        sums = ctx.collected.sums[f"language_{name}"]
        np.testing.assert_allclose(sums["total"], total, rtol=1e-12)
        np.testing.assert_array_equal(sums["weight"], count)
        np.testing.assert_allclose(ctx.collected.sums[name]["total"], total.sum(), rtol=1e-12)
        found = metrics[f"language_{name}"].finish(sums).numpy()
        np.testing.assert_allclose(found, [total[0] / count[0], np.nan, total[2] / count[2]])
        curves = metrics[f"language_{name}"].curves(found)
        assert list(curves) == [f"language_{name}/de", f"language_{name}/cs"]
        assert list(curves.values()) == [found[0], found[2]]


# --- padding and packing change nothing -----------------------------------------------------------

SENTENCES = (((5, 7, 3), (2, 6)), ((4,), (2, 9, 5, 8)), ((9, 8, 4, 6), (2,)), ((3, 3), (2, 7, 7)))
SETTINGS: tuple[Any, ...] = (
    {},
    pytest.param({"transparent": "shared"}, marks=pytest.mark.sameness_grid),
    {"transparent": "per_layer"},
)


def network(**settings: Any) -> Any:
    # Transparent attention mixes the outputs of layers; otherwise one layer is as good as two.
    count = 2 if settings.get("transparent") else 1
    flat = toy_model.transformer_layers(
        count, HIDDEN, HEADS, 11, units=UNITS, head_dim=HEAD_DIM, **settings
    )
    return pipelining.PipeliningLayer.Params(layers=flat, dtype="float64", seed=4).instantiate()


def batch(rows: list[list[tuple[Any, Any]]], source_span: int, target_span: int) -> dict[str, Any]:
    """Return fields whose rows hold these pairs of sentences, segments and positions too."""
    found: dict[str, Array] = {}
    for side, place, span in (("source", 0, source_span), ("target", 1, target_span)):
        ids, segment, position = np.zeros((3, len(rows), span), np.int32)
        for b, pairs in enumerate(rows):
            start = 0
            for number, pair in enumerate(pairs):
                part = slice(start, start + len(pair[place]))
                ids[b, part] = pair[place]
                segment[b, part] = number + 1
                position[b, part] = range(len(pair[place]))
                start = part.stop
        found |= {side: ids, f"{side}_segment": segment, f"{side}_position": position}
    found["label"] = (found["target"] * 3 + 1) % 11 * (found["target"] > 0)
    found["weight"] = (found["target"] > 0).astype(np.float64)
    return {name: tf.constant(value) for name, value in found.items()}


@functools.cache
def apart(transparent: str | None) -> list[Array]:
    """Return the logits of each sentence on its own, without padding.

    Each has a shape of its own, which is traced by itself.
    """
    pipe = network(transparent=transparent)
    return [
        pipe(batch([[pair]], len(pair[0]), len(pair[1])), training=False)[0].numpy()
        for pair in SENTENCES
    ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_padding_changes_nothing(settings: Any) -> None:
    pipe = network(**settings)
    fields = batch([[pair] for pair in SENTENCES], 6, 7)
    logits = pipe(fields, training=False).numpy()
    for found, expected in zip(logits, apart(settings.get("transparent")), strict=True):
        np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_packing_changes_nothing(settings: Any) -> None:
    together = network(**settings, packed=True)
    first, second, third, fourth = SENTENCES
    fields = batch([[first, second], [third], [fourth, first, second]], 6, 9)
    logits = together(fields, training=False).numpy()
    expected = apart(settings.get("transparent"))
    places = ((0, 0), (0, 1), (1, 2), (2, 3), (2, 0), (2, 1))
    starts = [0, 0, 0]
    for row, sentence in places:
        own = expected[sentence]
        found = logits[row, starts[row] : starts[row] + len(own)]
        np.testing.assert_allclose(found, own, rtol=1e-10, atol=1e-12)
        starts[row] += len(own)


def test_packing_changes_neither_loss_nor_gradients() -> None:
    first, second, third, fourth = SENTENCES
    packed = batch([[first, second], [third], [fourth]], 6, 9)
    together = network(dropout=0.0, packed=True).value_and_gradients(packed)
    alone = network(dropout=0.0).value_and_gradients(batch([[pair] for pair in SENTENCES], 6, 7))
    np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-12)
    assert set(together.gradients) == set(alone.gradients)
    for path, gradient in alone.gradients.items():
        np.testing.assert_allclose(together.gradients[path], gradient, rtol=1e-9, atol=1e-12)


def test_loss_and_gradients_do_not_see_padding() -> None:
    """However many columns and rows of padding: the same loss and gradients of every weight."""
    pipe = network(dropout=0.0)
    rows = [[pair] for pair in SENTENCES]
    tight = pipe.value_and_gradients(batch(rows, 4, 4))
    wide = pipe.value_and_gradients(batch(rows, 9, 8))
    np.testing.assert_allclose(wide.loss, tight.loss, rtol=1e-12)
    assert set(wide.gradients) == set(tight.gradients)
    for path, gradient in tight.gradients.items():
        np.testing.assert_allclose(wide.gradients[path], gradient, rtol=1e-9, atol=1e-12)
    for name in ("accuracy", "log_perplexity"):
        np.testing.assert_allclose(wide.sums[name]["weight"], 10.0)


@pytest.mark.parametrize(
    ("params", "specs", "text"),
    [
        (
            EncoderLayer.Params(name="e", **BLOCK),
            (tf.TensorSpec((3, 5, 6)), tf.TensorSpec((3, 5))),
            r"e \(EncoderLayer\): expected ids or sentence numbers, got float32. Set its field r",
        ),
        (
            TranslationSoftmax.Params(name="s", vocabulary=7, logit_clip=0.0),
            (tf.TensorSpec((3, 5, 6)),),
            r"s \(TranslationSoftmax\): logit_clip=0.0. Use more than 0, such as 50, or None",
        ),
        (
            TranslationSoftmax.Params(
                name="s", vocabulary=7, languages=("de", "fr", "cs"), reads=("x", "label", "weight")
            ),
            (tf.TensorSpec((3, 5, 6)), tf.TensorSpec((3, 5), tf.int32), tf.TensorSpec((3, 5))),
            r"s \(TranslationSoftmax\): reads 3 names .* expected \(x, label, weight, language\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(params: Any, specs: Any, text: str) -> None:
    with pytest.raises(errors.LayerError, match=text):
        layer_cases.meta_of(params, *specs)
