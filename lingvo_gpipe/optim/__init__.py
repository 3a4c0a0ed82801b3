"""How weights change: update rules, learning rates, clipping, decay, averages, loss scaling.

Where gradients come from belongs to `lingvo_gpipe.execution`; "schedule" is the pipeline's word and
is not used here.
"""

from lingvo_gpipe.optim.adafactor import Adafactor
from lingvo_gpipe.optim.image_schedules import WarmupStaircase
from lingvo_gpipe.optim.inverse_sqrt import InverseSquareRoot
from lingvo_gpipe.optim.optimizer import (
    KerasRule,
    KerasSchedule,
    Optimizer,
    Rule,
    Schedule,
    SlotSpec,
)
from lingvo_gpipe.optim.rmsprop import RMSProp
from lingvo_gpipe.optim.update import Average, LossScale, Updater, WeightDecay

__all__ = [
    "Adafactor",
    "Average",
    "InverseSquareRoot",
    "KerasRule",
    "KerasSchedule",
    "LossScale",
    "Optimizer",
    "RMSProp",
    "Rule",
    "Schedule",
    "SlotSpec",
    "Updater",
    "WarmupStaircase",
    "WeightDecay",
]
