"""A run in MLflow."""

from __future__ import annotations

import os
import re
import time

from lingvo_gpipe import hyperparams
from lingvo_gpipe.hooks import trackers
from lingvo_gpipe.hooks.base import Hook, Moment

_ID_FILE = "mlflow_run_id"
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MAX_PARAMS = 100  # of one call
_MAX_CHARS = 500  # of a param in the servers with the smallest limit
_STATUS = {"signal": "KILLED", "error": "FAILED"}


class MLflowLog(Hook):
    """Sends metrics and settings to MLflow, as `train/NAME` and `eval/NAME`; extra `mlflow`.

    The file `mlflow_run_id` in the log directory names the run there, which a resumed run
    continues: steps that it does again are not sent twice. The artifact `params.txt` is the text
    of all params.
    """

    class Params(Hook.Params):
        """Params of MLflowLog."""

        interval_steps = None
        tracking_uri: str | None = hyperparams.field(
            None,
            "Server or store, such as sqlite:///mlflow.db; None: that of MLFLOW_TRACKING_URI, "
            "or MLflow's own default.",
        )
        experiment: str = hyperparams.field(
            "lingvo_gpipe", "Name of the experiment; made where it is missing."
        )
        run_name: str | None = hyperparams.field(
            None, "Name of the run; None: that of the log directory."
        )

    params: Params

    def __init__(self, params: MLflowLog.Params) -> None:
        super().__init__(params)
        self._mlflow = trackers.package("mlflow")

    @property
    def needs_network(self) -> bool:
        """Whether the store is a server."""
        uri = self.params.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        scheme, colon, _ = uri.partition(":")
        return uri == "databricks" or (bool(colon) and scheme not in ("file", "sqlite"))

    def begin(self, moment: Moment) -> None:
        """Begin a run there, or continue that of the log directory."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self.params.tracking_uri)
        kept = trackers.read_id(moment.logdir / _ID_FILE)
        if kept is None:
            self._id = self._create(moment)
            trackers.keep_id(moment.logdir / _ID_FILE, self._id)
        else:
            self._id = kept
            self._client.update_run(self._id, status="RUNNING")
        self._client.log_text(self._id, moment.params.to_text(), "params.txt")
        self._sent = {part: self._last_step(part) for part in ("train", "eval")}

    def after_update(self, moment: Moment) -> None:
        """Send the metrics of an update."""
        self._send("train", moment)

    def after_evaluation(self, moment: Moment) -> None:
        """Send the metrics of an evaluation."""
        self._send("eval", moment)

    def end(self, moment: Moment) -> None:
        """Set the status of the run there."""
        self._client.set_terminated(self._id, _STATUS.get(moment.ended, "FINISHED"))

    def _create(self, moment: Moment) -> str:
        """Create a run with the settings of this one; return its id."""
        found = self._client.get_experiment_by_name(self.params.experiment)
        experiment = (
            self._client.create_experiment(self.params.experiment)
            if found is None
            else found.experiment_id
        )
        name = self.params.run_name or moment.logdir.absolute().name
        identity = str(self._client.create_run(experiment, run_name=name).info.run_id)
        # Brackets are not allowed in names.
        params = [
            self._mlflow.entities.Param(
                _NOT_IN_NAMES.sub("", re.sub(r"\[(\d+)\]", r".\1", path)), value[:_MAX_CHARS]
            )
            for path, value in trackers.settings(moment.params).items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(identity, params=params[start : start + _MAX_PARAMS])
        return identity

    def _last_step(self, part: str) -> int:
        """Return the last step whose metrics were sent; -1: none were."""
        history = self._client.get_metric_history(self._id, f"{part}/loss")
        return max((int(metric.step) for metric in history), default=-1)

    def _send(self, part: str, moment: Moment) -> None:
        if moment.step <= self._sent[part]:
            return
        now_ms = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(
                f"{part}/{_NOT_IN_NAMES.sub('_', name)}", value, now_ms, moment.step
            )
            for name, value in moment.metrics.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)
        self._sent[part] = moment.step
