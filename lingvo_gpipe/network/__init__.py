"""What is known about a network from its Params: wiring, costs, cuts, cells, memory by formula.

Nothing here creates a variable or places a cell: devices are numbers. The fields of a mini-batch
are the exception: `parts` and `value_ranges` work where these are. In the order of `analyze`:

- What does each layer read, write and own? `params`, `wiring`, `variables`, `wired_layers`
- Where is the network cut? `cuts`, by `partition`, within memory by `capacity`
- What does a cell hold in a pass? `cell`, `analysis`; its bytes `memory_formulas`
- Who computes and owns what? `micro_batches`, `replicas`, `host_order`; what they send each other
  `traffic`
"""

from lingvo_gpipe.network.analysis import Analysis, analyze
from lingvo_gpipe.network.cell import Cell, Mode, Pass
from lingvo_gpipe.network.params import PipelineParams, divided, layer_params, uncut
from lingvo_gpipe.network.wired_layers import LayerInfo

__all__ = [
    "Analysis",
    "Cell",
    "LayerInfo",
    "Mode",
    "Pass",
    "PipelineParams",
    "analyze",
    "divided",
    "layer_params",
    "uncut",
]
