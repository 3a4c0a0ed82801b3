"""lingvo_gpipe: pipeline-parallel training of networks larger than a device, in TensorFlow.

    import lingvo_gpipe as lg

    pipe = lg.PipeliningLayer.Params(layers=[lg.layers.Dense.Params(units=8)]).instantiate()

Every name is imported when it is first used: `import lingvo_gpipe` loads no TensorFlow.
"""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe import errors as errors
    from lingvo_gpipe import hyperparams as hyperparams
    from lingvo_gpipe import input as input
    from lingvo_gpipe import keras_layers as keras_layers
    from lingvo_gpipe import layers as layers
    from lingvo_gpipe import network as network
    from lingvo_gpipe import optim as optim
    from lingvo_gpipe import registry as registry
    from lingvo_gpipe import schedule as schedule
    from lingvo_gpipe import task as task
    from lingvo_gpipe.execution.placement import prepare_logical_cpus as prepare_logical_cpus
    from lingvo_gpipe.pipelining import PipeliningLayer as PipeliningLayer
    from lingvo_gpipe.pipelining import Result as Result

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "errors": [],
        "hyperparams": [],
        "input": [],
        "keras_layers": [],
        "layers": [],
        "network": [],
        "optim": [],
        "registry": [],
        "schedule": [],
        "task": [],
        "execution.placement": ["prepare_logical_cpus"],
        "pipelining": ["PipeliningLayer", "Result"],
    },
)
