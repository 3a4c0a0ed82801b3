"""Networks of a few layers and their fields, for tests of plans."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import pipelining


def pipe(*layers: Any, **fields: Any) -> pipelining.PipeliningLayer.Params:
    return pipelining.PipeliningLayer.Params(layers=list(layers), **fields)


def floats(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)
