"""Histograms of weights and gradients, counted on their devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from lingvo_gpipe import errors, optim, task
from lingvo_gpipe.run import histograms, loop
from tests.support import saved
from tests.tiny_task import one_layer_task, tiny_task


def test_weights_and_gradients_are_those_of_the_update() -> None:
    params = tiny_task()
    source = params.input.instantiate()
    batch = next(iter(source.batches(0)))
    pipe = params.model.instantiate()
    pipe.build(batch)
    step = tf.constant(3, tf.int64)
    found = histograms.Histograms(pipe)(batch, step)
    gradients = pipe.value_and_gradients(batch, step=step).gradients
    values = {f"gradients/{path}": gradient for path, gradient in gradients.items()}
    values |= {f"weights/{path}": weight for path, weight in pipe.weights.items()}
    assert found.keys() == values.keys()
    for name, value in values.items():
        flat = np.asarray(value).ravel()
        wanted, _ = np.histogram(flat, found[name].edges)
        assert found[name].counts.sum() == flat.size
        assert found[name].edges[0] == pytest.approx(flat.min())
        assert np.abs(found[name].counts - wanted).sum() <= 4, name  # rounding at the edges


def test_gradients_of_scaled_losses_are_shown_unscaled_and_do_not_vanish() -> None:
    params = tiny_task()
    params.model.dtype = "mixed_float16"
    params.model.layers[-1].coefficient = 1e-8
    batch = next(iter(params.input.instantiate().batches(0)))
    pipe = params.model.instantiate()
    pipe.build(batch)
    step, scale = tf.constant(3, tf.int64), tf.Variable(2.0**20)
    plain = pipe.value_and_gradients(batch, step=step).gradients["first/kernel"].numpy()
    assert not plain.any()  # beyond float16
    scaled = pipe.value_and_gradients(batch, step=step, loss_scale=scale).gradients["first/kernel"]
    wanted = scaled.numpy() / 2.0**20
    shown = histograms.Histograms(pipe, scale.read_value)
    for factor in (1.0, 2.0):  # the scale changes during a run
        scale.assign(factor * 2.0**20)
        edges = shown(batch, step)["gradients/first/kernel"].edges
        np.testing.assert_allclose([edges[0], edges[-1]], [wanted.min(), wanted.max()], rtol=1e-2)


@pytest.mark.parametrize(
    ("values", "counted"),
    [
        ([1.0, 2.0, 2.0], 3),
        ([5.0] * 4, 4),
        ([0.0], 1),
        ([np.nan, 1.0, np.inf, -np.inf, 3.0], 2),
        ([np.nan], 0),
        ([-1e30, 1e30], 2),
    ],
)
def test_every_finite_value_is_in_a_bucket(values: list[float], counted: int) -> None:
    least, largest, counts = histograms._counted(tf.constant(values, tf.float64))
    assert float(least) < float(largest)
    assert int(tf.reduce_sum(counts)) == counted


def test_a_run_writes_them_where_asked_for_and_is_the_same(tmp_path: Path) -> None:
    ends = []
    for every in (0, 2):
        params: Any = one_layer_task(max_steps=4, histogram_interval_steps=every)
        folder = tmp_path / str(every)
        ends.append(saved.values(loop.run(params, folder).checkpoint))
        found = event_accumulator.EventAccumulator(str(folder / "train"), {"tensors": 0})
        found.Reload()
        tags = {tag for tag in found.Tags()["tensors"] if tag.startswith(("weights/", "grad"))}
        wanted = {
            f"{kind}/head/{name}"
            for kind in ("weights", "gradients")
            for name in ("kernel", "bias")
        }
        assert tags - {"gradient_norm"} == (wanted if every else set())
    steps = [event.step for event in found.Tensors("weights/head/kernel")]
    assert steps == [2, 4]
    rows = tf.make_ndarray(found.Tensors("weights/head/kernel")[0].tensor_proto)
    assert rows.shape == (30, 3)
    assert rows[:, 2].sum() == 12
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        assert np.asarray(value).tobytes() == np.asarray(ends[1][key]).tobytes(), key


def test_a_run_counts_gradients_with_its_own_loss_scale(tmp_path: Path) -> None:
    params: Any = one_layer_task(max_steps=1, histogram_interval_steps=1)
    params.model.dtype = "mixed_float16"
    params.model.layers[-1].coefficient = 1e-8
    params.train.loss_scale = optim.LossScale.Params(initial=2.0**20)
    loop.run(params, tmp_path)
    found = event_accumulator.EventAccumulator(str(tmp_path / "train"), {"tensors": 0})
    found.Reload()
    (event,) = found.Tensors("gradients/head/kernel")
    rows = tf.make_ndarray(event.tensor_proto)
    assert 1e-10 < rows[-1, 1] - rows[0, 0] < 1e-7  # all 0 without the scale


def test_an_interval_below_0_is_refused() -> None:
    with pytest.raises(errors.ParamsError, match=r"histogram_interval_steps=-1 is too small"):
        task.check(one_layer_task(histogram_interval_steps=-1))
