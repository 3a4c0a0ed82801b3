"""Weight decay that is added to the loss, by the group of a weight."""

from __future__ import annotations

from lingvo_gpipe import hyperparams


class WeightDecay(hyperparams.Configurable):
    """L2 decay by a weight's group: adds coefficient · ½‖w‖² to the loss of an update."""

    class Params(hyperparams.Configurable.Params):
        """Params of WeightDecay."""

        kernel: float = hyperparams.field(0.0, "Coefficient of kernels and tables.")
        bias: float = hyperparams.field(0.0, "Coefficient of biases.")
        norm: float = hyperparams.field(0.0, "Coefficient of normalisations' scale and offset.")
