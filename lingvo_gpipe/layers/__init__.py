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
from lingvo_gpipe.layers.composite import Composite, Residual, Sequential
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.layers.dense import Activation, Dense, Dropout
from lingvo_gpipe.layers.feed_forward import FeedForwardEnd, FeedForwardSlice
from lingvo_gpipe.layers.heads import Softmax
from lingvo_gpipe.layers.losses import AuxiliaryLoss, Loss, MeanSquaredError
from lingvo_gpipe.layers.metrics import KerasMetric
from lingvo_gpipe.layers.normalization import BatchNorm, LayerNorm
from lingvo_gpipe.layers.reshaping import Add, Concat, Flatten, Identity
from lingvo_gpipe.layers.sequence import (
    Embedding,
    EmbeddingSlice,
    MultiHeadAttention,
    PositionalEncoding,
    TransformerLayer,
)
from lingvo_gpipe.layers.sequence_softmax import (
    JoinedLogits,
    SequenceSoftmax,
    SlicedLoss,
    SoftmaxSlice,
)
from lingvo_gpipe.layers.windows import AvgPool2D, Conv2D, GlobalPool2D, MaxPool2D, SeparableConv2D

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
    "Dropout",
    "Embedding",
    "EmbeddingSlice",
    "FeedForwardEnd",
    "FeedForwardSlice",
    "Flatten",
    "GlobalPool2D",
    "Identity",
    "JoinedLogits",
    "KerasMetric",
    "Layer",
    "LayerNorm",
    "Loss",
    "LossSpec",
    "MaxPool2D",
    "MeanSquaredError",
    "Meta",
    "MetricSpec",
    "MultiHeadAttention",
    "PositionalEncoding",
    "Residual",
    "SeparableConv2D",
    "SequenceSoftmax",
    "Sequential",
    "SlicedLoss",
    "Softmax",
    "SoftmaxSlice",
    "TransformerLayer",
    "VariableSpec",
    "initializer",
]
