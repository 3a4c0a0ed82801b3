"""Losses and metrics of Keras, as `compile` takes them, as layers that follow a model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from lingvo_gpipe import errors
from lingvo_gpipe.layers import KerasMetric, Loss


def from_keras_loss(
    loss: keras.losses.Loss | Callable[..., Any] | str, *, reads: Sequence[str] = ("x", "label")
) -> Loss.Params:
    """Return the Params of a Keras loss.

    Args:
        loss: a loss object, a function of labels and predictions, or a name such as mse.
        reads: predictions in the stream; the field of the labels; if there are any, the field of
            the sample weights.

    Raises:
        LayerError: the loss object does not record its arguments.
    """
    if not isinstance(loss, keras.losses.Loss):
        return Loss.Params(loss=loss, reads=tuple(reads))
    kind = type(loss)
    config = loss.get_config()
    # Some losses of Keras leave arguments out of their config, such as delta of Huber.
    arguments = inspect.signature(kind.__init__).parameters
    held = getattr(loss, "_fn_kwargs", {})
    config |= {name: value for name, value in held.items() if name in arguments}
    try:
        made = kind.from_config(config)
    except (TypeError, ValueError) as error:
        raise errors.LayerError(
            f"{kind.__name__} cannot be made of its own config: {error}. Define its get_config"
        ) from error
    if getattr(made, "_fn_kwargs", {}) != held:
        raise errors.LayerError(
            f"the config of {kind.__name__} does not record {held}. Define its get_config"
        )
    config = {name: value for name, value in config.items() if name != "name"}
    defined = kind if vars(keras.losses).get(kind.__name__) is not kind else kind.__name__
    return Loss.Params(loss=defined, config=config, reads=tuple(reads))


def from_keras_metric(
    metric: keras.metrics.Metric, *, reads: Sequence[str] = ("x", "label")
) -> KerasMetric.Params:
    """Return the Params of a Keras metric, without what it has counted.

    Args:
        metric: a metric of Keras, or one that `keras.saving.register_keras_serializable` knows.
        reads: as in `from_keras_loss`.
    """
    kind = type(metric)
    is_of_keras = vars(keras.metrics).get(kind.__name__) is kind
    config = metric.get_config()
    config.pop("dtype", None)
    return KerasMetric.Params(
        metric=kind.__name__ if is_of_keras else keras.saving.get_registered_name(kind),
        config=config,
        reads=tuple(reads),
    )
