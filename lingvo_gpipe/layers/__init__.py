"""Layers, each a pure function made from Params; `base` says what a layer is.

Keras layers are adapted in `lingvo_gpipe.keras_layers`; layers of one field of application are in
its task.
"""

from lingvo_gpipe.layers.base import (
    Layer,
    LossSpec,
    Meta,
    MetricSpec,
    VariableSpec,
    initializer,
)
from lingvo_gpipe.layers.composite import Composite, Parallel, Residual, Sequential
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.layers.dense import Dense
from lingvo_gpipe.layers.elementwise import Activation, Dropout
from lingvo_gpipe.layers.normalization import BatchNorm, GroupNorm, LayerNorm
from lingvo_gpipe.layers.objectives.heads import (
    Head,
    LabelledParams,
    LossParams,
    SequenceSoftmax,
    Softmax,
    SoftmaxHead,
)
from lingvo_gpipe.layers.objectives.losses import AuxiliaryLoss, Loss, MeanSquaredError
from lingvo_gpipe.layers.objectives.metric import KerasMetric
from lingvo_gpipe.layers.reshaping import Add, Concat, Flatten, Identity, Rename, Reshape
from lingvo_gpipe.layers.sequence import (
    Embedding,
    MultiHeadAttention,
    PositionalEncoding,
    TransformerLayer,
)
from lingvo_gpipe.layers.sliced.embedding import EmbeddingSlice, SlicedEmbedding
from lingvo_gpipe.layers.sliced.feed_forward import (
    FeedForwardEnd,
    FeedForwardSlice,
    SlicedFeedForward,
)
from lingvo_gpipe.layers.sliced.softmax import (
    JoinedLogits,
    SlicedLoss,
    SlicedSoftmax,
    SoftmaxSlice,
)
from lingvo_gpipe.layers.windows import (
    AvgPool2D,
    Conv2D,
    DepthwiseConv2D,
    GlobalPool2D,
    MaxPool2D,
    SeparableConv2D,
)

__all__ = [
    "Activation",
    "Add",
    "AuxiliaryLoss",
    "AvgPool2D",
    "BatchNorm",
    "Collected",
    "Composite",
    "Concat",
    "Context",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "EmbeddingSlice",
    "FeedForwardEnd",
    "FeedForwardSlice",
    "Flatten",
    "GlobalPool2D",
    "GroupNorm",
    "Head",
    "Identity",
    "JoinedLogits",
    "KerasMetric",
    "LabelledParams",
    "Layer",
    "LayerNorm",
    "Loss",
    "LossParams",
    "LossSpec",
    "MaxPool2D",
    "MeanSquaredError",
    "Meta",
    "MetricSpec",
    "MultiHeadAttention",
    "Parallel",
    "PositionalEncoding",
    "Rename",
    "Reshape",
    "Residual",
    "SeparableConv2D",
    "SequenceSoftmax",
    "Sequential",
    "SlicedEmbedding",
    "SlicedFeedForward",
    "SlicedLoss",
    "SlicedSoftmax",
    "Softmax",
    "SoftmaxHead",
    "SoftmaxSlice",
    "TransformerLayer",
    "VariableSpec",
    "initializer",
]
