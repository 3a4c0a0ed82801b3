"""Runs a benchmark's configurations, each in a process of its own, in interleaved rounds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.support import machine


def rounds(module: str, configurations: Sequence[str], count: int) -> dict[str, list[Any]]:
    """Run `python -m module CONFIGURATION` for each of them, `count` times in turn.

    Args:
        module: prints one JSON object on its last line when given a configuration.
        configurations: texts, one argument each.
        count: rounds.

    Returns:
        configuration → what its runs printed, each with `other_load`: cores used by others.
    """
    found: dict[str, list[Any]] = {name: [] for name in configurations}
    for _ in range(count):
        for name in configurations:
            load = machine.Load()
            done = subprocess.run(
                [sys.executable, "-m", module, name], check=False, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{module} {name} failed:\n{done.stderr[-2000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            found[name].append({**result, "other_load": load.stop()})
    return found


QUIET_CORES = 0.06
"""A repetition during which other processes took more cores than this does not count."""


def quiet(runs: Sequence[Any]) -> list[Any]:
    """Return the runs that were not disturbed by other processes; all, if every run was."""
    return [run for run in runs if run["other_load"] <= QUIET_CORES] or list(runs)


def disturbed(runs: Sequence[Any]) -> int:
    """Return how many runs other processes disturbed."""
    return sum(run["other_load"] > QUIET_CORES for run in runs)


def median(runs: Sequence[Any], key: str) -> float:
    """Return the median of one figure over runs."""
    return float(statistics.median(run[key] for run in runs))


def spread(runs: Sequence[Any], key: str) -> str:
    """Return a figure's smallest and largest value over runs."""
    values = [run[key] for run in runs]
    return f"{min(values):.3f} to {max(values):.3f}"
