"""Hooks: code that a run calls when something has happened, and the hooks that come with us.

A hook receives copies of numbers, so it cannot change any; what changes numbers is a layer, an
input, or a part of `lingvo_gpipe.optim`. When a run calls its hooks is decided by
`lingvo_gpipe.run.loop`.
"""

from lingvo_gpipe.hooks.base import Hook, Moment
from lingvo_gpipe.hooks.csv_log import CSVLog
from lingvo_gpipe.hooks.mlflow_log import MLflowLog
from lingvo_gpipe.hooks.rate_range import RateRangeTest
from lingvo_gpipe.hooks.wandb_log import WandbLog

__all__ = ["CSVLog", "Hook", "MLflowLog", "Moment", "RateRangeTest", "WandbLog"]
