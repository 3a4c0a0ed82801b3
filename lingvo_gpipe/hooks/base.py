"""The base class of hooks, and what a hook receives.

class Note(hooks.Hook):
    def after_evaluation(self, moment):
        moment.report(f"step {moment.step}: {moment.metrics['accuracy']:.2f}")

train = task.Train(hooks=(Note.Params(),), ...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lingvo_gpipe import hyperparams

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

Ended = Literal["", "max_steps", "patience", "hook", "signal", "error"]
"""How a run ended; empty: it has not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a hook receives: where a run is, and what it may be asked for.

    Attributes:
        step: number of updates done; of `after_checkpoint`, of the weights in the checkpoint.
        logdir: log directory of the run.
        params: the run's params, frozen.
        read_metrics: returns the metrics; they are copied from their devices when it is called.
        report: prints a line for the user.
        ask_to_save: asks for a checkpoint, after this update or the next.
        ask_to_stop: asks for the end of the run after this update, for a reason: the run then
            evaluates and saves as at its last step.
        checkpoint: of `after_checkpoint`: prefix of its files.
        ended: of `end`: how the run ended.
    """

    step: int
    logdir: Path
    params: Task.Params
    read_metrics: Callable[[], Mapping[str, float]]
    report: Callable[[str], None]
    ask_to_save: Callable[[], None]
    ask_to_stop: Callable[[str], None]
    checkpoint: str = ""
    ended: Ended = ""

    @property
    def metrics(self) -> dict[str, float]:
        """Name → number, as TensorBoard shows it: of the update, evaluation or checkpoint.

        Of `end`, those of the last evaluation. Empty where there are none.
        """
        return dict(self.read_metrics())


class Hook(hyperparams.Configurable):
    """Base of hooks: an object whose methods a run calls in the process that drives it.

    A subclass defines those methods that it needs. `__init__` checks what can be checked without
    doing anything, such as whether a package is installed: it is called before the run begins, and
    in a dry run. Whatever a method raises ends the run after a checkpoint, or is reported, as
    `on_error` says.

    Attributes:
        in_dry_run: whether a dry run calls the hook. Then it must write nowhere but below
            `Moment.logdir`, which is a temporary folder there.
    """

    class Params(hyperparams.Configurable.Params):
        """Params of Hook."""

        interval_steps: int | None = hyperparams.field(
            1, "Updates between two calls of after_update; None: train.log_interval_steps."
        )
        on_error: Literal["end", "log"] = hyperparams.field(
            "end",
            "What a failure does: ends the run after a checkpoint, or is reported once and the "
            "hook is not called again.",
        )

    params: Any
    in_dry_run: ClassVar[bool] = False

    @property
    def needs_network(self) -> bool:
        """Whether it reaches other hosts: `--workers=local:N` then makes no private network."""
        return False

    def begin(self, moment: Moment) -> None:
        """Begin; `moment.step` is above 0 where a run is resumed."""

    def after_update(self, moment: Moment) -> None:
        """Do something after an update, at each `interval_steps`."""

    def after_evaluation(self, moment: Moment) -> None:
        """Do something after an evaluation of a `train_eval` run."""

    def after_checkpoint(self, moment: Moment) -> None:
        """Do something after a checkpoint is on the disk, which may be some updates later."""

    def end(self, moment: Moment) -> None:
        """End, in whichever way the run does; a process that is killed does not call this."""
