"""Analysis of a network from its params: names, tables, ties, frozen patterns, shapes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from tests.networks.plain_networks import FIELDS, D, N, analyze, dense, params, text_of


class Named(base.Layer):
    """x → x; has a loss and a metric named like the layer."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(
                inputs[0],
                losses=(base.LossSpec(f"{self.name}_loss", 1.0, lambda fields: fields["x"][0, 0]),),
                metrics=(base.MetricSpec(f"{self.name}_metric", lambda sums: sums),),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta
        ctx.add_loss(f"{self.params.name}_loss", tf.reduce_sum(inputs))
        ctx.add_sum(f"{self.params.name}_metric", tf.reduce_sum(inputs))
        return inputs


class Tripled(base.Layer):
    """x → x three times."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta((inputs[0],) * 3)

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta, ctx
        return (inputs,) * 3


# --- names ----------------------------------------------------------------------------------------


def test_layers_without_a_name_get_one_of_their_own() -> None:
    found = analyze(
        dense(4), dense(4), dense(4, name="dense_1"), layers.Dropout.Params(rate=0.5), dense(4)
    )
    assert [layer.name for layer in found.layers] == [
        "dense",
        "dense_2",
        "dense_1",
        "dropout",
        "dense_3",
    ]


def test_the_given_params_are_left_alone() -> None:
    own = params(dense(4), dtype="float64")
    before = own.copy()
    network.analyze(own, FIELDS)
    assert own == before
    assert own.layers[0].name == ""


def test_equal_layers_may_name_their_losses_by_themselves() -> None:
    found = analyze(dense(4), Named.Params(), Named.Params(), Named.Params(name="third"))
    assert [loss.name for loss in found.losses] == ["named_loss", "named_1_loss", "third_loss"]
    assert sorted(found.metrics) == ["named_1_metric", "named_metric", "third_metric"]


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_a_name_returned_by_two_layers_is_refused(kind: str) -> None:
    labelled = layers.Softmax.Params(classes=3, reads=("x", "label"))
    second = labelled.copy().set(loss_name="other" if kind == "metric" else "loss")
    second.set(metric_prefix="second_" if kind == "loss" else "")
    own = params(dense(4), labelled, second)
    with pytest.raises(errors.LayerError) as error:
        network.analyze(own, {"x": FIELDS["x"], "label": tf.TensorSpec([N], tf.int32)})
    name = {"loss": "loss", "metric": "accuracy"}[kind]
    assert str(error.value) == (f"two layers return a {kind} named {name!r}. Rename one of them")


def test_a_metric_that_would_be_taken_for_the_loss_is_refused() -> None:
    head = layers.Softmax.Params(classes=3, reads=("x", "label"), metric_prefix="loss/")
    with pytest.raises(errors.LayerError, match="'loss/accuracy' would be taken for the loss"):
        network.analyze(params(dense(4), head), FIELDS | {"label": tf.TensorSpec([N], tf.int32)})


# --- variables: ties, frozen ----------------------------------------------------------------------


def test_a_tied_variable_is_one() -> None:
    found = analyze(dense(D, name="a"), dense(D, name="b", tie={"kernel": "a/kernel"}))
    assert sorted(found.variables) == ["a/bias", "a/kernel", "b/bias"]
    assert found.layers[1].paths == {"kernel": "a/kernel", "bias": "b/bias"}
    assert found.owner["a/kernel"] == 0
    assert found.trainable(1) == ("a/kernel", "b/bias")


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_tie_with_one_frozen_end_is_frozen(frozen: str) -> None:
    found = analyze(
        dense(D, name="a", trainable=frozen != "a"),
        dense(D, name="b", trainable=frozen != "b", tie={"kernel": "a/kernel"}),
    )
    assert not found.variables["a/kernel"].trainable
    assert found.variables[f"{'b' if frozen == 'a' else 'a'}/bias"].trainable


def test_frozen_patterns_freeze_by_path() -> None:
    found = analyze(dense(4, name="stem"), dense(3, name="head"), frozen=("stem/*", "*/bias"))
    trained = [path for path, spec in found.variables.items() if spec.trainable]
    assert trained == ["head/kernel"]
    assert found.frozen_layers == {"stem"}


@pytest.mark.parametrize("pattern", ["b/*", "b/kernel", "*/kernel"])
def test_a_pattern_that_fits_a_borrower_freezes_what_it_shares(pattern: str) -> None:
    tied = dense(D, name="b", tie={"kernel": "a/kernel"})
    found = analyze(dense(D, name="a"), tied, frozen=(pattern,))
    assert not found.variables["a/kernel"].trainable
    assert found.variables["a/bias"].trainable
    assert found.variables["b/bias"].trainable == (pattern != "b/*")


def test_frozen_layers_are_those_wholly_frozen_at_any_depth() -> None:
    block = layers.Sequential.Params(
        name="block", layers=[dense(4, name="a"), layers.Sequential.Params(layers=[dense(4)])]
    )
    found = analyze(block, dense(3), frozen=("block/a/*",))
    assert found.frozen_layers == {"block/a"}
    assert analyze(block, dense(3), frozen=("block/*",)).frozen_layers == {
        "block",
        "block/a",
        "block/sequential",
        "block/sequential/dense",
    }


def test_statistics_are_frozen_with_their_layer_alone() -> None:
    norm = layers.BatchNorm.Params(name="norm")
    whole = ("norm/gamma", "norm/beta", "norm/moving_*")
    assert analyze(dense(4), norm, frozen=whole).frozen_layers == {"norm"}
    text = text_of(errors.LayerError, dense(4), norm, frozen=("norm/moving_*",))
    assert text == (
        "frozen pattern 'norm/moving_*' matches norm/moving_mean, a statistic, which is frozen "
        "only together with its layer. Freeze norm/*, or where the layer has no weights, remove "
        "the pattern and set trainable=False in its Params"
    )
    bare = layers.BatchNorm.Params(name="norm", center=False, scale=False)
    text = text_of(errors.LayerError, dense(4), bare, frozen=("norm/*",))
    assert "matches norm/moving_mean, a statistic" in text
    block = layers.Sequential.Params(name="block", layers=[dense(4, name="a"), bare])
    still = analyze(block, dense(3), frozen=("block/a/*", "block/norm/*"))
    assert "block" in still.frozen_layers


# --- shapes ---------------------------------------------------------------------------------------


def test_specs_are_those_of_the_largest_micro_batch() -> None:
    found = analyze(dense(4), dense(3), num_micro_batches=3)
    assert found.sizes == (3, 3, 2)
    shapes = {
        (v.name, v.producer): found.specs[v.index].shape.as_list() for v in found.wiring.versions
    }
    assert shapes == {
        ("x", -1): [3, D],
        ("target", -1): [3, 3],
        ("x", 0): [3, 4],
        ("x", 1): [3, 3],
    }


def test_specs_are_in_the_compute_dtype_but_for_integers() -> None:
    own = params(layers.Embedding.Params(vocabulary=5, units=2), dtype="mixed_bfloat16")
    fields = {"x": tf.TensorSpec([N], tf.int32), "y": tf.TensorSpec([N], tf.float64)}
    found = network.analyze(own, fields)
    assert [spec.dtype for spec in found.specs] == [tf.int32, tf.bfloat16, tf.bfloat16]
    assert found.variables["embedding/table"].dtype == tf.float32


def test_two_thousand_layers_need_no_device_and_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError((args, kwargs))

    for module, name in (
        (tf, "Variable"),
        (tf, "device"),
        (tf.config, "list_logical_devices"),
        (tf.config, "list_physical_devices"),
    ):
        monkeypatch.setattr(module, name, refuse)
    width = 12 * 1024  # 300 billion parameters in all
    found = network.analyze(
        params(*[dense(width) for _ in range(2000)], num_partitions=8, fuse=False),
        {"x": tf.TensorSpec([N, width])},
    )
    assert found.cuts == (250,) * 8
    assert sum(spec.size for spec in found.variables.values()) == 2000 * (width + 1) * width
    assert found.layers[-1].name == "dense_1999"


def tied(**tie: str) -> list[Any]:
    return [dense(D, name="a"), dense(D, name="b", tie=tie)]


@pytest.mark.parametrize(
    ("own", "fields", "text"),
    [
        (
            [dense(4, name="a"), dense(4, name="a")],
            {},
            "two layers are named 'a'. Rename one of them",
        ),
        (
            [dense(4, name="a/b")],
            {},
            "layer name 'a/b' is not made of letters, digits and _.>-, of which _ > - cannot be "
            "the first. Rename the layer",
        ),
        ([dense(4, name="my layer")], {}, "layer name 'my layer' is not made of letters…"),
        ([], {}, "the network has no layers. Fill `layers`"),
        ([], {"name": "tiny"}, "tiny has no layers. Fill `layers`"),
        (
            [dense(4), dense(4)],
            {"num_partitions": 2, "recompute": "nevr"},
            "unknown recompute policy 'nevr'; nearest 'never'. Use one for all "
            "cells, or one for each cell separated by commas",
        ),
        (
            [dense(4), dense(4)],
            {"num_partitions": 2, "recompute": "full,never,full"},
            "recompute names 3 policies for 2 cells. Give one, or one for each cell",
        ),
        (
            tied(kernel="a/kernal"),
            {},
            "b/kernel is tied to 'a/kernal', but no layer owns a variable of this path; nearest "
            "'a/kernel'",
        ),
        (
            tied(kernel="a/bias"),
            {},
            "b/kernel is (6, 6) float32, but tied to a/bias, which is (6,) float32. Give both "
            "the same shape and dtype",
        ),
        (tied(kernl="a/kernel"), {}, "b (Dense): tie: no variable 'kernl'; nearest 'kernel'"),
        (
            [
                dense(4),
                layers.BatchNorm.Params(name="one"),
                layers.BatchNorm.Params(name="two", tie={"moving_mean": "one/moving_mean"}),
            ],
            {},
            "two/moving_mean is a statistic of its layer's micro-batches and cannot…",
        ),
        (
            [dense(4, name="stem")],
            {"frozen": ("sten/*",)},
            "frozen pattern 'sten/*' matches no variable; there are 'stem/bias', 'stem/kernel'",
        ),
        (
            [dense(4), layers.Conv2D.Params(filters=2, name="conv")],
            {},
            "conv (Conv2D): expected …",
        ),
        (
            [dense(4, name="d", writes=("x", "y"))],
            {"outputs": ("x", "y")},
            "d writes 2 names (x, y), but returns 1 output. Write one name for each output",
        ),
        (
            [Tripled.Params(name="t", writes=("x", "y"))],
            {"outputs": ("x", "y")},
            "t writes 2 names (x, y), but returns 3 outputs. Write one name for each output",
        ),
    ],
)
def test_a_network_that_is_not_consistent_is_refused(
    own: list[Any], fields: dict[str, Any], text: str
) -> None:
    found = text_of(errors.LayerError, *own, **fields)
    assert found.startswith(text[:-1]) if text.endswith("…") else found == text
