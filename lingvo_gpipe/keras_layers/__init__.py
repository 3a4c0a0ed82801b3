"""Any Keras layer or model as layers of a pipeline.

Layers of our own are in `lingvo_gpipe.layers`; nothing here is needed to use them.
"""

from lingvo_gpipe.keras_layers.adapter import KerasLayer, from_keras, to_keras
from lingvo_gpipe.keras_layers.model import Network, from_keras_model
from lingvo_gpipe.keras_layers.objectives import from_keras_loss, from_keras_metric

__all__ = [
    "KerasLayer",
    "Network",
    "from_keras",
    "from_keras_loss",
    "from_keras_metric",
    "from_keras_model",
    "to_keras",
]
