"""lingvo_gpipe: pipeline-parallel training of networks larger than a device, in TensorFlow.

    import lingvo_gpipe as lg

    pipe = lg.PipeliningLayer.Params(layers=[lg.layers.Dense.Params(units=8)]).instantiate()

Every name is imported when it is first used: `import lingvo_gpipe` loads no TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING

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
    from lingvo_gpipe.fitting import PipelinedModel as PipelinedModel
    from lingvo_gpipe.pipelining import PipeliningLayer as PipeliningLayer
    from lingvo_gpipe.pipelining import Result as Result

_MODULES = (
    "errors",
    "hyperparams",
    "input",
    "keras_layers",
    "layers",
    "network",
    "optim",
    "registry",
    "schedule",
    "task",
)
_MODULE_OF = {
    "PipelinedModel": "fitting",
    "PipeliningLayer": "pipelining",
    "Result": "pipelining",
    "prepare_logical_cpus": "execution.placement",
}
__all__ = [*_MODULES, *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
