"""A custom layer whose fprop does not do what its Meta says is named at once."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, pipelining

hyperparams.register_package(__name__)

RESULTS: dict[str, Any] = {
    "mean": lambda x: tf.reduce_mean(x, 0, keepdims=True),
    "half": lambda x: tf.cast(x, tf.float16),
    "wide": lambda x: tf.concat([x, x], -1),
    "flat": lambda x: tf.reshape(x, [-1]),
    "pair": lambda x: (x, x),
}


class Bad(layers.Identity):
    class Params(layers.Identity.Params):
        result: str = hyperparams.required("Which wrong result.")

    params: Params

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        del theta, ctx
        if self.params.result == "error":
            raise KeyError("vv")
        return RESULTS[self.params.result](inputs)


def run(result: str, num_rows: int = 6) -> None:
    pipe: Any = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(units=3),
            Bad.Params(name="bad", result=result),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=2,
        num_micro_batches=2,
    ).instantiate()
    pipe.value_and_gradients({"x": tf.ones([num_rows, 4]), "target": tf.zeros([num_rows, 3])})


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("mean", r"float32 of shape \(1, 3\) for 'x', but its Meta has float32 of shape \(3, 3\)"),
        ("half", r"float16 of shape \(3, 3\) for 'x', but its Meta has float32 of shape \(3, 3\)"),
        ("wide", r"float32 of shape \(3, 6\) for 'x'"),
        ("flat", r"float32 of shape \(9,\) for 'x'"),
        ("pair", r"a nest of 2 tensors for 'x', but its Meta has 1"),
    ],
)
def test_what_the_meta_does_not_declare_is_refused(result: str, found: str) -> None:
    with pytest.raises(errors.LayerError, match=rf"^bad \(.*Bad\): fprop returned {found}"):
        run(result)


def test_micro_batches_of_another_size_are_compared_by_dtype_and_rank() -> None:
    run("mean", num_rows=2)  # one row each: a mean over it is what the Meta declares
    with pytest.raises(errors.LayerError, match="bad"):
        run("flat", num_rows=5)


def test_an_exception_of_a_layer_has_a_note_of_where_it_came_from() -> None:
    with pytest.raises(KeyError) as caught:
        run("error")
    (note,) = caught.value.__notes__
    assert note.startswith("in bad (")
    assert ", cell " in note
