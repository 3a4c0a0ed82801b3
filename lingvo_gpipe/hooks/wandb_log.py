"""A run in Weights & Biases."""

from __future__ import annotations

import os
from typing import Literal

from lingvo_gpipe import hyperparams
from lingvo_gpipe.hooks import trackers
from lingvo_gpipe.hooks.base import Hook, Moment

_ID_FILE = "wandb_run_id"


class WandbLog(Hook):
    """Sends metrics and settings to Weights & Biases; extra `wandb`.

    Metrics are `train/NAME` and `eval/NAME`. The file `wandb_run_id` in the log directory names
    the run there, which a resumed run continues. Its own files are in `wandb/` there; with
    `mode="offline"` nothing is sent, and `wandb sync` sends these files later.
    """

    class Params(Hook.Params):
        """Params of WandbLog."""

        interval_steps = None
        project: str = hyperparams.field("lingvo_gpipe", "Name of the project.")
        run_name: str | None = hyperparams.field(
            None, "Name of the run; None: that of the log directory."
        )
        mode: Literal["online", "offline"] | None = hyperparams.field(
            None, "Whether metrics are sent; None: as WANDB_MODE says, or online."
        )

    params: Params

    def __init__(self, params: WandbLog.Params) -> None:
        super().__init__(params)
        self._wandb = trackers.package("wandb")

    @property
    def needs_network(self) -> bool:
        """Whether metrics are sent."""
        mode = self.params.mode or os.environ.get("WANDB_MODE", "online")
        return mode not in ("offline", "disabled", "dryrun")

    def begin(self, moment: Moment) -> None:
        """Begin a run there, or continue that of the log directory."""
        self._run = self._wandb.init(
            project=self.params.project,
            name=self.params.run_name or moment.logdir.absolute().name,
            id=trackers.read_id(moment.logdir / _ID_FILE),
            dir=str(moment.logdir),
            config=trackers.settings(moment.params),
            allow_val_change=True,
            mode=self.params.mode,
            resume="allow",
            # The output stays as it is.
            settings=self._wandb.Settings(console="off"),
        )
        trackers.keep_id(moment.logdir / _ID_FILE, self._run.id)

    def after_update(self, moment: Moment) -> None:
        """Send the metrics of an update."""
        self._send("train", moment)

    def after_evaluation(self, moment: Moment) -> None:
        """Send the metrics of an evaluation."""
        self._send("eval", moment)

    def end(self, moment: Moment) -> None:
        """Send what is left, and say whether the run failed."""
        self._run.finish(exit_code=int(moment.ended == "error"))

    def _send(self, part: str, moment: Moment) -> None:
        metrics = {f"{part}/{name}": value for name, value in moment.metrics.items()}
        self._run.log(metrics, step=moment.step)
