"""The metrics of a run as CSV files."""

from __future__ import annotations

from pathlib import PurePath

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.hooks.base import Hook, Moment
from lingvo_gpipe.hooks.table import Table


class CSVLog(Hook):
    """Writes the metrics of updates and of evaluations as two CSV files, a row per step.

    A resumed run continues its files, and no step has two rows.
    """

    in_dry_run = True

    class Params(Hook.Params):
        """Params of CSVLog."""

        interval_steps = None
        train_file: str = hyperparams.field(
            "train_metrics.csv", "Name in the log directory, for the metrics of updates."
        )
        eval_file: str = hyperparams.field(
            "eval_metrics.csv", "Name in the log directory, for the metrics of evaluations."
        )

    params: Params

    def __init__(self, params: CSVLog.Params) -> None:
        super().__init__(params)
        for field in ("train_file", "eval_file"):
            name = getattr(params, field)
            if PurePath(name).name != name or name in ("", ".", ".."):
                raise errors.ParamsError(
                    f"{field}={name!r} is not the name of a file in the log directory"
                )
        if params.train_file == params.eval_file:
            raise errors.ParamsError(
                f"train_file and eval_file are both {params.eval_file!r}. Name two files"
            )

    def begin(self, moment: Moment) -> None:
        """Continue the files that there are."""
        self._train = Table(moment.logdir / self.params.train_file)
        self._eval = Table(moment.logdir / self.params.eval_file)
        for table in (self._train, self._eval):
            table.resume(moment.step)

    def after_update(self, moment: Moment) -> None:
        """Write a row of the update."""
        self._train.append(moment.step, moment.metrics)

    def after_evaluation(self, moment: Moment) -> None:
        """Write a row of the evaluation."""
        self._eval.append(moment.step, moment.metrics)
