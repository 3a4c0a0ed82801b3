"""How weights change: update rules, learning rates, clipping, decay, averages, loss scaling.

Where gradients come from belongs to `lingvo_gpipe.execution`; "schedule" is the pipeline's word and
is not used here.

- The rule of one weight: `rule`; those of Keras `keras_rule`, others `adafactor`, `rmsprop`
- Its rate: `learning_rates`; rates by group: `optimizer`
- The update of a network: `update`, layer by layer `layer_programs`; decay, loss scale and averages
  in `update_options`
"""

from lingvo_gpipe.optim.adafactor import Adafactor
from lingvo_gpipe.optim.keras_rule import KerasRule
from lingvo_gpipe.optim.learning_rates import (
    InverseSquareRoot,
    KerasLearningRate,
    LearningRate,
    WarmupStaircase,
)
from lingvo_gpipe.optim.optimizer import Optimizer
from lingvo_gpipe.optim.rmsprop import RMSProp
from lingvo_gpipe.optim.rule import Rule, RuleInputs, SlotSpec
from lingvo_gpipe.optim.update import Updater
from lingvo_gpipe.optim.update_options import Average, LossScale, WeightDecay

__all__ = [
    "Adafactor",
    "Average",
    "InverseSquareRoot",
    "KerasLearningRate",
    "KerasRule",
    "LearningRate",
    "LossScale",
    "Optimizer",
    "RMSProp",
    "Rule",
    "RuleInputs",
    "SlotSpec",
    "Updater",
    "WarmupStaircase",
    "WeightDecay",
]
