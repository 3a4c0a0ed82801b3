"""What is known about a network from its Params: wiring, costs, cuts, cells, memory by formula.

Nothing here creates a variable or places a cell: devices are numbers. The fields of a mini-batch
are the exception: `parts` and `value_ranges` work where these are.
"""

from typing import TYPE_CHECKING

from lingvo_gpipe.imports import lazy

if TYPE_CHECKING:
    from lingvo_gpipe.network.analysis import Analysis as Analysis
    from lingvo_gpipe.network.analysis import analyze as analyze
    from lingvo_gpipe.network.cell import Cell as Cell
    from lingvo_gpipe.network.cell import Mode as Mode
    from lingvo_gpipe.network.cell import Pass as Pass
    from lingvo_gpipe.network.params import PipelineParams as PipelineParams
    from lingvo_gpipe.network.params import divided as divided
    from lingvo_gpipe.network.params import layer_params as layer_params
    from lingvo_gpipe.network.params import uncut as uncut
    from lingvo_gpipe.network.wired_layers import LayerInfo as LayerInfo

# Lazily: `network.cutting.partition` needs no TensorFlow, `network.analysis` does.
__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "analysis": ["Analysis", "analyze"],
        "cell": ["Cell", "Mode", "Pass"],
        "params": ["PipelineParams", "divided", "layer_params", "uncut"],
        "wired_layers": ["LayerInfo"],
    },
)
