"""Layers made of layers: what children inherit, and what of them is served."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import layers


def test_a_child_keeps_its_own_batch_dimension() -> None:
    own = layers.Identity.Params(name="own", batch_dim=1)
    parent = layers.Sequential.Params(layers=[own, layers.Identity.Params(name="other")])
    made = parent.set(batch_dim=2).instantiate()
    assert [child.params.batch_dim for child in made.children.values()] == [1, 2]


def test_a_sequence_of_no_layers_is_served_as_it_is() -> None:
    params = layers.Sequential.Params(layers=[], writes=("y",))
    assert params.inference(("x",)) == params
    assert params.served(tf.ones([2])).keys() == {"y"}


def test_a_first_child_that_is_not_served_stays() -> None:
    metric = layers.KerasMetric.Params(name="mean", metric="Mean", reads=("x", "label"))
    params = layers.Sequential.Params(layers=[metric], reads=("x", "label"))
    assert metric.inference(("x", "label")) is None
    served = params.inference(("x", "label"))
    assert isinstance(served, layers.Sequential.Params)
    assert [child.name for child in served.layers] == ["mean"]
    assert served.reads == ("x", "label")
