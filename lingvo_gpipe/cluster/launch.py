"""What the trainer's flags and TF_CONFIG ask of this process: to be a supervisor, and of whom."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gpipe import errors, text_file
from lingvo_gpipe.cluster import chief_supervisor, lease, local, members, worker_supervisor
from lingvo_gpipe.console.flags import Flags

TOKEN = "LINGVO_GPIPE_TOKEN"
"""The environment variable of a run's secret."""


def add_flags(flags: Flags) -> None:
    """Add the flags of several processes to a command's."""
    flags.text("workers", "local:N starts N worker processes on this machine; see also open:N.")
    flags.text("cluster", "JSON file of a cluster's addresses, like TF_CONFIG, which it replaces.")
    flags.text("job", "What this process is in the cluster: chief or worker.")
    flags.number("task", "Its number among the workers.")
    flags.text("token_file", "File with the run's secret; or set LINGVO_GPIPE_TOKEN.")
    flags.add_argument(
        "--start_timeout_s",
        type=int,
        default=300,
        help="Seconds that a chief waits for its workers.",
    )


def run(
    values: argparse.Namespace,
    arguments: Sequence[str],
    report: Callable[[str], None],
    *,
    uses_workers: bool,
) -> int | None:
    """Be a supervisor, where the flags or TF_CONFIG ask for it.

    Args:
        values: the flags.
        arguments: the command line that they were read from.
        report: receives lines for the user.
        uses_workers: whether the mode runs on workers.

    Returns:
        The exit code of the run; None where this process does the work itself.

    Raises:
        DeviceError: the cluster cannot be one, a worker is missing, or the run is given up.
    """
    named = members.read(values.cluster, values.job, values.task)
    link: Callable[[int], Any]
    if values.workers is not None:
        kind, num_workers = members.local_workers(values.workers)
        if named is not None:
            raise errors.DeviceError(
                f"--workers={values.workers} starts workers here, but --cluster or TF_CONFIG names "
                "others. Leave one of them out"
            )
        if values.job is not None or values.task is not None:
            raise errors.DeviceError(
                f"--workers={values.workers} starts the workers itself: leave out --job and --task"
            )
        if not uses_workers:
            return None
        cluster = local.cluster(num_workers, private=kind == members.LOCAL, report=report)
        link = functools.partial(local.start_worker, cluster)
    elif named is None:
        given = [flag for flag in ("job", "task") if getattr(values, flag) is not None]
        if values.job == members.WORKER or (given and not os.environ.get(members.VARIABLE)):
            raise errors.DeviceError(
                f"--{given[0]}={getattr(values, given[0])}: of which cluster? Set TF_CONFIG, or "
                "name its file by --cluster=FILE"
            )
        return None
    else:
        cluster, member = named
        if member.job == members.WORKER:
            if not uses_workers:
                report(f"{member} has nothing to do: what was asked for needs the chief alone")
                return 0
            token = _token(values)
            return asyncio.run(worker_supervisor.run(cluster, member.index, token, report))
        if not uses_workers:
            return None
        link = functools.partial(lease.take, cluster, _token(values))
    return asyncio.run(
        chief_supervisor.run(
            chief_supervisor.Options(
                cluster,
                (sys.executable, "-m", "lingvo_gpipe.trainer", *arguments),
                dict(os.environ),
                report,
                link,
                values.start_timeout_s,
            )
        )
    )


def hosts(values: argparse.Namespace) -> str | None:
    """Return the number of workers that the flags or TF_CONFIG name, as text; None: none."""
    if values.workers is not None:
        return str(members.local_workers(values.workers)[1])
    named = members.read(values.cluster, values.job, values.task)
    return None if named is None else str(len(named[0].workers))


def _token(values: argparse.Namespace) -> str:
    """Return the run's secret.

    Raises:
        DeviceError: there is none, or its file cannot be read.
    """
    token = os.environ.get(TOKEN, "").strip()
    if values.token_file is not None:
        try:
            token = text_file.read(values.token_file).strip()
        except OSError as error:
            raise errors.DeviceError(
                f"--token_file={values.token_file} cannot be read: {error.strerror}"
            ) from error
    if not token:
        raise errors.DeviceError(
            "a cluster needs a secret that all of its processes know: write any text into a file "
            "and name it by --token_file, or set LINGVO_GPIPE_TOKEN"
        )
    return token
