"""Padding and packing change nothing; metrics by language; what layers refuse.

The sameness tests compare the layers with plain TensorFlow (`tests/networks/mt_nets.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, pipelining
from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer
from lingvo_gpipe.tasks.mt.model.softmax import TranslationSoftmax
from tests.cases import layer_cases
from tests.tasks.mt import toy_model

Array = np.ndarray[Any, Any]
UNITS, HEADS, HEAD_DIM, HIDDEN = 6, 3, 4, 10
BLOCK: dict[str, Any] = {"units": UNITS, "heads": HEADS, "head_dim": HEAD_DIM, "hidden": HIDDEN}


def test_loss_and_accuracy_are_counted_by_language() -> None:
    params = TranslationSoftmax.Params(
        vocabulary=5,
        languages=("de", "fr", "cs"),
        reads=("x", "label", "weight", "language"),
        label_smoothing=0.1,
        dtype="float64",
    )
    label = np.array([[1, 2, 3], [4, 0, 1], [2, 2, 2], [3, 1, 0]])
    weight = np.array([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    language = np.array([0, 2, 0, 2])
    x = np.random.default_rng(9).normal(size=(4, 3, 5))
    inputs = tuple(map(tf.constant, (x, label, weight, language)))
    meta = layer_cases.meta_of(params, *(tf.TensorSpec(x.shape, x.dtype) for x in inputs))
    theta, _ = layer_cases.create_variables(meta)
    ctx = layer_cases.context(training=True)
    logits = params.instantiate().run(theta, inputs, ctx)
    log = tf.nn.log_softmax(logits).numpy()
    loss, hits, count = np.zeros(3), np.zeros(3), np.zeros(3)
    for b, t in zip(*weight.nonzero(), strict=True):
        loss[language[b]] -= log[b, t, label[b, t]]
        hits[language[b]] += log[b, t].argmax() == label[b, t]
        count[language[b]] += 1
    metrics = {m.name: m for m in meta.metrics}
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
    pytest.param({}, marks=pytest.mark.sameness_grid),
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
def test_neither_padding_nor_packing_changes_the_logits_of_a_sentence(settings: Any) -> None:
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
