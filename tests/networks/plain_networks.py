"""Small networks of dense layers, for tests that need only Params."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, network

N, D = 8, 6
FIELDS = {"x": tf.TensorSpec([N, D]), "target": tf.TensorSpec([N, 3])}


def dense(units: int, **fields: Any) -> Any:
    return layers.Dense.Params(units=units, **fields)


def error_head(**fields: Any) -> Any:
    return layers.MeanSquaredError.Params(**fields)


def params(*given: Any, **fields: Any) -> Any:
    return network.PipelineParams(layers=list(given), **fields)


def analyze(*given: Any, **fields: Any) -> network.Analysis:
    return network.analyze(params(*given, **fields), FIELDS)


def text_of(kind: type[errors.UserError], *given: Any, **fields: Any) -> str:
    with pytest.raises(kind) as error:
        analyze(*given, **fields)
    return str(error.value)
