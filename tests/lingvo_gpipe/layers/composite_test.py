"""Layers made of layers: what children inherit, and what of them is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network, pipelining


def test_a_sequence_of_no_layers_is_served_as_it_is() -> None:
    params = layers.Sequential.Params(layers=[], writes=("y",))
    assert params.inference() == params
    assert params.served(tf.ones([2])).keys() == {"y"}


def test_a_first_child_that_is_not_served_stays() -> None:
    metric = layers.KerasMetric.Params(name="mean", metric="Mean", reads=("x", "label"))
    params = layers.Sequential.Params(layers=[metric], reads=("x", "label"))
    assert metric.inference() is None
    served = params.inference()
    assert isinstance(served, layers.Sequential.Params)
    assert [child.name for child in served.layers] == ["mean"]
    assert served.reads == ("x", "label")


def check(block: layers.Layer.Params, dtype: tf.DType = tf.int32, **fields: Any) -> None:
    """Check the values of fields as before a step."""
    specs = {name: tf.TensorSpec(np.shape(value), dtype) for name, value in fields.items()}
    for name in specs:
        if name in ("x", "weights"):
            specs[name] = tf.TensorSpec(specs[name].shape)
    params = pipelining.PipeliningLayer.Params(layers=[block])
    network.analyze(params, specs).check_values({n: np.asarray(v) for n, v in fields.items()})


def table(size: int) -> Any:
    return layers.Embedding.Params(name=f"table{size}", vocabulary=size, units=3)


@pytest.mark.parametrize(
    ("block", "setting"),
    [
        (layers.Sequential.Params(layers=[table(5), layers.Dropout.Params(rate=0.1)]), "table5."),
        (layers.Sequential.Params(layers=[layers.Sequential.Params(layers=[table(5)])]), "table5."),
    ],
    ids=lambda value: type(value).__qualname__,
)
def test_ids_that_a_child_reads_are_checked_before_a_step(block: Any, setting: str) -> None:
    block.set(name="block", reads=("ids",))
    check(block, ids=[[0, 4]])
    text = rf"field 'ids', row 0, position \[1\]: 5, but layer block takes 0 to 4 \(its .*{setting}"
    with pytest.raises(errors.InputError, match=text):
        check(block, ids=[[0, 5]])


def test_a_label_with_its_weights_is_checked_by_position() -> None:
    head = layers.Softmax.Params(classes=3, reads=("x", "label", "weights"))
    block = layers.Sequential.Params(layers=[head], reads=("x", "wanted", "weights"))
    fields = {"x": np.zeros((2, 4)), "wanted": [2, 7]}
    check(block, **fields, weights=[1.0, 0.0])
    with pytest.raises(errors.InputError, match=r"field 'wanted', row 1: 7, .*its softmax.classes"):
        check(block, **fields, weights=[1.0, 1.0])


class Halved(layers.Identity):
    """Ids → half of them, in a tensor of the same spec."""

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        """See `Layer.fprop`."""
        del theta, ctx
        return inputs // 2


def test_ids_that_another_child_has_changed_are_not_checked() -> None:
    halved: Any = Halved.Params()
    assert halved.owner is Halved
    block = layers.Sequential.Params(layers=[halved, table(5)], reads=("ids",))
    check(block, ids=[[0, 9]])


class Hashed(layers.Composite):
    """Ids → rows of a table of five, by their rest; its flow does not receive its field."""

    class Params(layers.Composite.Params):
        def parts(self) -> Any:
            """See `Composite`."""
            return {"table": table(5)}

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        """See `Layer.fprop`."""
        return self.run_parts(theta, ctx, inputs % 5)


def test_ids_that_a_composite_changes_itself_are_not_checked() -> None:
    hashed: Any = Hashed.Params(reads=("ids",))
    check(hashed, ids=[[0, 9]])
