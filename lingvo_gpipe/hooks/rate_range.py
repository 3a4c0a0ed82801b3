"""A learning-rate range test: the loss at rising rates, and the rate that it suggests.

    --params_override=train.optimizer.learning_rate=optim.RateRange
    --params_override=train.hooks=[hooks.RateRangeTest]

The rate rises by the schedule of the optimizer, as any rate changes. The hook only watches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lingvo_gpipe import errors, hyperparams, optim
from lingvo_gpipe.hooks.base import Hook, Moment
from lingvo_gpipe.hooks.table import Table

_FILE = "rate_range.csv"
_RATE, _LOSS, _SMOOTHED = "learning_rate", "loss", "smoothed_loss"


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """What the losses of rising rates suggest.

    Attributes:
        steepest: rate at which the smoothed loss falls fastest.
        lowest: rate at which it is lowest.
    """

    steepest: float
    lowest: float

    @property
    def rate(self) -> float:
        """A tenth of the rate with the lowest loss.

        Source: `lr_find` of Howard and Gugger 2020, fastai.
        """
        return self.lowest / 10.0


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion | None:
    """Return what losses suggest; None if no rate lowered the loss.

    Args:
        rates: [n] rising rates.
        losses: [n] smoothed losses.
    """
    if len(rates) < 3:
        return None
    best = int(np.argmin(losses))
    if best == 0:
        return None
    slopes = np.gradient(np.asarray(losses), np.log(rates))[: best + 1]
    return Suggestion(steepest=float(rates[int(np.argmin(slopes))]), lowest=float(rates[best]))


class RateRangeTest(Hook):
    """Records the loss of each rate of `optim.RateRange`, stops the run, and suggests a rate.

    The run ends when the smoothed loss is `divergence` times its lowest value, or when all rates
    were tried. `rate_range.csv` in the log directory has a row for each update.

    Source: Smith 2017, Cyclical Learning Rates for Training Neural Networks, section 3.3.
    """

    in_dry_run = True

    class Params(Hook.Params):
        """Params of RateRangeTest."""

        smoothing: float = hyperparams.field(
            0.9, "Share of the earlier losses in the smoothed loss, from 0 to below 1."
        )
        divergence: float = hyperparams.field(
            4.0, "The run ends at this multiple of the lowest smoothed loss."
        )

    params: Params

    def __init__(self, params: RateRangeTest.Params) -> None:
        super().__init__(params)
        if not 0.0 <= params.smoothing < 1.0:
            raise errors.ParamsError(f"smoothing={params.smoothing} is not from 0 to below 1")
        if params.divergence <= 1.0:
            raise errors.ParamsError(
                f"divergence={params.divergence} is too small. Use more than 1"
            )
        if params.interval_steps != 1:
            raise errors.ParamsError(
                f"interval_steps={params.interval_steps}, but every update has another rate. Use 1"
            )

    def begin(self, moment: Moment) -> None:
        """Check that the rate rises, and take up the losses of a run that was cut off."""
        rate = moment.params.train.optimizer.learning_rate
        if not isinstance(rate, optim.RateRange.Params):
            raise errors.HookError(
                "the rate does not rise: set train.optimizer.learning_rate=optim.RateRange"
            )
        self._steps = rate.steps
        self._table = Table(moment.logdir / _FILE)
        rows = self._table.resume(moment.step)
        self._rates = [row[_RATE] for row in rows]
        self._losses = [row[_LOSS] for row in rows]
        self._smoothed = [row[_SMOOTHED] for row in rows]

    def after_update(self, moment: Moment) -> None:
        """Record the loss; ask for a stop when the test is over."""
        metrics = moment.metrics
        self._rates.append(metrics[_RATE])
        self._losses.append(metrics[_LOSS])
        self._smoothed.append(self._next_smoothed())
        row = {_RATE: self._rates[-1], _LOSS: self._losses[-1], _SMOOTHED: self._smoothed[-1]}
        self._table.append(moment.step, row)
        lowest = min(self._smoothed)
        if self._smoothed[-1] - lowest > (self.params.divergence - 1.0) * abs(lowest):
            moment.ask_to_stop(f"the loss rises at a rate of {self._rates[-1]:.2g}")
        elif moment.step >= self._steps:
            moment.ask_to_stop(f"all {self._steps} rates were tried")

    def end(self, moment: Moment) -> None:
        """Report the suggestion, unless the run was only interrupted."""
        if moment.ended == "signal" or not self._rates:
            return
        found = suggest(self._rates, self._smoothed)
        tried = (
            f"range test of {len(self._rates)} learning rates from {self._rates[0]:.2g} to "
            f"{self._rates[-1]:.2g}"
        )
        if found is None:
            moment.report(f"{tried}: none lowered the loss. Set other rates of optim.RateRange")
        else:
            moment.report(
                f"{tried}: the loss falls fastest at {found.steepest:.2g} and is lowest at "
                f"{found.lowest:.2g}; try train.optimizer.learning_rate={found.rate:.2g}, a tenth "
                f"of that. {moment.logdir / _FILE} has all losses"
            )

    def _next_smoothed(self) -> float:
        """Return the mean of all losses, each `smoothing` times as heavy as the next."""
        share, count = self.params.smoothing, len(self._losses)
        weights = [share ** (count - 1 - number) for number in range(count)]
        return math.fsum(map(math.prod, zip(weights, self._losses, strict=True))) / sum(weights)
