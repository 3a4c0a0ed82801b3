"""Every layer of `lingvo_gpipe.layers` as a row, and what a test needs to run a layer.

Each law test runs over all rows; `layers_test.test_every_exported_layer_has_a_row` fails if one is
missing. Widths differ from each other, so that a swap is detected.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import layers, precision, seeds
from lingvo_gpipe.layers.context import Context

IMAGE = tf.TensorSpec((4, 7, 6, 4))
FEATURES = tf.TensorSpec((5, 6))
SEQUENCE = tf.TensorSpec((3, 5, 8))
MEMORY = tf.TensorSpec((3, 4, 6))
IDS = tf.TensorSpec((3, 5), tf.int32)
NUM_IDS = 3  # integer inputs are drawn from [0, NUM_IDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A layer with the specs of its inputs.

    Attributes:
        name: of the row.
        own: its params; `params` returns a copy.
        inputs: a nest of specs for each name that it reads; floating ones get the policy's compute
            dtype.
    """

    name: str
    own: Any
    inputs: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name

    def params(self) -> Any:
        return self.own.copy()

    def specs(self, policy: str) -> tuple[Any, ...]:
        """Return the inputs' specs under a precision policy."""
        compute = precision.policy(policy).compute
        specs: tuple[Any, ...] = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape, compute if s.dtype.is_floating else s.dtype),
            self.inputs,
        )
        return specs


# What a slice of a softmax adds to, for labels [3, 5].
SUMS = {
    "label_logit": tf.TensorSpec((3, 5)),
    "largest": tf.TensorSpec((3, 5)),
    "largest_id": IDS,
    "log_sum_exp": tf.TensorSpec((3, 5)),
    "logit_sum": tf.TensorSpec((3, 5)),
    "top": tf.TensorSpec((3, 5, 2)),
}


def _softmax_slice(**fields: Any) -> Any:
    return layers.SoftmaxSlice.Params(vocabulary=9, first=1, rows=4, **fields)


def _children() -> list[Any]:
    return [
        layers.Dense.Params(units=7, activation="gelu"),
        layers.Dropout.Params(rate=0.3),
        layers.Dense.Params(units=6),
    ]


CASES = (
    Case("activation", layers.Activation.Params(activation="gelu"), (FEATURES,)),
    Case("add", layers.Add.Params(reads=("a", "b", "c")), (FEATURES, FEATURES, FEATURES)),
    Case(
        "keras_metric",
        layers.KerasMetric.Params(metric="SparseTopKCategoricalAccuracy", config={"k": 2}),
        (FEATURES, tf.TensorSpec((5,), tf.int32)),
    ),
    Case(
        "loss",
        layers.Loss.Params(
            loss="SparseCategoricalCrossentropy",
            config={"from_logits": True},
            reads=("x", "label", "weights"),
        ),
        (FEATURES, tf.TensorSpec((5,), tf.int32), tf.TensorSpec((5,))),
    ),
    Case("auxiliary_loss", layers.AuxiliaryLoss.Params(coefficient=0.1), (IMAGE,)),
    Case("avg_pool", layers.AvgPool2D.Params(pool_size=3, padding="same"), (IMAGE,)),
    Case("batch_norm", layers.BatchNorm.Params(momentum=0.9), (IMAGE,)),
    Case("batch_norm_features", layers.BatchNorm.Params(scale=False), (FEATURES,)),
    Case("batch_norm_frozen", layers.BatchNorm.Params(trainable=False), (IMAGE,)),
    Case(
        "concat",
        layers.Concat.Params(reads=("a", "b"), axis=1),
        (SEQUENCE, tf.TensorSpec((3, 2, 8))),
    ),
    Case("conv", layers.Conv2D.Params(filters=5, activation="relu"), (IMAGE,)),
    Case(
        "conv_strided",
        layers.Conv2D.Params(
            filters=5, kernel_size=(1, 3), strides=(1, 2), padding="valid", use_bias=False
        ),
        (IMAGE,),
    ),
    Case("dense", layers.Dense.Params(units=3, activation="tanh"), (FEATURES,)),
    Case("dense_sequence", layers.Dense.Params(units=3, use_bias=False), (SEQUENCE,)),
    Case("dense_frozen", layers.Dense.Params(units=3, trainable=False), (FEATURES,)),
    Case("dropout", layers.Dropout.Params(rate=0.4), (SEQUENCE,)),
    Case("embedding", layers.Embedding.Params(vocabulary=9, units=4, scale=True), (IDS,)),
    Case(
        "embedding_slice",
        layers.EmbeddingSlice.Params(vocabulary=9, first=1, rows=3, units=4),
        (IDS,),
    ),
    Case(
        "embedding_slice_last",
        layers.EmbeddingSlice.Params(
            vocabulary=4, first=1, rows=3, units=8, scale=True, reads=("ids", "sum")
        ),
        (IDS, SEQUENCE),
    ),
    Case("feed_forward_end", layers.FeedForwardEnd.Params(rate=0.3), (SEQUENCE, SEQUENCE)),
    Case(
        "feed_forward_slice",
        layers.FeedForwardSlice.Params(layers=_children(), reads=("x", "sum")),
        (FEATURES, FEATURES),
    ),
    Case("flatten", layers.Flatten.Params(), (IMAGE,)),
    Case("global_pool", layers.GlobalPool2D.Params(), (IMAGE,)),
    Case("identity", layers.Identity.Params(), (FEATURES,)),
    Case(
        "identity_of_two",
        layers.Identity.Params(reads=("a", "b"), writes=("b", "c")),
        (FEATURES, IDS),
    ),
    Case(
        "joined_logits",
        layers.JoinedLogits.Params(reads=("a", "b")),
        (SEQUENCE, tf.TensorSpec((3, 5, 2))),
    ),
    Case("layer_norm", layers.LayerNorm.Params(), (SEQUENCE,)),
    Case("max_pool", layers.MaxPool2D.Params(pool_size=(3, 2), strides=2), (IMAGE,)),
    Case(
        "mean_squared_error",
        layers.MeanSquaredError.Params(reads=("x", "target", "weights")),
        (SEQUENCE, SEQUENCE, tf.TensorSpec((3,))),
    ),
    Case(
        "attention",
        layers.MultiHeadAttention.Params(
            units=8, heads=2, causal=True, dropout=0.2, reads=("x", "mask")
        ),
        (SEQUENCE, tf.TensorSpec((3, 5), tf.bool)),
    ),
    Case(
        "attention_cross",
        layers.MultiHeadAttention.Params(
            units=8, heads=2, head_dim=3, cross=True, use_bias=False, reads=("x", "memory", "mask")
        ),
        (SEQUENCE, MEMORY, tf.TensorSpec((3, 5, 4), tf.int32)),
    ),
    Case("positional_encoding", layers.PositionalEncoding.Params(), (SEQUENCE,)),
    Case(
        "positional_encoding_given",
        layers.PositionalEncoding.Params(reads=("x", "position")),
        (SEQUENCE, IDS),
    ),
    Case("residual", layers.Residual.Params(body=_children()), (FEATURES,)),
    Case(
        "separable_conv",
        layers.SeparableConv2D.Params(filters=3, kernel_size=5, activation="elu"),
        (IMAGE,),
    ),
    Case("sequential", layers.Sequential.Params(layers=_children()), (FEATURES,)),
    Case(
        "sequence_softmax",
        layers.SequenceSoftmax.Params(
            vocabulary=7, label_smoothing=0.1, logit_clip=1.0, reads=("x", "label", "weights")
        ),
        (SEQUENCE, IDS, tf.TensorSpec((3, 5))),
    ),
    Case(
        "sliced_loss",
        layers.SlicedLoss.Params(
            vocabulary=9,
            logits=("a", "b"),
            label_smoothing=0.1,
            top_k=2,
            reads=("sums", "label", "weights"),
        ),
        (SUMS, IDS, tf.TensorSpec((3, 5))),
    ),
    Case(
        "softmax",
        layers.Softmax.Params(classes=7, label_smoothing=0.1, top_k=2),
        (FEATURES, tf.TensorSpec((5,), tf.int64)),
    ),
    Case("softmax_inference", layers.Softmax.Params(classes=7, reads=("x",)), (FEATURES,)),
    Case("softmax_slice", _softmax_slice(), (SEQUENCE, IDS)),
    Case("softmax_slice_inference", _softmax_slice(reads=("x",)), (SEQUENCE,)),
    Case(
        "softmax_slice_later",
        _softmax_slice(logit_clip=0.5, sums_logits=True, top_k=2, reads=("x", "label", "sums")),
        (SEQUENCE, IDS, SUMS),
    ),
    Case(
        "transformer",
        layers.TransformerLayer.Params(
            units=8, heads=2, hidden=12, dropout=0.1, reads=("x", "mask")
        ),
        (SEQUENCE, tf.TensorSpec((3, 5), tf.int32)),
    ),
    Case(
        "transformer_at_norm",
        layers.TransformerLayer.Params(
            units=8, heads=2, hidden=12, ends_at_norm=True, writes=("x", "y")
        ),
        (SEQUENCE,),
    ),
)


def meta_of(params: Any, *inputs: tf.TensorSpec) -> layers.Meta:
    """Return the Meta of `params`."""
    meta: layers.Meta = params.fprop_meta(*inputs)
    return meta


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return {"a/b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def create_flat(meta: layers.Meta, seed: int = 0) -> dict[str, tf.Tensor]:
    """Return initial values of a layer's variables by path, weights and statistics."""
    return {
        v.path: v.initializer(v.shape, v.dtype, seeds.variable_seed(seed, v.path))
        for v in meta.variables
    }


def create_variables(
    meta: layers.Meta, seed: int = 0, compute: tf.DType | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return theta and state of a layer, nested as `fprop` takes them.

    Args:
        meta: of the layer.
        seed: of the initializers.
        compute: dtype of theta; None: that of the master weights.
    """
    flat = create_flat(meta, seed)
    is_state = {v.path: v.is_state for v in meta.variables}
    theta = {
        path: value if compute is None else tf.cast(value, compute)
        for path, value in flat.items()
        if not is_state[path]
    }
    return nested(theta), nested({path: flat[path] for path in flat if is_state[path]})


def draw(specs: Any, seed: int = 0) -> tuple[Any, ...]:
    """Return random tensors: normal, or integers in [0, NUM_IDS), or booleans, two thirds true."""
    rng = np.random.default_rng(seed)

    def one(spec: tf.TensorSpec) -> tf.Tensor:
        if spec.dtype.is_floating:
            return tf.cast(rng.normal(size=spec.shape), spec.dtype)
        numbers = rng.integers(0, NUM_IDS, size=spec.shape)
        return tf.cast(numbers > 0 if spec.dtype == tf.bool else numbers, spec.dtype)

    drawn: tuple[Any, ...] = tf.nest.map_structure(one, tuple(specs))
    return drawn


def as_read(values: tuple[Any, ...]) -> Any:
    """Return the values of names as `fprop` takes them."""
    return values[0] if len(values) == 1 else values


def context(
    state: dict[str, Any] | None = None, *, training: bool = True, seed: int = 0, path: str = "net"
) -> Context:
    """Return a context with its own collection."""
    return Context(
        training=training,
        step=tf.constant(0, tf.int64),
        root_seed=seeds.base_seed(seed),
        state=state or {},
        path=path,
    )
