"""The front door for people with a Keras model: `PipelinedModel`, trained by `compile` and `fit`.

How a Keras layer becomes a layer of a pipeline is in `lingvo_gpipe.keras_layers`.
"""

from lingvo_gpipe.fitting.compiled import CompiledLosses
from lingvo_gpipe.fitting.pipelined_model import PipelinedModel

__all__ = ["CompiledLosses", "PipelinedModel"]
