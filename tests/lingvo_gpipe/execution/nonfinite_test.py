"""Finding the first value that is not finite."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.execution import executor
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from tests.networks import pipelines


class Poison(base.Layer):
    """x → x; makes a value of the forward, or only the gradient, not finite."""

    class Params(base.Layer.Params):
        where: Literal["forward", "gradient"] = hyperparams.field("forward", "Which pass.")

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(inputs[0])

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta, ctx
        # log 0 is -inf; √0 is 0, its derivative times 0 is NaN.
        zero = inputs * 0
        return inputs + (tf.math.log(zero) if self.params.where == "forward" else tf.sqrt(zero))


def test_first_nonfinite_names_the_layer_in_the_middle() -> None:
    own = pipelines.three(layers=pipelines.mlp(Poison.Params(name="spoiled")), cuts=None)
    assert own.first_nonfinite(pipelines.batch()) == "layer spoiled, output x, micro-batch 0"


def test_first_nonfinite_names_the_field_and_micro_batch() -> None:
    fields = pipelines.batch()
    fields["target"] = tf.tensor_scatter_nd_update(fields["target"], [[5, 1]], [np.inf])
    found = pipelines.three().first_nonfinite(fields)
    assert found == "field target of the mini-batch, micro-batch 2"


def test_first_nonfinite_names_the_layer_whose_gradient_it_is() -> None:
    own = pipelines.three(
        layers=pipelines.mlp(Poison.Params(name="spoiled", where="gradient")), cuts=None
    )
    assert np.isfinite(own.value_and_gradients(pipelines.batch()).loss)
    found = own.first_nonfinite(pipelines.batch())
    assert found.startswith("layer d2, gradient of d2/")  # the nearest weights before it


def test_first_nonfinite_names_a_weight() -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    kernel = own.by_path["d3/kernel"]
    kernel.assign(tf.tensor_scatter_nd_update(kernel, [[0, 0]], [np.nan]))
    assert own.first_nonfinite(pipelines.batch()) == "layer d3, variable d3/kernel"


def test_first_nonfinite_finds_nothing_in_sound_values() -> None:
    assert pipelines.three().first_nonfinite(pipelines.batch()) == "nowhere"


def test_values_of_one_micro_batch_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[executor.ReplicaPass] = []
    true = executor.ReplicaPass.__post_init__

    def kept(self: executor.ReplicaPass) -> None:
        true(self)
        runs.append(self)

    monkeypatch.setattr(executor.ReplicaPass, "__post_init__", kept)
    assert pipelines.three().first_nonfinite(pipelines.batch()) == "nowhere"
    assert set(runs[0].values) == {3}


def test_first_nonfinite_names_a_loss_of_finite_values() -> None:
    fields = pipelines.batch()
    large = tf.fill(fields["target"].shape, tf.constant(1e200, fields["target"].dtype))
    found = pipelines.three().first_nonfinite({**fields, "target": large})
    assert found == "loss loss, micro-batch 0"
