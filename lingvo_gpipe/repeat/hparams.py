"""Event files from which TensorBoard's HParams page shows several runs, written without TensorFlow.

A run is a *session* there: a file in its folder with its settings, when it began and how it ended.
A file in the folder of all runs says which settings and metrics are shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
from tensorboard.summary.writer import record_writer

from lingvo_gpipe import errors
from lingvo_gpipe.console import output

_FILE = "events.out.tfevents.0.hparams"
_EVALUATIONS = "eval"  # folder of a run whose last point of each curve is shown


def begin(folder: Path, name: str, values: Mapping[str, float | str]) -> None:
    """Write that a run of this name begins with settings; what was written of it is replaced.

    Raises:
        ParamsError: its folder cannot be made.
    """
    summary = summary_v2.hparams_pb(dict(values), trial_id=name, start_time_secs=time.time())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ParamsError(
            f"{folder} cannot be made: {error.strerror}. Give another --logdir, or correct its "
            "permissions"
        ) from error
    _write(folder / _FILE, summary, "wb")


def end(folder: Path, *, failed: bool) -> None:
    """Write that the run has ended."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=ended)
    summary = summary_pb2.Summary()
    summary.value.add(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    _write(folder / _FILE, summary, "ab")


def show(logdir: Path, values: Mapping[str, Sequence[float | str]], metrics: Sequence[str]) -> None:
    """Write which settings and metrics the page shows.

    Args:
        logdir: folder of all runs.
        values: name of each setting, and all of its values.
        metrics: names of metrics of evaluations.
    """
    hparams = [
        # Discrete values have one type.
        summary_v2.HParam(
            name,
            summary_v2.Discrete(
                each if all(isinstance(value, float) for value in each) else list(map(str, each))
            ),
        )
        for name, each in values.items()
    ]
    shown = [summary_v2.Metric(name, group=_EVALUATIONS) for name in metrics]
    summary = summary_v2.hparams_config_pb(hparams, shown, time_created_secs=time.time())
    _write(logdir / _FILE, summary, "wb")


def _write(path: Path, summary: summary_pb2.Summary, mode: str) -> None:
    """Write a summary to a file of events; a run goes on if it cannot be written."""
    event = event_pb2.Event(wall_time=time.time(), summary=summary)
    try:
        with contextlib.closing(record_writer.RecordWriter(path.open(mode))) as writer:
            if mode == "wb":
                version = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
                writer.write(version.SerializeToString())
            writer.write(event.SerializeToString())
    except OSError as error:
        output.note(
            f"{path} cannot be written, so that the HParams page lacks it: {error.strerror}"
        )
