"""Layers of our own: each a pure function made from Params; `base` says what a layer is.

Keras layers are adapted in `lingvo_gpipe.keras_layers`; layers of one field only live in its task.
"""

from lingvo_gpipe.layers.activation import Activation
from lingvo_gpipe.layers.attention import MultiHeadAttention, TransformerLayer
from lingvo_gpipe.layers.base import (
    Layer,
    LossSpec,
    Meta,
    MetricSpec,
    VariableSpec,
    initializer,
)
from lingvo_gpipe.layers.composition import Parallel, Residual, Sequential
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.layers.convolution import Conv2D, DepthwiseConv2D, SeparableConv2D
from lingvo_gpipe.layers.dense import Dense
from lingvo_gpipe.layers.dropout import Dropout
from lingvo_gpipe.layers.embedding import Embedding, PositionalEncoding
from lingvo_gpipe.layers.heads import AuxiliaryLoss, MeanSquaredError, SequenceSoftmax, Softmax
from lingvo_gpipe.layers.joining import Add, Concat, Identity, Rename
from lingvo_gpipe.layers.metric import KerasMetric
from lingvo_gpipe.layers.normalization import BatchNorm, GroupNorm, LayerNorm
from lingvo_gpipe.layers.pooling import AvgPool2D, GlobalPool2D, MaxPool2D
from lingvo_gpipe.layers.shaping import Flatten, Reshape

__all__ = [
    "Activation",
    "Add",
    "AuxiliaryLoss",
    "AvgPool2D",
    "BatchNorm",
    "Collected",
    "Concat",
    "Context",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalPool2D",
    "GroupNorm",
    "Identity",
    "KerasMetric",
    "Layer",
    "LayerNorm",
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
    "Softmax",
    "TransformerLayer",
    "VariableSpec",
    "initializer",
]
