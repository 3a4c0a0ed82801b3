"""How weights change: update rules, learning rates, clipping, decay, averages, loss scaling.

Where gradients come from belongs to `lingvo_gpipe.execution`; "schedule" is the pipeline's word and
is not used here.
"""

from lingvo_gpipe.optim.averages import Average
from lingvo_gpipe.optim.division import Division
from lingvo_gpipe.optim.learning_rates import (
    InverseSquareRoot,
    KerasLearningRate,
    LearningRate,
    RateRange,
    WarmupStaircase,
)
from lingvo_gpipe.optim.loss_scale import LossScale
from lingvo_gpipe.optim.optimizer import Optimizer
from lingvo_gpipe.optim.rules.adafactor import Adafactor
from lingvo_gpipe.optim.rules.keras_rule import KerasRule
from lingvo_gpipe.optim.rules.rmsprop import RMSProp
from lingvo_gpipe.optim.rules.rule import Rule, RuleInputs, SlotSpec
from lingvo_gpipe.optim.update import Updater
from lingvo_gpipe.optim.weight_decay import WeightDecay

__all__ = [
    "Adafactor",
    "Average",
    "Division",
    "InverseSquareRoot",
    "KerasLearningRate",
    "KerasRule",
    "LearningRate",
    "LossScale",
    "Optimizer",
    "RMSProp",
    "RateRange",
    "Rule",
    "RuleInputs",
    "SlotSpec",
    "Updater",
    "WarmupStaircase",
    "WeightDecay",
]
